"""The table of crash points in the README, row by row: a process that is killed exactly there, and what the next start does."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import tiny_checkpoint
from longscan.jobs.run import main
from longscan.pipeline.commit.lock import RunLock
from processes import status
from starts import DIE, Starts
from tiny_jobs import same_tables, snapshot, success, texts, words, write_input
from waiting import until

SHARDS = 4
MORE = ("task=embed_score", "task.embedding.window_tokens=64", "task.score.window_tokens=64", "max_errors=1", "cluster=inprocess")

PATCH = (
    DIE
    + """
import leisure
from longscan.pipeline.keep import carryfiles
from longscan.pipeline.storage import disk
from longscan.pipeline.commit import ledger
from longscan.pipeline.output import folder as output
from longscan.pipeline.worker import suspects
from longscan.pipeline.write import tables
from longscan.pipeline.write import writer as write
def at(place, name, when, whole, before=True):
    # `whole`, which dies before or after it has done what it is asked, where `when` says so of its arguments
    def patched(*a, **k):
        if before and when(*a): die()
        result = whole(*a, **k)
        if not before and when(*a): die()
        return result
    setattr(place, name, patched)
second = lambda path, to: to.name.startswith("part-00001")
carries = 0
def nth_carry(name):
    global carries
    carries += name.endswith(".carry")
    return carries == 2 and name.endswith(".carry")
def half(path, data, whole=disk._temporary_beside):
    if not nth_carry(path): return whole(path, data)
    with open(os.path.join(os.path.dirname(path), ".longscan-half"), "wb") as file: file.write(data[: len(data) // 2])
    die()
"""
)

CRASHES = {
    "with_the_lock_just_taken": "at(output, '_remove_leftovers', lambda *_: True, output._remove_leftovers)",
    "in_the_planner_before_the_plan": "at(output, 'atomic_write', lambda to, _: to.name == 'plan.json', output.atomic_write)",
    "in_the_planner_behind_the_plan": "at(output, 'atomic_write', lambda to, _: to.name == 'fingerprint.json', output.atomic_write)",
    "before_the_write": "at(write.PartWriter, '_open_tables', lambda part, _: part._shard.index == 1, write.PartWriter._open_tables)",
    "in_the_write": "at(tables.PartFile, 'write', lambda *_: True, tables.PartFile.write, before=False)",
    "in_the_middle_of_a_carrys_save": "leisure.take(); disk._temporary_beside = half",
    "with_a_carry_whole_and_not_moved": "leisure.take(); at(disk.os, 'replace', lambda _, to: nth_carry(to), disk.os.replace)",
    "behind_a_carry_with_the_one_before_still_there": "leisure.take(); at(carryfiles, 'remove', lambda _: True, carryfiles.remove)",
    "with_the_files_whole_and_none_moved": "at(write, 'commit_file', lambda path, to: second(path, to), write.commit_file)",
    "between_two_files_of_a_shard": (
        "at(write, 'commit_file', lambda path, to: second(path, to) and to.parent.name == 'errors', write.commit_file)"
    ),
    "behind_a_move_whose_folder_is_not_synced": ("at(disk, 'sync_folder', lambda folder: folder.endswith('documents'), disk.sync_folder)"),
    "before_the_manifest": "at(write, 'write_report', lambda _, report: report.index == 1, write.write_report)",
    "in_the_manifest": "at(disk.os, 'replace', lambda _, to: to.endswith('manifest/00001.json'), disk.os.replace)",
    "behind_the_manifest": "at(write, 'write_report', lambda _, report: report.index == 1, write.write_report, before=False)",
    "before_success": "at(output, 'atomic_write', lambda to, _: to.name == '_SUCCESS', output.atomic_write)",
    "in_success": "at(disk.os, 'replace', lambda _, to: to.endswith('_SUCCESS'), disk.os.replace)",
    "behind_success": "at(output, 'atomic_write', lambda to, _: to.name == '_SUCCESS', output.atomic_write, before=False)",
}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    with Starts(tmp_path_factory.mktemp("starts")) as starts:
        yield starts


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command line but for its output: four shards, one row an error, carries of all documents but the shortest."""
    folder = tmp_path_factory.mktemp("job")
    model = tiny_checkpoint(folder / "model", tokenizer=True)
    source = write_input(folder / "in.parquet", [*texts(7), None], row_group=2)
    return [
        word
        for word in words(model, source, "", "output.shard_tokens=300", "engine.checkpoint_tokens=64", *MORE)
        if not word.startswith("output.path")
    ]


@pytest.fixture(scope="module")
def undisturbed(starts: Starts, job: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    ended = starts.start([*job, f"output.path={out}"])
    assert ended.code == 0, ended.said
    assert success(out)["shards"] == SHARDS
    return out


def reports(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (out / "_run" / "manifest").glob("*.json")}


@pytest.mark.parametrize("crash", CRASHES.values(), ids=CRASHES.keys())
def test_a_crash_and_the_next_start(starts: Starts, job: list[str], undisturbed: Path, tmp_path: Path, crash: str) -> None:
    out = tmp_path / "out"
    command = [*job, f"output.path={out}"]
    died = starts.start(command, PATCH + crash)
    assert died.code == -9, died.said
    assert "half" not in crash or list(out.glob("_run/carries/*/.longscan-*")), "half a carry is left"
    before = reports(out)
    readable = sorted(path.relative_to(out) for path in out.glob("*/part-*.parquet"))
    for name in readable:
        assert (out / name).read_bytes()[-4:] == b"PAR1", "no half file under a part's name"
    ended = starts.start(command)
    assert ended.code == 0, ended.said
    assert same_tables(out, undisturbed) == ["documents", "errors", "windows"]
    after = reports(out)
    assert len(after) == SHARDS
    assert {name: after[name] for name in before} == before, "what was done is not done again"
    assert not [path for path in out.rglob("*") if path.name.startswith(".longscan-") or path.name == "tmp"], "nothing is left behind"


ASLEEP = """
import signal, threading
from longscan.pipeline.output import metrics
from longscan.pipeline.write import writer as write
metrics.WRITE_S = 0.0  # it wakes up when they are due
whole, asleep = write.gate, threading.Lock()
def gate(*a, **k):
    with asleep:  # no other shard's thread is in the gate meanwhile
        if write.gate is gate:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to this thread, or another takes it while this one goes on
            write.gate = whole
    return whole(*a, **k)
write.gate = gate
"""


def test_who_was_taken_for_dead_and_wakes_up_changes_nothing(
    starts: Starts, job: list[str], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that falls asleep before a commit's gate; a start on what it takes for another machine goes on without it."""
    out = tmp_path / "out"
    command = [*job, f"output.path={out}"]
    asleep = starts.begin(command, ASLEEP)
    until(lambda: status(asleep)[0] == "T")
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr(RunLock.__init__, "__kwdefaults__", RunLock.__init__.__kwdefaults__ | {"beat_s": 0.1, "stale_s": 0.0})
    try:
        assert main(command) == 0
        before = snapshot(out)
    finally:
        os.kill(asleep, signal.SIGCONT)
        late = starts.end()
    assert late.code == 2
    assert "another run has taken this output over" in late.said
    after = snapshot(out)
    assert {name: after[name] for name in before} == before, "nothing of it is replaced"
    assert same_tables(out, undisturbed) == ["documents", "errors", "windows"]

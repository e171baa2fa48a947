"""A run's folder: new, gone on with, finished, another's; one run at a time; the mark that comes last."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from longscan.pipeline.commit import lock as locking
from longscan.pipeline.commit.lock import Owner, RunLock
from longscan.pipeline.config import ScoreConfig, TaskConfig
from longscan.pipeline.errors import OutputError, Stopped
from longscan.pipeline.output import folder as outputs
from longscan.pipeline.output.folder import open_output
from longscan.pipeline.plan.planner import Plan, make_plan
from longscan.pipeline.records import Document, DocumentRow, ErrorRow
from longscan.pipeline.shards import RowGroup, SourceFile
from longscan.pipeline.storage.location import Location, atomic_write, children, exists, locate, read_bytes
from longscan.pipeline.write.writer import Writer
from processes import status
from waiting import until

TASK = TaskConfig("score", score=ScoreConfig(per_token=True))
FILES = [SourceFile(f"/in/{i}.parquet", f"{i}.parquet", 10, "mtime_ns:1", (RowGroup(2, 4000),)) for i in range(3)]
FACTS: dict[str, Any] = {"task": {"name": "score", "pooling": ("mean",)}, "seed": 0, "files": [["0.parquet", 10, "mtime_ns:1"]]}
OTHER = {**FACTS, "seed": 1}


@pytest.fixture(params=["local", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "out") if request.param == "local" else f"memory://{uuid.uuid4().hex}/out"


def plan() -> Plan:
    return make_plan(FILES, shard_tokens=1000)


def write_shard(place: Location, index: int) -> None:
    shard = plan().shards[index]
    file = shard.pieces[0].file.name
    import pyarrow as pa

    empty = pa.RecordBatch.from_arrays([], names=[])
    with Writer(place, TASK, 4).open(shard) as part:
        part.add(ErrorRow(0, None, file, 0, "read", "NullText", "null"))
        part.add(DocumentRow(Document(1, f"{file}#1", file, 1, None, None, empty), 5 + index, {}, -1.0, 4, 9, 0.5))
        part.commit()


def whole_run(path: str, facts: dict[str, Any] = FACTS) -> None:
    with open_output(path, facts) as run:
        run.start(plan())
        for index in range(3):
            write_shard(run.place, index)
        run.finish(plan(), TASK)


def tree(place: Location) -> dict[str, bytes]:
    """Every file of a run but its lock."""
    found = place.fs.find(place.path)
    return {
        name[len(place.path) :]: place.fs.cat_file(name) for name in found if "/_run/lock/" not in name and not name.endswith("/_run/gate")
    }


def test_a_new_run_from_start_to_success(path: str) -> None:
    with open_output(path, FACTS) as run:
        assert not run.started
        assert not run.finished
        run.start(plan())
        assert run.started
        assert run.plan(FILES) == plan()
        assert run.reports() == {}
        with pytest.raises(OutputError, match="3 of 3 shards not done yet; run the same command again"):
            run.finish(plan(), TASK)
        for index in (2, 0, 1):
            write_shard(run.place, index)
        assert sorted(run.reports()) == [0, 1, 2]
        assert not run.finished
        summary = run.finish(plan(), TASK, seconds=1.5)
        assert run.finished
    assert summary == {
        "fingerprint": run.fingerprint,
        "shards": 3,
        "documents": 3,
        "errors": 3,
        "tokens": 18,
        "windows": 0,
        "seconds": 1.5,
    }
    assert json.loads(read_bytes(locate(path) / "_SUCCESS") or b"") == summary == run.summary()
    assert children(locate(path)) == ["_SUCCESS", "_run", "documents", "errors", "tokens"]


def test_a_finished_run_is_found_finished_and_untouched(path: str) -> None:
    whole_run(path)
    before = tree(locate(path))
    with open_output(path, FACTS) as run, open_output(path, FACTS) as beside:
        assert run.finished
        assert beside.finished
        assert run.plan(FILES) == plan()
    assert tree(locate(path)) == before


def test_an_unfinished_run_goes_on(path: str) -> None:
    with open_output(path, FACTS) as run:
        run.start(plan())
        write_shard(run.place, 1)
    before = tree(locate(path))
    with open_output(path, json.loads(json.dumps(FACTS))) as run:
        assert run.started
        assert not run.finished
        assert list(run.reports()) == [1]
        assert run.plan(FILES) == plan()
        assert tree(locate(path)) == before


def test_a_start_that_ended_before_the_folder_was_a_run_leaves_nothing_in_the_way(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner crashes between the plan and the mark that makes the folder a run."""
    whole = outputs.atomic_write

    def crashing(place: Location, data: bytes) -> None:
        if place.name == "fingerprint.json":
            raise KeyboardInterrupt
        whole(place, data)

    with monkeypatch.context() as patch:
        patch.setattr(outputs, "atomic_write", crashing)
        with pytest.raises(KeyboardInterrupt), open_output(path, FACTS) as run:
            run.start(plan())
    with open_output(path, OTHER) as run:
        assert not run.started


def test_a_crash_before_success_is_a_run_to_go_on_with(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with open_output(path, FACTS) as run, monkeypatch.context() as patch:
        run.start(plan())
        for index in range(3):
            write_shard(run.place, index)
        patch.setattr(outputs, "atomic_write", crash)
        with pytest.raises(KeyboardInterrupt):
            run.finish(plan(), TASK)
    with open_output(path, FACTS) as run:
        assert not run.finished
        assert len(run.reports()) == 3
        assert run.finish(plan(), TASK)["documents"] == 3


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_of_other_facts_is_refused_with_what_changed(path: str, finished: bool) -> None:
    if finished:
        whole_run(path)
    else:
        with open_output(path, FACTS) as run:
            run.start(plan())
    before = tree(locate(path))
    new = {**OTHER, "files": [["0.parquet", 11, "mtime_ns:1"]]}
    with pytest.raises(OutputError) as caught:
        open_output(path, new)
    assert str(caught.value).splitlines()[1:] == [
        "  seed: 0 -> 1",
        "  input file 0.parquet changed size: 10 -> 11 bytes",
        "To go on with that run set these keys as they were and put the input files back as they were; else set "
        "another output.path, or output.overwrite=true to replace it",
    ]
    assert tree(locate(path)) == before


FOREIGN: dict[str, Callable[[Location], None]] = {
    "a file of somebody's": lambda place: atomic_write(place / "thesis.tex", b"x"),
    "parquet of somebody's": lambda place: atomic_write(place / "documents" / "part-00000-of-00001.parquet", b"x"),
    "a _run of somebody's": lambda place: atomic_write(place / "_run" / "diary.txt", b"x"),
    "a file beside a lock": lambda place: [atomic_write(place / name / "000001", b"x") for name in ("_run/lock", "other")] and None,
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("what", FOREIGN)
def test_a_folder_that_is_not_a_run_is_refused_and_not_touched(path: str, what: str, overwrite: bool) -> None:
    FOREIGN[what](locate(path))
    before = locate(path).fs.find(locate(path).path)
    with pytest.raises(OutputError, match=r"expected an empty folder or a run of longscan, found .*; nothing was touched"):
        open_output(path, FACTS, overwrite=overwrite)
    assert locate(path).fs.find(locate(path).path) == before


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    with open_output(str(tmp_path), FACTS) as run:
        assert not run.started


@pytest.mark.parametrize("facts", [FACTS, OTHER], ids=["same", "other"])
def test_overwrite_replaces_a_run_and_nothing_else(path: str, facts: dict[str, Any]) -> None:
    whole_run(path)
    place = locate(path)
    atomic_write(place / "documents" / "notes.txt", b"mine")
    atomic_write(place / "README", b"mine too")
    atomic_write(place / "_run" / "carries" / "00000" / "0.bin", b"ours")
    with open_output(path, facts, overwrite=True) as run:
        assert not run.started
        assert not run.finished
        assert run.reports() == {}
        assert sorted(tree(place)) == ["/README", "/documents/notes.txt"]
        run.start(plan())
        for index in range(3):
            write_shard(place, index)
        run.finish(plan(), TASK)
    assert read_bytes(place / "documents" / "notes.txt") == b"mine"
    with open_output(path, facts) as run:
        assert run.finished


@pytest.mark.parametrize("after", range(1, 12))
def test_an_overwrite_that_is_cut_short_leaves_a_run_or_nothing(tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "out")
    whole_run(path)
    left = [after]

    def counted(whole: Callable[..., None]) -> Callable[..., None]:
        def removing(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            whole(*arguments)

        return removing

    with monkeypatch.context() as patch:
        for name in ("remove", "remove_all", "remove_tree"):
            patch.setattr(outputs, name, counted(getattr(outputs, name)))
        try:
            open_output(path, FACTS, overwrite=True).close()
        except KeyboardInterrupt:
            pass
        else:
            assert after > 8, "enough for the whole removal"
    with open_output(path, FACTS) as run:
        for index in set(range(3)) - set(run.reports()):
            assert not run.finished
            if not run.started:
                run.start(plan())
            assert run.plan(FILES) == plan()
            write_shard(run.place, index)
        if not run.finished:
            run.finish(plan(), TASK)
        assert len(children(run.place / "documents")) == 3


def test_overwrite_waits_for_nobody_elses_run(path: str) -> None:
    with open_output(path, FACTS) as run:
        run.start(plan())
        write_shard(run.place, 0)
        with pytest.raises(OutputError, match="another run is at work"):
            open_output(path, FACTS, overwrite=True)
        assert list(run.reports()) == [0]


def test_a_part_that_is_gone_is_made_anew(path: str) -> None:
    with open_output(path, FACTS) as run:
        run.start(plan())
        for index in range(3):
            write_shard(run.place, index)
        part = run.place / "errors" / "part-00001-of-00003.parquet"
        run.place.fs.rm_file(part.path)
        with pytest.raises(OutputError, match=r"parts of finished shards that are gone: 1, the first errors/part-00001-of-00003"):
            run.finish(plan(), TASK)
        assert not run.finished
        assert sorted(run.reports()) == [0, 2]
        write_shard(run.place, 1)
        run.finish(plan(), TASK)


def test_leftovers_of_a_crash_are_removed_and_nothing_else(tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    with open_output(path, FACTS) as run:
        run.start(plan())
        write_shard(run.place, 0)
    ours = ["_run/tmp/00001-000001-documents.parquet", "_run/.longscan-plan.json-00ff", "_run/manifest/.longscan-00001.json-00ff"]
    theirs = ["documents/.longscan-mine", ".profile"]
    for name in ours + theirs:
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_text("x")
    with open_output(path, FACTS) as run:
        assert list(run.reports()) == [0]
        assert not any((tmp_path / "out" / name).exists() for name in ours)
        assert all((tmp_path / "out" / name).exists() for name in theirs)


def test_a_crash_leaves_the_output_open_to_others_only_in_a_new_start(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".longscan-_SUCCESS-00ff").write_text("x")
    with open_output(str(tmp_path / "out"), FACTS) as run:
        assert children(run.place) == ["_run"]


@pytest.mark.parametrize("name", ["fingerprint.json", "plan.json"])
def test_a_run_whose_files_are_damaged_says_so(path: str, name: str) -> None:
    with open_output(path, FACTS) as run:
        run.start(plan())
    place = locate(path) / "_run" / name
    place.fs.pipe_file(place.path, b"{")
    with pytest.raises(OutputError, match="cannot be read"), open_output(path, FACTS) as run:
        run.plan(FILES)
    place.fs.rm_file(place.path)
    if name == "plan.json":
        with pytest.raises(OutputError, match="expected its plan"), open_output(path, FACTS) as run:
            run.plan(FILES)


def test_an_output_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(OutputError, match="out: expected a folder, or nothing yet"):
        open_output(str(tmp_path / "out"), FACTS)
    with pytest.raises(OutputError, match="out/x: expected a folder, or nothing yet"):
        open_output(str(tmp_path / "out" / "x"), FACTS)


def test_an_output_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "makedirs", read_only)
    with pytest.raises(OutputError, match=r"Read-only file system.*Set output.path to a place that this user may write to"):
        open_output(str(tmp_path / "out"), FACTS)


def test_no_path_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError, match="expected a path"):
        open_output("", FACTS)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("denied for memory://me:s3cr3t@x")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.ls", refuse)
    with pytest.raises(OutputError) as caught:
        open_output("memory://me:s3cr3t@x/out", FACTS)
    assert "s3cr3t" not in str(caught.value)
    assert "denied for memory://***@x" in str(caught.value)


# The lock.


def test_one_of_many_starts_gets_the_output(tmp_path: Path) -> None:
    def start(_: int) -> RunLock | None:
        try:
            return RunLock(locate(str(tmp_path)))
        except OutputError:
            return None

    with ThreadPoolExecutor(8) as pool:
        locks = list(pool.map(start, range(16)))
    (held,) = [lock for lock in locks if lock is not None]
    held.release()
    held.release()
    RunLock(locate(str(tmp_path))).release()


def test_the_second_run_is_told_who_is_first(path: str) -> None:
    with (
        RunLock(locate(path)) as first,
        pytest.raises(OutputError, match=rf"another run is at work on this output: process {os.getpid()} on .*set another output\.path"),
    ):
        RunLock(locate(path))
    first.check()
    with RunLock(locate(path)):
        pass


HOLD = """
import sys, time
from longscan.pipeline.commit.lock import RunLock
from longscan.pipeline.storage.location import locate
lock = RunLock(locate(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_run_that_was_killed_is_taken_over_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder, ExitStack() as stack:
        stack.callback(holder.kill)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(OutputError, match=f"process {holder.pid} on"):
            RunLock(locate(str(tmp_path)))
        holder.kill()
        # The kernel takes a moment to end it; nobody waits for it yet, so it stays as a zombie.
        until(lambda: status(holder.pid)[0] == "Z")
        lock = RunLock(locate(str(tmp_path)))
    with lock:
        assert f"taking over from a run that is gone: process {holder.pid}" in caplog.text


def leave(place: Location, owner: Owner, number: int = 1) -> None:
    atomic_write(place / "_run" / "lock" / f"{number:06d}", json.dumps(vars(owner)).encode())


ELSEWHERE = Owner("token", "another-host", 1, "boot/pid:[1]/99", beat=7, time=1000.0)


def test_a_run_elsewhere_is_alive_while_its_beat_is_young(path: str) -> None:
    leave(locate(path), ELSEWHERE)
    with pytest.raises(OutputError, match="process 1 on another-host"):
        RunLock(locate(path), clock=lambda: 1000.0 + locking.STALE_S)


def test_a_run_elsewhere_that_stands_still_is_taken_over(path: str, caplog: pytest.LogCaptureFixture) -> None:
    slept: list[float] = []
    leave(locate(path), ELSEWHERE)
    with RunLock(locate(path), clock=lambda: 2000.0, sleep=slept.append):
        assert slept == [2 * locking.BEAT_S]
        assert "taking over from a run that is gone: process 1 on another-host" in caplog.text
        assert children(locate(path) / "_run" / "lock") == ["000002"]


def test_a_clock_that_is_wrong_takes_nothing_from_a_run_that_moves(path: str) -> None:
    place = locate(path)
    leave(place, ELSEWHERE)
    with pytest.raises(OutputError, match="another-host"):
        RunLock(place, clock=lambda: 9e9, sleep=lambda _: leave(place, replace(ELSEWHERE, beat=8)))


def test_another_container_on_a_host_of_the_same_name_is_elsewhere(path: str) -> None:
    here = RunLock(locate(path))
    owner = here._owner
    here.release()
    leave(locate(path), replace(owner, process="boot/pid:[1]/99", time=1000.0), number=5)
    with pytest.raises(OutputError, match="at work"):
        RunLock(locate(path), clock=lambda: 1001.0)


def test_a_pid_that_somebody_else_has_now_is_a_dead_run(path: str) -> None:
    here = RunLock(locate(path))
    owner = here._owner
    here.release()
    machine, _, started = owner.process.rpartition("/")
    assert started
    leave(locate(path), replace(owner, process=f"{machine}/{int(started) - 1}"), number=5)
    with RunLock(locate(path)):
        pass


@pytest.mark.parametrize("torn", [b"", b"{", b"[]", b'{"token": 1}'])
def test_a_torn_lock_is_nobodys(path: str, torn: bytes) -> None:
    atomic_write(locate(path) / "_run" / "lock" / "000003", torn)
    with RunLock(locate(path)):
        assert children(locate(path) / "_run" / "lock") == ["000004"]


def test_beats_go_on_and_a_run_that_was_taken_over_learns_of_it(path: str, caplog: pytest.LogCaptureFixture) -> None:
    place = locate(path)
    lock = RunLock(place, beat_s=0.02)
    until(lambda: json.loads(read_bytes(place / "_run" / "lock" / "000001") or b"{}").get("beat", 0) > 2)
    lock.check()
    leave(place, ELSEWHERE, number=2)
    until(lambda: "another run has taken this output over" in caplog.text)
    with pytest.raises(OutputError, match="another run has taken this output over"):
        lock.check()
    lock.release()
    assert json.loads(read_bytes(place / "_run" / "lock" / "000002") or b"{}")["host"] == "another-host"


def test_a_disk_that_is_full_for_a_while_does_not_end_the_run(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = locate(path)
    with RunLock(place, beat_s=0.02) as lock, caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:

            def full(*_: Any) -> None:
                raise OutputError("No space left on device")

            patch.setattr(locking, "atomic_write", full)
            until(lambda: "the lock cannot be refreshed: No space left on device" in caplog.text)
        lock.check()
        before = json.loads(read_bytes(place / "_run" / "lock" / "000001") or b"{}")["beat"]
        until(lambda: json.loads(read_bytes(place / "_run" / "lock" / "000001") or b"{}")["beat"] > before)


def test_a_lock_that_cannot_be_given_back_hides_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OutputError("No space left on device")

    lock = RunLock(locate(path))
    monkeypatch.setattr(locking, "atomic_write", full)
    monkeypatch.setattr(locking, "overwrite", full)
    with pytest.raises(Stopped, match="what counts"), lock:
        raise Stopped("what counts")
    assert "the lock cannot be given back; the next start takes it over: No space left on device" in caplog.text


def test_a_lock_ends_its_thread(path: str) -> None:
    before = threading.active_count()
    with RunLock(locate(path)):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_an_output_is_unlocked_when_its_start_fails(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_run(path)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outputs, "_remove_run", fail)
        with pytest.raises(KeyboardInterrupt):
            open_output(path, FACTS, overwrite=True)
    with open_output(path, FACTS, overwrite=True):
        assert exists(locate(path) / "_run" / "lock")


def test_a_lock_that_is_taken_and_cannot_be_used_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that fills up just then: the same process may try again."""

    def full(*_: object, **__: object) -> None:
        raise OutputError("No space left on device")

    place = locate(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(locking, "gate", full)
        with pytest.raises(OutputError, match="No space left"):
            RunLock(place)
    with RunLock(place) as lock:
        assert lock.number == 2

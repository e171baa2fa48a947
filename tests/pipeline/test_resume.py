"""Runs that are stopped inside documents and go on: the same tables bit for bit, and little done twice."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import leisure
import pytest
from longscan.jobs.run import main
from longscan.pipeline.engine.forward import Forward
from longscan.pipeline.keep.frames import pack, read_frames
from longscan.pipeline.keep.leftover import kept_tokens, leftover
from longscan.pipeline.keep.shardkeeper import ShardKeeper
from longscan.pipeline.progress import Progress
from longscan.pipeline.storage.location import locate
from longscan.pipeline.wording import count
from stopping import Stop, carries, stopped
from tiny_jobs import rows, same_tables, snapshot, some_ids, texts, words, write_input

pytestmark = pytest.mark.usefixtures("one_thread")

SCORES = ("task=embed_score", "task.embedding.window_tokens=64", "task.score.window_tokens=64", "task.score.per_token=true")
TASKS = {
    "embed": ("task=embed", "task.embedding.pooling=[mean,last,max,weighted_mean]"),
    "score": ("task=score",),
    "everything": SCORES,
    "eos": (*SCORES, "model.append_eos=true", "task.score.first_token=skip"),
    "tokens_column": (*SCORES, "input.tokens_column=ids"),
    "resets": ("task=embed_score", "task.embedding.window_tokens=64", "engine.reset_tokens=192"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards: giants of some thousand tokens among documents shorter than a segment, empty ones, and a null."""
    long = [" ".join(texts(36, seed=n)) for n in range(4)]
    rows = [long[0], "", *texts(6), long[1], "short", long[2], *texts(4, seed=1), None, long[3], "x"]
    return write_input(tmp_path_factory.mktemp("in") / "in.parquet", rows, row_group=8, ids=some_ids(rows))


def job(model: Path, source: Path, output: Path, task: str, *more: str) -> list[str]:
    sizes = ("engine.checkpoint_tokens=256", "output.shard_tokens=4000", "max_errors=1", "cluster=inprocess")
    return words(model, source, output, *sizes, *TASKS[task], *more)


@pytest.fixture(scope="module")
def undisturbed(model: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def output(task: str) -> Path:
        if task not in made:
            made[task] = tmp_path_factory.mktemp(task) / "out"
            assert main(job(model, source, made[task], task)) == 0
        return made[task]

    return output


def assert_same(output: Path, expected: Path) -> None:
    assert same_tables(output, expected)
    assert not (output / "_run" / "carries").exists()


@pytest.mark.parametrize("crash", [False, True], ids=["sigterm", "crash"])
@pytest.mark.parametrize("task", TASKS)
def test_the_same_bits_after_stops_anywhere(
    task: str, crash: bool, model: Path, source: Path, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = undisturbed(task)
    command = job(model, source, tmp_path / "out", task)
    chance = random.Random(f"{task} {crash}")
    for _ in range(4):
        if stopped(command, chance.randrange(200, 5000), crash=crash) < 0:
            break
    else:
        assert main(command) == 0
    assert_same(tmp_path / "out", expected)


def test_after_sigterm_nothing_is_computed_twice(model: Path, source: Path, undisturbed: Callable[[str], Path], tmp_path: Path) -> None:
    expected = undisturbed("everything")
    total = sum(row["num_tokens"] for row in rows(expected, "documents"))
    command = job(model, source, tmp_path / "out", "everything")
    seen = [stopped(command, 3000), stopped(command, 2000)]
    with pytest.MonkeyPatch.context() as patch:
        last = Stop(patch, 1 << 40)
        assert main(command) == 0
    assert min(seen) > 0
    assert_same(tmp_path / "out", expected)
    told = carries(tmp_path / "out")
    assert sum(seen) + last.seen == total, told
    assert told["recomputed_tokens"] == 0
    assert told["resumed_documents"] > 0
    metrics = json.loads((tmp_path / "out" / "_run" / "metrics.json").read_text())
    run = metrics["run"]
    assert (run["starts"], run["computed_tokens"], run["tokens"]) == (3, total, total), "a start that is stopped leaves its numbers"
    assert metrics["tokens_per_second"] == pytest.approx(last.seen / metrics["seconds"], abs=0.06)


def test_after_a_crash_at_most_an_interval_of_each_document_in_flight(
    model: Path, source: Path, undisturbed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forward, "launch", leisure.launch)  # a model of this size computes faster than any disk writes carries
    expected = undisturbed("everything")
    total = sum(row["num_tokens"] for row in rows(expected, "documents"))
    command = [*job(model, source, tmp_path / "out", "everything"), "engine.checkpoint_tokens=1024"]
    seen = stopped(command, 9000, crash=True)
    with pytest.MonkeyPatch.context() as patch:
        last = Stop(patch, 1 << 40)
        assert main(command) == 0
    assert_same(tmp_path / "out", expected)
    assert carries(tmp_path / "out")["most_recomputed_tokens"] <= 1024
    metrics = json.loads((tmp_path / "out" / "_run" / "metrics.json").read_text())
    assert metrics["tokens_per_second"] == pytest.approx(last.seen / metrics["seconds"], abs=0.06)
    # Four lanes: an interval of each.
    assert 0 <= seen + last.seen - total <= 4 * 1024


def test_a_dry_run_counts_what_a_stop_has_kept(model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = job(model, source, tmp_path / "out", "everything")
    assert stopped(command, 3000) > 0
    place, before = locate(str(tmp_path / "out")), snapshot(tmp_path / "out")
    done = len(list((tmp_path / "out" / "_run" / "manifest").glob("*.json")))
    kept = sum(kept_tokens(place, range(3)).values())
    capsys.readouterr()
    assert main([*command, "dry_run=true"]) == 0
    said = capsys.readouterr().out
    assert done == 0
    assert f"done        {count(kept)} tokens of shards that are under way; about " in said
    assert kept > 0
    assert snapshot(tmp_path / "out") == before


def test_progress_begins_with_what_is_kept(
    model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command = job(model, source, tmp_path / "out", "everything")
    seen = stopped(command, 3000)
    run = json.loads((tmp_path / "out" / "_run" / "metrics.json").read_text())["run"]
    began: list[str] = []
    enter = Progress.__enter__

    def entered(progress: Progress) -> Progress:
        began.append(progress.line())
        return enter(progress)

    monkeypatch.setattr(Progress, "__enter__", entered)
    with caplog.at_level("INFO", "longscan"):
        assert main(command) == 0
    kept = seen - run["tokens"]
    assert kept > 0
    assert began[0].startswith(f"{count(kept)} of about ")
    assert any(f" beside {count(kept)} kept, " in message for message in caplog.messages)


def test_what_is_left_is_found_by_names_and_headers(tmp_path: Path) -> None:
    place, folder = locate(str(tmp_path)), tmp_path / "_run" / "carries" / "00003"
    folder.mkdir(parents=True)

    def rows_frame(ordinal: int, ends: bool, described: list[Any]) -> bytes:
        return pack({"docs": [{"doc": ordinal, "digest": "d", "ends": ends, "rows": described}]}, [b"x" * 50])

    frames = [pack({"journal": {}}), rows_frame(0, True, [["window", {}], ["document", {"num_tokens": 70}]]), pack({"at": [[1, 64]]})]
    frames += [rows_frame(1, False, [["window", {}]]), rows_frame(2, True, [["error", {}]])]
    torn = rows_frame(4, True, [["document", {"num_tokens": 1000}]])[:-1]
    (folder / "000001-000001.rows").write_bytes(b"".join(frames) + torn)
    for name in ("000000-000000000064-000001.carry", "000001-000000000128-000001.carry", "000001-000000000256-000002.carry", "other"):
        (folder / name).touch()
    found = leftover(place, 3)
    assert (found.finished, found.positions, found.tokens, found.mark) == ({0: 70, 2: 0}, {1: 256}, 326, (2, 256))
    assert kept_tokens(place, [2, 3]) == {3: 326}
    assert leftover(place, 2).mark == (0, 0)
    (folder / "000001-000001.rows").write_bytes(pack({"docs": [{"ends": True}]}))
    assert leftover(place, 3).tokens == 0, "what is not understood counts as nothing, and ends nothing"


def damage(output: Path, how: Callable[[Path], None]) -> int:
    files = sorted((output / "_run" / "carries").rglob("*.carry"))
    for file in files:
        how(file)
    return len(files)


def tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def swap(file: Path) -> None:
    """Make it the carry of another document, whole."""
    (frame,) = read_frames(io.BytesIO(file.read_bytes()))
    frame.header["owner"]["ordinal"] += 1
    file.write_bytes(pack(frame.header, [frame.body]))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        pytest.param(tear, "it is not whole", id="torn"),
        pytest.param(flip, "it is not whole", id="flipped"),
        pytest.param(swap, "it belongs to another run, or to another document", id="foreign"),
        pytest.param(lambda file: file.write_bytes(b""), "it is not whole", id="empty"),
    ],
)
def test_a_carry_that_is_not_whole_or_not_its_own_is_never_used(
    how: Callable[[Path], None],
    why: str,
    model: Path,
    source: Path,
    undisturbed: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = job(model, source, tmp_path / "out", "everything")
    assert stopped(command, 3000) > 0
    assert damage(tmp_path / "out", how) > 0
    capsys.readouterr()
    assert main(command) == 0
    assert_same(tmp_path / "out", undisturbed("everything"))
    told = capsys.readouterr().err
    assert f"this carry is left out: {why}" in told
    assert carries(tmp_path / "out")["resumed_documents"] == 0


def test_a_torn_journal_is_followed_as_far_as_it_is_whole(
    model: Path, source: Path, undisturbed: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = job(model, source, tmp_path / "out", "everything")
    assert stopped(command, 4000) > 0
    files = sorted((tmp_path / "out" / "_run" / "carries").rglob("*.rows"))
    for file in files:
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
    capsys.readouterr()
    assert main(command) == 0
    assert files
    assert "are torn" in capsys.readouterr().err
    assert_same(tmp_path / "out", undisturbed("everything"))


def test_what_cannot_be_kept_ends_nothing(
    model: Path, source: Path, undisturbed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("longscan.pipeline.keep.journal.os.write", full)
    assert main(job(model, source, tmp_path / "out", "everything")) == 0
    assert_same(tmp_path / "out", undisturbed("everything"))


def test_a_stop_in_the_middle_of_a_carrys_save(
    model: Path, source: Path, undisturbed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is a temporary file that nobody takes for a carry; the carry before it is still there."""
    command = job(model, source, tmp_path / "out", "everything")

    def torn(keeper: ShardKeeper, carry: Any, _owner: Any, _counts: Any) -> None:
        folder = tmp_path / "out" / "_run" / "carries" / "00000"
        (folder / f".longscan-{carry.ordinal}").write_bytes(b"LSf1 half")
        keeper.forget()

    save = ShardKeeper._save
    saved: list[int] = []

    def sometimes(keeper: ShardKeeper, carry: Any, owner: Any, counts: Any) -> None:
        saved.append(carry.position)
        (save if len(saved) < 6 else torn)(keeper, carry, owner, counts)

    with monkeypatch.context() as patch:
        patch.setattr(ShardKeeper, "_save", sometimes)
        assert stopped(command, 4000) > 0
    assert len(saved) > 6
    assert main(command) == 0
    assert_same(tmp_path / "out", undisturbed("everything"))

"""Documents that kill their worker are found, and no other is blamed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from longscan.pipeline.commit.ledger import Loss, begin_attempt, end_attempt, losses, note_rows
from longscan.pipeline.storage.location import locate
from longscan.pipeline.worker.suspects import SINGLY, History
from longscan.pipeline.worker.turns import Turns
from starts import DIE, Starts
from tiny_jobs import rows, texts, words, write_input
from waiting import HANG_S, until


@given(num_rows=st.integers(0, 700), data=st.data(), max_attempts=st.integers(2, 7))
def test_killers_are_found_and_nobody_else(num_rows: int, data: st.DataObject, max_attempts: int) -> None:
    killers = data.draw(st.sets(st.integers(0, max(num_rows - 1, 0)), max_size=4)) if num_rows else set()
    found: list[Loss] = []
    for attempt in range(1, 100):
        history = History(found, max_attempts, start=1)
        assert not history.hopeless
        fatal = killers - set(history.killers)
        if not fatal:
            break
        if not history.careful:
            found.append(Loss(attempt, 1))
            continue
        groups = list(history.groups(num_rows))
        assert [row for group in groups for row in group] == list(range(num_rows)), "each row once, in order"
        found.append(Loss(attempt, 1, next(group for group in groups if fatal.intersection(group)), "engine"))
    assert set(History(found, max_attempts, start=1).killers) == killers
    in_groups = num_rows > SINGLY
    alone = max_attempts - max_attempts // 2
    assert len(found) <= (max_attempts // 2 + len(killers) * (alone + in_groups) if killers else 0)


def test_a_shard_that_dies_for_no_reason_that_is_found_is_given_up_in_this_start_alone() -> None:
    deaths = [Loss(n, 1, range(n, n + 1), "engine") for n in range(8)]
    assert not History(deaths[:7], 4, start=1).hopeless
    assert History(deaths, 4, start=1).hopeless
    assert not History(deaths, 4, start=2).hopeless


@given(data=st.data(), max_attempts=st.integers(2, 7), killer=st.none() | st.integers(0, 19))
def test_a_document_that_gets_on_between_deaths_is_not_to_blame(data: st.DataObject, max_attempts: int, killer: int | None) -> None:
    """A shard of one document of 20 intervals on spot machines; `killer`: the interval in which it kills its worker, if it does."""
    found: list[Loss] = []
    position = deaths = 0
    while position < 20:
        history = History(found, max_attempts, start=1)
        assert not history.hopeless
        if 0 in history.killers and position <= history.killers[0].position:
            break
        end = position + data.draw(st.integers(1, 3))
        if killer is not None and end > killer:
            end, deaths = killer, deaths + 1
        where = (range(1), "engine", position) if history.careful else (None, "", 0)
        found.append(Loss(len(found) + 1, 1, *where, fruitless=end == position))
        position = end
    if killer is None:
        assert position >= 20, "blamed for what it did not do"
    else:
        assert position == killer, "blamed before it came to it, or never"
        assert deaths <= max_attempts + 1


def test_what_is_kept_between_two_attempts_is_no_fruitless_loss(tmp_path: Path) -> None:
    place = locate(str(tmp_path))
    for mark in [(0, 0), (0, 256), (0, 256), (1, 0)]:
        begin_attempt(place, 0, start=1, in_driver=True, mark=mark)
    assert [loss.fruitless for loss in losses(place, 0, start=1, mark=(1, 64))] == [False, True, False, False]
    assert [loss.fruitless for loss in losses(place, 0, start=1, mark=(1, 0))] == [False, True, False, True]
    note_rows(place, 0, 4, range(3, 4), "engine", 512)
    assert losses(place, 0, start=1)[3].position == 512


def test_only_what_died_under_a_driver_that_lived_counts(tmp_path: Path) -> None:
    place = locate(str(tmp_path))

    def begin(start: int, *, in_driver: bool = False) -> int:
        return begin_attempt(place, 0, start=start, in_driver=in_driver)

    begin(1)
    note_rows(place, 0, 1, range(3, 4), "engine")
    begin(1)
    end_attempt(place, 0, 2)
    begin(1)
    assert losses(place, 0, start=1) == [Loss(1, 1, range(3, 4), "engine"), Loss(3, 1)]
    assert losses(place, 0, start=2) == [Loss(1, 1, range(3, 4), "engine")], "the third went with its driver"
    begin(2, in_driver=True)
    assert [loss.attempt for loss in losses(place, 0, start=3)] == [1, 4], "a driver that is the worker dies with its document"


def test_who_wants_to_be_alone_is() -> None:
    turns, inside, seen = Turns(), [0], []
    lock, both = threading.Lock(), threading.Barrier(2)

    def go(alone: bool) -> None:
        for n in range(20):
            with turns.alone() if alone else turns.together():
                with lock:
                    inside[0] += 1
                if alone:
                    time.sleep(0.0005)  # for others to come in, if they could
                elif n == 0:
                    both.wait(HANG_S)
                with lock:
                    seen.append((alone, inside[0]))
                    inside[0] -= 1

    threads = [threading.Thread(target=go, args=(n > 1,)) for n in range(3)]
    for thread in threads[:2]:
        thread.start()
    until(lambda: any(not alone for alone, _ in seen))  # who waits to be alone would keep the second of them out
    threads[2].start()
    for thread in threads:
        thread.join(HANG_S)
    assert len(seen) == 60
    assert {together for alone, together in seen if alone} == {1}
    assert max(together for alone, together in seen if not alone) == 2


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    with Starts(tmp_path_factory.mktemp("starts")) as starts:
        yield starts


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four row groups of three rows: four shards, that run at once."""
    return write_input(tmp_path_factory.mktemp("in") / "in.parquet", texts(12), row_group=3)


@pytest.fixture(scope="module")
def undisturbed(starts: Starts, model: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert starts.start(job(model, source, out)).code == 0
    return out


def job(model: Path, source: Path, out: Path) -> list[str]:
    return words(model, source, out, "output.shard_tokens=300", "task=embed_score", "cluster=inprocess", "max_errors=3")


IN_THE_ENGINE = """
from longscan.pipeline.engine.feed import Feed
whole = Feed._pull
def pull(feed, source):
    if source.document.doc_id.endswith('#4'): die()
    return whole(feed, source)
Feed._pull = pull
"""

IN_THE_READER = """
from longscan.pipeline.read.parquet import GroupRows
whole = GroupRows._load
def load(rows):
    if rows.row_group == 1 and rows.row + rows._batch_rows > 1: die()
    return whole(rows)
GroupRows._load = load
"""

IN_A_STEP = """
from longscan.pipeline.engine import forward
whole = forward.Forward.launch
def launch(self, step):
    if any(entry.document.document.doc_id.endswith('#4') for entry in step.entries): raise RuntimeError('CUDA error: illegal memory access')
    return whole(self, step)
forward.Forward.launch = launch
"""

SPOT = """
import leisure
from longscan.pipeline.keep import keeper
leisure.take()
whole = keeper.ShardKeeper._save
saved = []
def save(self, carry, owner, counts):
    whole(self, carry, owner, counts)
    saved.append(carry.position)
    if len(saved) == 2: die()
keeper.ShardKeeper._save = save
"""


def test_a_long_document_on_machines_that_go_is_not_to_blame(starts: Starts, model: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.parquet", [" ".join(texts(20))])
    alone, command = job(model, source, tmp_path / "alone"), [*job(model, source, tmp_path / "out"), "engine.checkpoint_tokens=256"]
    codes = []
    while len(codes) < 40 and (code := starts.start(command, DIE + SPOT).code) != 0:
        codes.append(code)
    assert set(codes) == {-9}
    assert 6 < len(codes) < 40, "more than would be its fault, and it comes to an end"
    assert rows(tmp_path / "out", "errors") == []
    assert starts.start(alone).code == 0
    assert rows(tmp_path / "out", "documents") == rows(tmp_path / "alone", "documents")


EVERY_STEP = """
from longscan.pipeline.engine import forward
def launch(self, step): raise RuntimeError('CUDA error: no device')
forward.Forward.launch = launch
"""


@pytest.mark.parametrize(
    ("first", "code", "lost", "stage"),
    [(DIE + IN_THE_ENGINE, -9, [4], "engine"), (IN_A_STEP, 75, [4], "engine"), (DIE + IN_THE_READER, -9, [4, 5], "read")],
    ids=["in_the_engine", "in_a_step", "in_the_reader"],
)
def test_a_document_that_kills_its_worker_becomes_an_error_row(
    starts: Starts, model: Path, source: Path, undisturbed: Path, tmp_path: Path, first: str, code: int, lost: Sequence[int], stage: str
) -> None:
    command = job(model, source, tmp_path / "out")
    codes = [starts.start(command, first).code for _ in range(4)]
    assert codes == [code] * 4
    ended = starts.start(command, first)
    assert ended.code == 0, ended.said
    errors = rows(tmp_path / "out", "errors")
    assert [(row["row"], row["stage"], row["error"]) for row in errors] == [(row, stage, "WorkerKilled") for row in lost]
    assert "ended 2 times while it worked on this document and no other" in errors[0]["message"] or stage == "read"
    healthy = [row for n, row in enumerate(rows(undisturbed, "documents")) if n not in lost]
    assert rows(tmp_path / "out", "documents") == healthy, "every other document, bit for bit"


def test_nobody_is_blamed_for_a_device_that_fails_everybody(
    starts: Starts, model: Path, source: Path, undisturbed: Path, tmp_path: Path
) -> None:
    command = job(model, source, tmp_path / "out")
    ended = [starts.start(command, EVERY_STEP) for _ in range(6)]
    assert {one.code for one in ended} == {75}
    assert "fails before the first document" not in ended[0].said
    assert any("fails before the first document" in one.said for one in ended), "not before shards were lost twice: which ones, is a race"
    assert starts.start(command).code == 0
    assert rows(tmp_path / "out", "documents") == rows(undisturbed, "documents")


IN_THE_COMMIT = """
from longscan.pipeline.write.writer import PartWriter
PartWriter.commit = die
"""


def test_the_last_document_is_not_to_blame_for_a_death_behind_it(
    starts: Starts, model: Path, source: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Its rows are all in the journal: a worker that dies as the shard is committed dies of something else."""
    command = job(model, source, tmp_path / "out")
    assert {starts.start(command, DIE + IN_THE_COMMIT).code for _ in range(6)} == {-9}
    ended = starts.start(command)
    assert ended.code == 0, ended.said
    assert rows(tmp_path / "out", "errors") == []
    assert rows(tmp_path / "out", "documents") == rows(undisturbed, "documents")


def test_a_shard_that_always_dies_in_its_commit_is_given_up() -> None:
    history = History([Loss(n, 1, range(3, 3), "commit") for n in range(7)], 4, 1)
    assert not history.hopeless
    assert not history.killers
    assert History([*history.losses, Loss(7, 1, range(3, 3), "commit")], 4, 1).hopeless

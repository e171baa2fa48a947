"""The numbers of a run: of each start, of all starts, and what is left of them when a start is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from longscan.pipeline.errors import OutputError
from longscan.pipeline.output.metrics import WRITE_S, Metrics
from longscan.pipeline.shards import Carried, ShardReport
from longscan.pipeline.storage.location import locate
from longscan.pipeline.worker.job import Result, Usage


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def report(index: int, tokens: int, **carried: int) -> ShardReport:
    return ShardReport(index, 2, 1, tokens, 3, 1.0, Carried(**carried))


def start(folder: Path, number: int, clock: Clock, *done: ShardReport, check: Callable[[], None] = lambda: None) -> Metrics:
    return Metrics(locate(str(folder)), start=number, done=done, num_shards=4, about={"device": "cpu"}, check=check, clock=clock)


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "_run" / "metrics.json").read_text())
    return found


def test_a_start_and_all_starts(tmp_path: Path) -> None:
    clock = Clock()
    first = start(tmp_path, 1, clock)
    clock.now += 5
    one = report(0, 100, recomputed_tokens=7, most_recomputed_tokens=7)
    first.add(Result(0, one), 150)
    first.write(180)
    second = start(tmp_path, 3, clock, one)
    clock.now += 20
    second.add(Result(1, report(1, 50, recomputed_tokens=9, most_recomputed_tokens=4, resumed_documents=2)), 40)
    second.add(Result(2, None, "it failed"), 60)
    second.write(60)
    found = read(tmp_path)
    assert {name: found[name] for name in ("seconds", "computed_tokens", "shards", "failed_shards", "tokens", "documents", "device")} == {
        "seconds": 20.0,
        "computed_tokens": 60,
        "shards": 1,
        "failed_shards": 1,
        "tokens": 50,
        "documents": 2,
        "device": "cpu",
    }
    run = found["run"]
    assert (run["starts"], run["seconds"], run["computed_tokens"]) == (3, 25.0, 240)
    assert (run["shards"], run["shards_left"], run["tokens"], run["documents"], run["errors"], run["windows"]) == (2, 2, 150, 4, 2, 6)
    assert run["carries"]["recomputed_tokens"] == 16
    assert run["carries"]["most_recomputed_tokens"] == 7, "the most of one document, no sum"
    assert found["carries"]["recomputed_tokens"] == 9


@pytest.mark.parametrize(
    "carried",
    [{}, {"kept_tokens": 900}, {"recomputed_tokens": 30, "kept_tokens": 800}, {"continued_tokens": 950}],
    ids=["first", "stopped", "killed", "states"],
)
def test_speed_is_of_what_this_start_computed_however_it_began(tmp_path: Path, carried: dict[str, int]) -> None:
    clock = Clock()
    metrics = start(tmp_path, 2, clock, report(0, 5000))
    clock.now += 20
    metrics.add(Result(1, report(1, 1000, **carried)), 100)
    metrics.write(160)  # 60 are of shards that are under way
    found = read(tmp_path)
    assert (found["tokens"], found["computed_tokens"], found["tokens_per_second"]) == (1000, 160, 8.0)


def test_workers_are_those_that_did_something_and_the_longest_at_it_is_known(tmp_path: Path) -> None:
    """Each tells what came since its result before: after 10 and 12 seconds one of them, after 4 the other."""
    metrics = start(tmp_path, 1, Clock())
    one, later, other = (Usage(seconds, workers=1, longest=seconds) for seconds in (10.0, 12.0, 4.0))
    for index, usage in enumerate((one.minus(Usage()), other.minus(Usage()), later.minus(one))):
        metrics.add(Result(index, report(index, 100), usage=usage), 0)
    metrics.write(0)
    found = read(tmp_path)
    assert (found["workers_at_work"], found["worker_seconds"], found["longest_worker_seconds"]) == (2, 16.0, 12.0)


def test_a_start_that_is_killed_has_left_what_it_did_some_seconds_ago(tmp_path: Path) -> None:
    clock = Clock()
    killed = start(tmp_path, 1, clock)
    killed.add(Result(0, report(0, 100)), 100)
    assert not (tmp_path / "_run").exists(), "not with every shard"
    clock.now += WRITE_S
    killed.add(Result(1, report(1, 100)), 210)
    killed.add(Result(2, report(2, 100)), 330)
    start(tmp_path, 2, clock).write(5)
    assert read(tmp_path)["run"]["computed_tokens"] == 215


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"run": 3}', '{"run": {"seconds": "x"}}'])
def test_earlier_numbers_that_cannot_be_read_end_nothing(tmp_path: Path, torn: str) -> None:
    (tmp_path / "_run").mkdir()
    (tmp_path / "_run" / "metrics.json").write_text(torn)
    start(tmp_path, 2, Clock()).write(5)
    assert read(tmp_path)["run"]["computed_tokens"] == 5


def test_numbers_that_cannot_be_written_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OutputError("no space")

    monkeypatch.setattr("longscan.pipeline.output.metrics.atomic_write", full)
    start(tmp_path, 1, Clock()).write(5)
    assert "the run's metrics cannot be written: no space" in caplog.text


def test_who_wakes_up_late_writes_no_numbers_over_those_of_the_run_that_has_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def taken_over() -> None:
        raise OutputError("another run has taken this output over")

    clock = Clock()
    late, newer = start(tmp_path, 1, clock, check=taken_over), start(tmp_path, 2, clock)
    newer.write(5)
    before = read(tmp_path)
    clock.now += WRITE_S
    late.add(Result(0, report(0, 100)), 100)
    late.write(200)
    assert read(tmp_path) == before
    assert "taken this output over" in caplog.text

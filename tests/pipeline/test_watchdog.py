"""A step that does not end is noticed, and nothing else is taken for one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from fakes import tiny_checkpoint
from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import Stopped
from longscan.pipeline.run import run
from longscan.pipeline.worker.build import build_engine
from longscan.pipeline.worker.watchdog import Watchdog
from tiny_jobs import same_tables, texts, write_input
from waiting import HANG_S, until


class FakeEngine:
    def __init__(self, under_way: int) -> None:
        self.tokens, self.done, self.moves, self.looks = under_way, 0, False, 0
        self.given_up: list[Exception] = []

    @property
    def under_way(self) -> tuple[int, int]:
        self.done += self.moves
        self.looks += 1
        return self.tokens, self.done

    def give_up(self, error: Exception) -> None:
        self.given_up.append(error)


def watched(engine: Any, **options: Any) -> list[Exception]:
    """Looked at often enough to be given up twice, or until it is."""
    dog = Watchdog(engine, 0.2, **options)
    until(lambda: engine.looks > 40 or not dog._thread.is_alive())
    dog.close()
    return list(engine.given_up)


def test_a_step_that_does_not_end_is_given_up_once() -> None:
    (error,) = watched(FakeEngine(640))
    assert "a step of 640 tokens has not ended" in str(error)


def test_an_engine_with_nothing_to_do_or_that_moves_is_left_alone() -> None:
    assert watched(FakeEngine(0)) == []
    moving = FakeEngine(640)
    moving.moves = True
    assert watched(moving) == []


def test_a_clock_that_jumps_is_no_hang() -> None:
    """As after a process was stopped for an hour between two looks: they count for what they should have taken, twice at most."""
    times = iter([0.0, *(3600.0,) * 1000])
    assert watched(FakeEngine(640), clock=lambda: next(times)) == []


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    made = JobConfig()
    made.model.path = str(tiny_checkpoint(tmp_path / "model", tokenizer=True))
    made.input.path, made.output.path = str(write_input(tmp_path / "in.parquet", texts(12), row_group=3)), str(tmp_path / "out")
    made.cluster.mode, made.output.shard_tokens, made.max_errors = "inprocess", 300, 1
    return made


def undisturbed(config: JobConfig, tmp_path: Path) -> Path:
    place, config.output.path = config.output.path, str(tmp_path / "undisturbed")
    run(config)
    config.output.path = place
    return tmp_path / "undisturbed"


def test_a_hang_in_this_process_ends_the_run_and_the_next_start_completes_it(config: JobConfig, tmp_path: Path) -> None:
    expected = undisturbed(config, tmp_path)
    patience, config.cluster.hang_s = config.cluster.hang_s, 1.0
    config.output.overwrite = True
    ended = threading.Event()

    def hanging(*arguments: Any) -> Any:
        engine = build_engine(*arguments)
        engine._forward.launch = lambda _: ended.wait(HANG_S)  # type: ignore[assignment,method-assign,return-value]
        return engine

    with pytest.raises(Stopped, match=r"has not ended for 1 s \(cluster.hang_s\)(.|\n)*again, without output.overwrite=true, to go on"):
        run(config, build=hanging)
    ended.set()
    config.output.overwrite, config.cluster.hang_s = False, patience
    run(config)
    assert same_tables(tmp_path / "out", expected) == ["documents", "errors"]

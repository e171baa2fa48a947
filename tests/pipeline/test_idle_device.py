"""What an engine says of the time in which its device had nothing to do: before the first step, and between two."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from fake_model import CountingModel, engine_of, settings_of, stream
from longscan.jobs.bench_fake import SleepingForward, SleepingModel
from longscan.kernels.segments import Segments
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.engine import forward
from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.meter import BEFORE_FIRST, BETWEEN, DEVICE, Meter

SIZES = {"lanes": 4, "step_tokens": 128, "segment_tokens": 64}
STEP_S = 1.0


class Clock:
    """What a Forward asks of the module `time`; it goes on where the test says so."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


class SlowModel(CountingModel):
    """Each call takes STEP_S by the clock; those of `fails` find no memory then."""

    def __init__(self, clock: Clock, fails: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.clock, self.fails, self.calls = clock, fails, 0

    def step(self, ids_T: torch.Tensor, segments: Segments, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().step(ids_T, segments, state)
        self.clock.now += STEP_S
        self.calls += 1
        if self.calls in self.fails:
            raise torch.OutOfMemoryError("Tried to allocate 3.14 GiB")
        return found


def run(one: Engine, ordinal: int) -> None:
    """One document, in one step."""
    assert len(list(one.process([stream(ordinal, np.zeros(100, np.int32))]))) == 1


def told(meter: Meter) -> dict[str, float]:
    costs = meter.costs()
    return {name: costs[name].wall for name in (BEFORE_FIRST, BETWEEN, DEVICE)}


@pytest.mark.parametrize(("fails", "lost"), [((), 0.0), ((1,), STEP_S), ((2,), STEP_S), ((1, 3), 2 * STEP_S)])
def test_pauses_are_counted_once_also_where_a_step_is_queued_again(
    fails: tuple[int, ...], lost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try that found no memory came to nothing: what it took is lost between two steps."""
    clock, meter = Clock(), Meter()
    monkeypatch.setattr(forward, "time", clock)
    with engine_of(SlowModel(clock, fails), TaskConfig("embed"), meter=meter, **SIZES) as one:
        for ordinal, pause in enumerate((2.0, 3.0, 0.5)):
            clock.now += pause
            run(one, ordinal)
    assert told(meter) == pytest.approx({BEFORE_FIRST: 2.0, BETWEEN: 3.5 + lost, DEVICE: 3 * STEP_S})


def test_pauses_of_a_device_that_works_behind_the_host() -> None:
    """By its own marks: no less than the pauses that were made, and in all no more than the time that passed."""
    meter, began = Meter(), time.perf_counter()
    settings = settings_of(TaskConfig("embed"), constant_shape=True, **SIZES)
    with Engine(SleepingModel(rate=4000.0, width=3), settings, meter=meter, forward=SleepingForward) as one:
        for ordinal, pause in enumerate((0.2, 0.3)):
            time.sleep(pause)
            run(one, ordinal)
        passed = time.perf_counter() - began
    found = told(meter)
    assert found[BEFORE_FIRST] >= 0.2
    assert found[BETWEEN] >= 0.3
    assert found[DEVICE] >= 2 * 128 / 4000
    assert sum(found.values()) <= passed

"""Stages are charged with their own time, each second once, whatever thread they run in."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
from longscan.pipeline import meter as meters
from longscan.pipeline.meter import Cost, Meter, MeteredExecutor, add_costs


class Clocks:
    """What the meter asks of the module `time`, for one thread: seconds go by where the test says so, and nowhere else."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0

    def thread_time(self) -> float:
        return self.cpu

    def perf_counter(self) -> float:
        return self.wall

    def work(self, seconds: float) -> None:
        self.cpu += seconds
        self.wall += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(meters, "time", clocks)
    return clocks


def spin(seconds: float) -> None:
    """Use so much CPU time of this thread."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def test_a_span_inside_another_is_taken_from_it(clocks: Clocks) -> None:
    meter = Meter()
    with meter("outer"):
        clocks.work(2.0)
        with meter("inner"):
            clocks.work(3.0)
        clocks.work(0.5)
    assert meter.costs() == {"outer": Cost(2.5, 2.5), "inner": Cost(3.0, 3.0)}


def test_waiting_costs_seconds_and_no_cpu(clocks: Clocks) -> None:
    meter = Meter()
    with meter("wait"):
        clocks.wall += 5.0
    assert meter.costs() == {"wait": Cost(0.0, 5.0)}


def test_cpu_time_is_the_threads_own_and_seconds_are_the_clocks() -> None:
    meter = Meter()
    with meter("work"):
        other = threading.Thread(target=spin, args=(0.05,))
        other.start()
        other.join()
    cost = meter.costs()["work"]
    assert cost.wall >= 0.05
    assert cost.cpu < cost.wall


def test_an_error_passes_and_is_charged() -> None:
    meter = Meter()
    assert meter.costs() == {}

    def fail() -> None:
        with meter("bad"):
            spin(0.01)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with meter("after"):
        pass
    assert meter.costs()["bad"].cpu >= 0.01


def test_threads_add_up() -> None:
    meter = Meter()
    with MeteredExecutor(2, meter=meter, stage="work") as executor:
        assert list(executor.map(lambda n: (spin(0.01), n)[1], range(4))) == [0, 1, 2, 3]
    thread = threading.Thread(target=lambda: meter.add("device", wall=2.0))
    thread.start()
    thread.join()
    meter.add("device", wall=1.0)
    costs = meter.costs()
    assert costs["work"].cpu >= 0.04
    assert costs["device"] == Cost(0.0, 3.0)


def test_costs_add_stage_by_stage() -> None:
    assert add_costs({"a": Cost(1, 2)}, {"a": Cost(3, 4), "b": Cost(5, 6)}) == {"a": Cost(4, 6), "b": Cost(5, 6)}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_threads_may_give_way() -> None:
    """And nobody else does: not who made them, nor threads of another kind."""

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    mine = priority()
    with MeteredExecutor(1, meter=Meter(), stage="low", gives_way=True) as low, MeteredExecutor(1, meter=Meter(), stage="usual") as usual:
        assert low.submit(priority).result() == min(mine + meters.GIVES_WAY_BY, meters.LOWEST)
        assert usual.submit(priority).result() == mine == priority()

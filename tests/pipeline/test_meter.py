"""Stages are charged with their own time, each second once, whatever thread they run in."""

from __future__ import annotations

import threading
import time

import pytest
from longscan.pipeline.meter import Cost, Meter, MeteredExecutor, add_costs


def spin(seconds: float) -> None:
    """Use so much CPU time of this thread."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def test_a_span_inside_another_is_taken_from_it() -> None:
    meter = Meter()
    with meter("outer"):
        spin(0.02)
        with meter("inner"):
            spin(0.03)
    costs = meter.costs()
    assert 0.02 <= costs["outer"].cpu < 0.03
    assert 0.03 <= costs["inner"].cpu < 0.04


def test_waiting_costs_seconds_and_no_cpu() -> None:
    meter = Meter()
    with meter("wait"):
        time.sleep(0.05)
    assert meter.costs()["wait"].wall >= 0.05
    assert meter.costs()["wait"].cpu < 0.02


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

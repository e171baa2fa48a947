"""Finds an engine that hangs: a step is under way, and no token has come of it for too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from longscan.pipeline.engine.engine import Engine


class Hung(Exception):
    """A step that does not end."""


class Watchdog:
    """Watches one engine from a thread of its own until it is closed, and gives it up where it hangs.

    It adds up short waits, each counted as at most twice its length: a process that was stopped for an hour, or a machine that
    slept, has not hung.
    """

    def __init__(self, engine: Engine, hang_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._hang_s, self._clock = engine, hang_s, clock
        self._poll_s = min(10.0, hang_s / 10)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="longscan-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        still, seen, before = 0.0, -1, self._clock()
        while not self._end.wait(self._poll_s):
            passed = min(self._clock() - before, 2 * self._poll_s)
            before = self._clock()
            under_way, done = self._engine.under_way
            still = still + passed if under_way and done == seen else 0.0
            seen = done
            if still >= self._hang_s:
                hung = Hung(f"a step of {under_way} tokens has not ended for {still:.0f} s (cluster.hang_s)")
                self._engine.give_up(hung)
                return

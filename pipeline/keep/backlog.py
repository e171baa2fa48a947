"""The thread that writes carries, so that nobody who computes waits for a disk."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from queue import PriorityQueue

from longscan.pipeline.storage.location import Location

Task = tuple[int, int, Callable[[], None]]
"""Tokens at risk, negative; a number that grows; what the thread does."""

log = logging.getLogger(__name__)


class Backlog:
    """What is still to be written or removed, done by one thread, what has most tokens at risk first. `close` ends the thread."""

    def __init__(self, folder: Location) -> None:
        """folder: where all that is done is; for messages."""
        self._folder = folder
        self._tasks: PriorityQueue[Task] = PriorityQueue()
        self._numbers = itertools.count()
        self._news = threading.Condition()
        self._undone = 0
        self._closed = self._given_up = False
        self._thread = threading.Thread(target=self._work, name="longscan-keeper", daemon=True)
        self._thread.start()

    def submit(self, at_risk: int, task: Callable[[], None]) -> None:
        """Have the thread do something; what has more tokens at risk goes first."""
        with self._news:
            self._undone += 1
        self._tasks.put((-at_risk, next(self._numbers), task))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until all is done. Returns whether it came in time."""
        with self._news:
            return self._news.wait_for(lambda: not self._undone, timeout_s)

    def give_up(self) -> None:
        """Do nothing any more of what waits, nor of what may come."""
        self._given_up = True

    def close(self) -> None:
        """End the thread, once what waits is done."""
        self.wait()
        self._closed = True
        self.submit(0, lambda: None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            _, _, task = self._tasks.get()
            if self._closed:
                return
            try:
                if not self._given_up:
                    task()
            except Exception as error:
                log.warning("%s: a carry cannot be written or removed: %s", self._folder, error)
            with self._news:
                self._undone -= 1
                self._news.notify_all()

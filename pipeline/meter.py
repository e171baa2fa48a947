"""What the stages of the journey cost a worker: CPU seconds of the threads that ran them, and seconds that they took.

Stages nest (reading happens inside tokenizing, which reads when it needs more), and each is charged with its own part alone:
so stages add up, and a stage that waits for another costs seconds and no CPU. A span costs some two microseconds, so that
it stands around a step or a batch of documents, never around each of many short ones.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, ParamSpec, TypeVar

Given = ParamSpec("Given")
Answer = TypeVar("Answer")

GIVES_WAY_BY, LOWEST = 5, 19
"""Niceness: three times less of a core's time, and a thread of the usual priority that wakes up does not wait for one of these."""
DEVICE = "device"
"""The stage that is the model's own work; on a GPU in the device's time, while the host does something else."""
BEFORE_FIRST, BETWEEN = "before_first_step", "between_steps"
"""What the device has not been given to do, in seconds: from when its engine is there to its first step, and from one step to the next."""


class Cost(NamedTuple):
    """Seconds of one stage, all threads together."""

    cpu: float = 0.0
    """CPU time of the threads that ran it, not of those that torch or Arrow keep for themselves."""
    wall: float = 0.0

    def plus(self, cpu: float, wall: float) -> Cost:
        return Cost(self.cpu + cpu, self.wall + wall)


Costs = Mapping[str, Cost]


def add_costs(first: Costs, second: Costs) -> dict[str, Cost]:
    """The sum of both, stage by stage."""
    total = dict(first)
    for stage, cost in second.items():
        total[stage] = total.get(stage, Cost()).plus(*cost)
    return total


class Meter:
    """The costs of one worker's stages. Threads keep books of their own, so that none waits for another."""

    def __init__(self) -> None:
        self._books: list[_Book] = []
        self._local = threading.local()
        self._lock = threading.Lock()

    def __call__(self, stage: str) -> _Span:
        """A context whose time is charged to `stage`, but for what spans inside it take."""
        return _Span(self._book(), stage)

    def add(self, stage: str, *, cpu: float = 0.0, wall: float = 0.0) -> None:
        """Charge what was measured elsewhere."""
        self._book().add(stage, cpu, wall)

    def costs(self) -> dict[str, Cost]:
        """What has been charged so far."""
        with self._lock:
            books = [dict(book.costs) for book in self._books]
        total: dict[str, Cost] = {}
        for book in books:
            total = add_costs(total, book)
        return total

    def _book(self) -> _Book:
        book: _Book | None = getattr(self._local, "book", None)
        if book is None:
            book = self._local.book = _Book()
            with self._lock:
                self._books.append(book)
        return book


class MeteredExecutor(ThreadPoolExecutor):
    """Threads whose work is charged to one stage."""

    def __init__(self, workers: int, *, meter: Meter, stage: str, gives_way: bool = False) -> None:
        """gives_way: where all cores are busy, other threads of the process come first."""
        super().__init__(workers, thread_name_prefix=stage, initializer=_give_way if gives_way else None)
        self._meter, self._stage = meter, stage

    def submit(self, fn: Callable[Given, Answer], /, *args: Given.args, **kwargs: Given.kwargs) -> Future[Answer]:
        def charged(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
            with self._meter(self._stage):
                return fn(*args, **kwargs)

        return super().submit(charged, *args, **kwargs)


def _give_way() -> None:
    """Lower the calling thread's priority, on Linux, where a thread has one of its own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + GIVES_WAY_BY, LOWEST))


class _Book:
    """One thread's costs, and the span that it is in."""

    __slots__ = ("costs", "span")

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}
        self.span: _Span | None = None

    def add(self, stage: str, cpu: float, wall: float) -> None:
        self.costs[stage] = self.costs.get(stage, Cost()).plus(cpu, wall)


class _Span:
    __slots__ = ("_book", "_cpu", "_inner_cpu", "_inner_wall", "_outer", "_stage", "_wall")

    def __init__(self, book: _Book, stage: str) -> None:
        self._book, self._stage = book, stage

    def __enter__(self) -> None:
        self._outer, self._book.span = self._book.span, self
        self._inner_cpu = self._inner_wall = 0.0
        self._cpu, self._wall = time.thread_time(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        cpu, wall = time.thread_time() - self._cpu, time.perf_counter() - self._wall
        self._book.add(self._stage, cpu - self._inner_cpu, wall - self._inner_wall)
        outer = self._book.span = self._outer
        if outer is not None:
            outer._inner_cpu += cpu
            outer._inner_wall += wall

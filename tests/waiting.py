"""Waiting for what another thread or process does. The deadline only ends a hang: no test may count on how soon something comes."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HANG_S = 300.0

MOST_S = 1.0
"""What one look may take off the deadline: a machine that was suspended for minutes in between has not waited for them."""


def until(
    happened: Callable[[], object],
    process: subprocess.Popen[bytes] | subprocess.Popen[str] | None = None,
    *logs: Path,
) -> None:
    """Return once `happened()` is true. process: whose work it is; without it there is nothing to wait for.

    logs: files whose text is told where it does not happen.
    """

    def told(problem: str) -> str:
        return "\n".join([problem, *(f"{log}: {log.read_text() if log.exists() else 'no file'}" for log in logs)])

    left, seen = HANG_S, time.monotonic()
    while not happened():
        assert process is None or process.poll() is None or happened(), told("the process has ended")
        now = time.monotonic()
        left, seen = left - min(now - seen, MOST_S), now
        assert left > 0, told("it did not happen")
        time.sleep(0.005)


Until = Callable[[Callable[[], object]], None]


@contextmanager
def beside(work: Callable[[Until], object]) -> Iterator[None]:
    """`work` in a thread of its own while the block runs: a block that fails leaves none behind that fails, or stops, a later test.

    work: gets an `until` of one argument, which raises where the block is left before it happened; so is what else `work` raises, by
    a block that has not failed itself.
    """
    left = threading.Event()

    def until_left(happened: Callable[[], object]) -> None:
        until(lambda: left.is_set() or happened())
        assert not left.is_set() or happened(), "it did not happen before the block was left"

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work, until_left)
        try:
            yield
        finally:
            left.set()
        done.result()

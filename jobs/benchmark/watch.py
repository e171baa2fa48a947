"""What a piece of work takes of this process: seconds, CPU time, and memory at its peak, of the host and of the GPU."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAMPLE_S = 0.02


class Watch:
    """Memory and time of this process while it is watched."""

    def __init__(self) -> None:
        self.before_mb = self.peak_mb = resident_mb()
        self.seconds = self.cpu_seconds = self.device_mb = 0.0
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def end(self) -> None:
        import torch

        self.seconds, self.cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu
        self._ended.set()
        self._thread.join()
        if torch.cuda.is_available():
            self.device_mb = torch.cuda.max_memory_allocated() / 1e6

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.peak_mb = max(self.peak_mb, resident_mb())


def resident_mb() -> float:
    """Memory of this process that is not swapped out, in 10^6 bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def watched() -> Iterator[Watch]:
    """A watch that ends with the context."""
    watch = Watch()
    try:
        yield watch
    finally:
        watch.end()

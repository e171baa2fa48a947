"""What each launch of an operator takes, by events around it: an operator's time, in its parts."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from longscan.kernels.bench.measure import HEAD_START_CYCLES, L2_FLUSH_BYTES

WARMUP = 2
REPEATS = 9


class _Watched:
    """`cuda.tile`, save that events stand around each launch."""

    def __init__(self, ct: ModuleType) -> None:
        self._ct = ct
        self.launches: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ct, name)

    def launch(self, stream: object, grid: tuple[int, ...], kernel: Any, arguments: tuple[Any, ...]) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._ct.launch(stream, grid, kernel, arguments)
        end.record()
        self.launches.append((str(kernel._pyfunc.__name__), begin, end))


@contextmanager
def watching(module: ModuleType) -> Iterator[_Watched]:
    """Inside, launches of `module`, an operator's `cutile`, are watched."""
    watched, ct = _Watched(module.ct), module.ct
    module.ct = watched  # type: ignore[attr-defined]
    try:
        yield watched
    finally:
        module.ct = ct  # type: ignore[attr-defined]


def launch_times(operator: str, call: Callable[[], object]) -> Mapping[str, float]:
    """Median milliseconds of each kernel that a call of `operator` launches, in their order, with L2 overwritten before the call.

    A kernel that is launched several times counts with all of them. Their sum is not the operator's time: what it does beside them is
    left out, and the events cost a little themselves. There are none of an operator that has no kernels of its own.
    """
    name = f"longscan.kernels.{operator}.cutile"
    if importlib.util.find_spec(name) is None:
        return {}
    module = importlib.import_module(name)
    for _ in range(WARMUP):
        call()
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    found: dict[str, list[float]] = {}
    runs = []
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START_CYCLES)
    for _ in range(REPEATS):
        flush.zero_()
        with watching(module) as watched:
            call()
        runs.append(watched.launches)
    torch.cuda.synchronize()
    for launches in runs:
        total: dict[str, float] = {}
        for name, begin, end in launches:
            total[name] = total.get(name, 0.0) + begin.elapsed_time(end)
        for name, milliseconds in total.items():
            found.setdefault(name, []).append(milliseconds)
    return {name: sorted(times)[len(times) // 2] for name, times in found.items()}

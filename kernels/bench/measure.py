"""Times of calls on a GPU, what the chip does at its best, and what a result must say of where it was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

Timer = Callable[[Callable[[], object]], float]
"""Seconds of a call."""

L2_FLUSH_BYTES = 256 << 20
"""Written before each timed call: more than the L2 of any GPU, so that no call finds what the one before it left there."""
HEAD_START_CYCLES = 40_000_000
"""The device sleeps for some 20 ms first, so that calls are queued one behind the other and the host's time is in no result."""
WARM_S = 0.2
"""For so long a call is repeated before its time counts, where calls are held against each other that the GPU's power may bound."""
ROUNDS = 3
"""Of calls that are held against each other."""
PACKAGES = ("longscan", "torch", "triton", "cuda-tile", "nvidia-cuda-tileiras", "mamba-ssm", "fla-core")


@dataclass(frozen=True, slots=True)
class Chip:
    """What this GPU does at its best, in this run."""

    copy_bytes_a_second: float
    """A copy of 4 GiB, bytes read and written."""
    product_flops_a_second: float
    """bf16, 8192 x 8192 x 8192."""


def time_on_gpu(call: Callable[[], object], *, warmup: int = 3, repeats: int = 15) -> float:
    """Median seconds of a call by the device's own clock, with its L2 overwritten before each."""
    for _ in range(warmup):
        call()
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START_CYCLES)
    for begin, end in events:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(sorted(begin.elapsed_time(end) for begin, end in events)[repeats // 2]) / 1e3


def time_when_warm(call: Callable[[], object]) -> float:
    """The same after WARM_S of the call: its clock is then what the call's own power leaves, and not what the one before it did."""
    return time_on_gpu(call, warmup=3 + int(WARM_S / max(time_on_gpu(call, repeats=1), WARM_S / 10_000)))


def in_turns(calls: Sequence[Callable[[], object]], timer: Timer) -> list[float]:
    """Seconds of each call, the median of ROUNDS rounds of all: a GPU gets slower as it gets warm, which is then no one's gain."""
    rounds = [[timer(call) for call in calls] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def peak_bytes(call: Callable[[], object]) -> int:
    """Bytes of device memory that a call takes beyond what was there before it, results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


def chip(timer: Timer = time_on_gpu) -> Chip:
    """Measure copy and product."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size() / timer(lambda: target.copy_(source))
    a, b = torch.randn(2, 8192, 8192, device="cuda").bfloat16().unbind(0)
    out = torch.empty_like(a)
    return Chip(copied, 2 * 8192**3 / timer(lambda: torch.mm(a, b, out=out)))


def origin(commit: str | None = None) -> dict[str, Any]:
    """Where and with what a result came to be: GPU, driver, versions, commit, date. What there is none of is null."""
    there = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if there else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if there else None,
        "cuda": torch.version.cuda,
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": commit or _output("git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short=12", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def facts(commit: str | None = None) -> dict[str, Any]:
    """The same, and what the chip does at its best, for times on a GPU."""
    return origin(commit) | {
        "chip": asdict(chip()),
        "timing": f"median of device times; {L2_FLUSH_BYTES >> 20} MiB are written before each call, so that L2 holds nothing of its data",
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """First line of what a program prints; None where it cannot be asked."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip().partition("\n")[0] or None

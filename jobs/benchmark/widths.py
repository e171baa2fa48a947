"""The projection into a mixer at other widths, a line each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from longscan.jobs.benchmark.needs import require_gpu
from longscan.jobs.benchmark.stacks import GEOMETRIES
from longscan.kernels.bench.case import time_candidate
from longscan.kernels.bench.measure import Timer, facts, time_on_gpu
from longscan.kernels.bench.report import chip_lines
from longscan.kernels.bench.ssd import TOKENS
from longscan.kernels.bench.widths import candidates, limit_milliseconds


def bench_widths(models: Sequence[str], *, commit: str | None = None) -> list[str]:
    """Print what each width takes. Returns a line for each that is wrong. Raises ConfigError where there is no GPU."""
    require_gpu("widths")
    print(*chip_lines(facts(commit)), sep="\n", flush=True)
    wrong: list[str] = []
    with torch.inference_mode():
        for model in models:
            wrong += report_widths(model, TOKENS, time_on_gpu)
            torch.cuda.empty_cache()
    return wrong


def report_widths(model: str, rows: int, timer: Timer, *, device: str = "cuda") -> list[str]:
    """Of one model. Returns a line for each width that is wrong."""
    g = GEOMETRIES[model]
    columns = -(-g.projected // 8) * 8
    limit = limit_milliseconds(rows, g.d_model, columns)
    print(f"{model}: [{rows}, {g.d_model}] @ [{g.d_model}, {columns}], limit {limit:.4f} ms")
    wrong = []
    for candidate in candidates(rows, g.d_model, columns, g.num_heads, device=device):
        timing = time_candidate(candidate, timer)
        if timing.milliseconds is None:
            wrong.append(f"{model}, {timing.name}: {timing.note}, found {dict(timing.errors)}")
        else:
            print(f"  {timing.name}: {timing.milliseconds:.4f} ms, {timing.milliseconds / limit:.2f} x the limit", flush=True)
    return wrong

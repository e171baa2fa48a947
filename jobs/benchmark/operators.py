"""Operators alone: each checked, timed and told of, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from longscan.jobs.benchmark.needs import require_gpu
from longscan.kernels.bench.case import run_case
from longscan.kernels.bench.launches import launch_times
from longscan.kernels.bench.measure import facts, time_on_gpu, time_when_warm
from longscan.kernels.bench.report import Results, chip_lines, lines
from longscan.kernels.bench.suite import cases


def bench_kernels(
    operators: Sequence[str],
    models: Sequence[str],
    *,
    path: Path | None = None,
    commit: str | None = None,
    chunks: Sequence[int],
    peers: bool = True,
) -> list[str]:
    """Print a table, and write it to `path` as JSON. Returns a line for each check that failed.

    Raises ConfigError where there is no GPU.
    """
    require_gpu("kernels")
    known = facts(commit)
    print(*chip_lines(known), sep="\n", flush=True)
    results = Results(path, "kernels", known)
    wrong: list[str] = []
    with torch.inference_mode():
        for case in cases(operators, models, chunks):
            row = run_case(case, time_on_gpu, peers=peers, parts=launch_times, warm=time_when_warm)
            print(*lines(row), sep="\n", flush=True)
            results.add(row.as_dict())
            if row.ours.milliseconds is None:
                wrong.append(f"{row.operator} ({row.shape}; {row.load}): {row.ours.note}, found {dict(row.ours.errors)}")
            del case  # it holds inputs and references of gigabytes, and the next is made before the name is taken anew
            torch.cuda.empty_cache()
    return wrong

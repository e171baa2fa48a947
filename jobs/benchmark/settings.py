"""Tuning: every kernel that asks for a setting, on the GPU that is here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from longscan.jobs.benchmark.needs import require_gpu
from longscan.kernels import tuning
from longscan.kernels.bench.measure import facts, time_on_gpu, time_when_warm
from longscan.kernels.bench.report import chip_lines
from longscan.kernels.bench.tune import NotTunable, keep, searches, tune


def tune_kernels(operators: Sequence[str], *, folder: Path | None, commit: str | None) -> list[str]:
    """Search, print a line a kernel and shape, and write the tables. Returns a line for each kernel that could not be tuned.

    folder: where the tables go; None: beside the kernels. Raises ConfigError where there is no GPU.
    """
    require_gpu("tune")
    known = facts(commit)
    print(*chip_lines(known), sep="\n", flush=True)
    arch = tuning.architecture()
    assert arch is not None
    wrong: list[str] = []
    for search in searches(operators):
        try:
            with torch.inference_mode():
                found = tune(search, time_on_gpu, time_when_warm)
        except NotTunable as error:
            wrong.append(str(error))
            continue
        print(found.line(), flush=True)
        keep(found, arch, folder or tuning.FOLDER, {key: known[key] for key in ("gpu", "driver", "versions", "commit", "date")})
    return sorted(set(wrong))

"""Kernels compiled ahead of time: a JSON line for each, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from longscan.jobs.benchmark.needs import require_compiler
from longscan.kernels.compile import SUPPORTED, compile_all, faults
from longscan.kernels.tuning import allow_spills
from longscan.pipeline.errors import ConfigError


def compile_kernels(archs: Sequence[str], operators: Sequence[str], *, full: bool, allow: bool) -> list[str]:
    """Print a line a variant. Returns a line for each thing that is wrong.

    full: every shape and dtype that the kernels take. allow: write the spills that are found to the tables first.
    Raises ConfigError where there is no compiler, or an architecture that the kernels are not for.
    """
    for arch in archs:
        if arch not in SUPPORTED:
            raise ConfigError(f"compile: expected --arch to be of {', '.join(SUPPORTED)}, got {arch!r}")
    require_compiler()
    reports = []
    for report in compile_all(archs, operators, full=full):
        print(json.dumps(report.as_dict()), flush=True)
        reports.append(report)
    if allow:
        spills: dict[tuple[str, str], int] = {}
        for report in reports:
            key = (report.kernel, report.arch)
            spills[key] = max(spills.get(key, 0), report.spill_bytes)
        allow_spills(spills, full=full)
    return [line for report in reports for line in faults(report, full=full)]

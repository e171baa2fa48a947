"""Engines with something wrong, for workers in other processes: they are named by what makes them, as `job.Job.build` asks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.engine.steps import Step
from longscan.pipeline.meter import Meter
from longscan.pipeline.worker.build import build_engine
from longscan.pipeline.worker.job import Job
from waiting import until

HELD_AT_TOKENS = 1024

MARK = "LONGSCAN_TEST_MARK"
"""Environment: a file that is made when something has gone wrong that does so only once."""


class OneHang(Engine):
    """What looks for hangs sees nothing under way but in the one that is meant: a step that is slow is none, however slow."""

    hanging = False

    @property
    def under_way(self) -> tuple[int, int]:
        return super().under_way if self.hanging else (0, 0)


def sabotaged(job: Job, folder: str, on_tokens: Callable[[int, int], None] | None, meter: Meter) -> Engine:
    """Row 4 of a file fails every step that it is in, as an error of the device would; row 9 hangs at the first try."""
    engine = build_engine(job, folder, on_tokens, meter)
    engine.__class__ = OneHang
    whole: Any = engine._forward.launch

    def launch(step: Step) -> Any:
        rows = {entry.document.document.row for entry in step.entries}
        mark = Path(os.environ[MARK])
        if 9 in rows and not mark.exists():
            mark.touch()
            engine.hanging = True  # type: ignore[attr-defined]
            time.sleep(1000)
        if 4 in rows:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return whole(step)

    engine._forward.launch = launch  # type: ignore[method-assign]
    return engine


def go_on(output: Path | str) -> Path:
    """The file for which held engines of a run wait."""
    return Path(f"{output}.go")


def held(behind: str, job: Job, folder: str, on_tokens: Callable[[int, int], None] | None, meter: Meter) -> Engine:
    """An engine that goes on only when it is told to, or to stop. behind: "nothing", a "shard" of the run, or so many "tokens" of its own.

    One that waits for its own stop has not done all there is by the time that the stop reaches it, however late that is.
    """
    engine = build_engine(job, folder, on_tokens, meter)
    whole: Any = engine._forward.launch
    output = Path(job.config.output.path)

    def launch(step: Step) -> Any:
        done = list((output / "_run" / "manifest").glob("*.json"))
        if {"nothing": True, "shard": bool(done), "tokens": engine.totals.tokens > HELD_AT_TOKENS}[behind]:
            until(lambda: engine._stopping or go_on(output).exists())
        return whole(step)

    engine._forward.launch = launch  # type: ignore[method-assign]
    return engine


held_behind_nothing, held_behind_a_shard, held_behind_tokens = (partial(held, behind) for behind in ("nothing", "shard", "tokens"))

LOST: list[bool] = []
"""This process has lost its device."""


def poisoned(job: Job, folder: str, on_tokens: Callable[[int, int], None] | None, meter: Meter) -> Engine:
    """Row 9 of a file fails at the first try and takes the process's whole device along: every later step there fails as well."""
    engine = build_engine(job, folder, on_tokens, meter)
    whole: Any = engine._forward.launch

    def launch(step: Step) -> Any:
        mark = Path(os.environ[MARK])
        if LOST or (not mark.exists() and 9 in {entry.document.document.row for entry in step.entries}):
            mark.touch()
            LOST.append(True)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return whole(step)

    engine._forward.launch = launch  # type: ignore[method-assign]
    return engine

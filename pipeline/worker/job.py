"""What passes between a run and its workers: the job, once to each; chains of shards there, results and what they cost back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from longscan.pipeline.config import JobConfig
from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.engine.steps import StepTotals
from longscan.pipeline.meter import Cost, Costs, Meter, add_costs
from longscan.pipeline.plan.resolve import Choice
from longscan.pipeline.plan.sizes import Sizes
from longscan.pipeline.shards import Shard, ShardReport

EngineBuilder = Callable[["Job", str, Callable[[int, int], None] | None, Meter], Engine]

Chain = tuple[Shard, ...]
"""Shards that read on in one row group, to be taken one after the other."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a worker has done between two moments."""

    seconds: float = 0.0
    """Of one worker, or the sum of several's."""
    steps: StepTotals = field(default_factory=StepTotals)
    costs: Costs = field(default_factory=dict)
    workers: int = 0
    """Whose first result is among these."""
    longest: float = 0.0
    """Seconds, since it was built, of the worker that is at work for the longest time."""

    def plus(self, other: Usage) -> Usage:
        return Usage(
            self.seconds + other.seconds,
            self.steps.plus(other.steps),
            add_costs(self.costs, other.costs),
            self.workers + other.workers,
            max(self.longest, other.longest),
        )

    def minus(self, other: Usage) -> Usage:
        """What came since `other`, an earlier one of the same worker."""
        back = {stage: Cost(-cost.cpu, -cost.wall) for stage, cost in other.costs.items()}
        steps, costs = self.steps.minus(other.steps), add_costs(self.costs, back)
        return Usage(self.seconds - other.seconds, steps, costs, self.workers - other.workers, self.longest)


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker needs to know of a run: plain data, sent to it once."""

    config: JobConfig
    choice: Choice
    sizes: Sizes
    passthrough: pa.Schema
    provenance: Mapping[str, Any]
    build: EngineBuilder | None = None
    """Makes the worker's engine, from what `build_engine` takes; None for `build_engine` itself."""
    start: int = 0
    """Number of the run's start, `RunFolder.number`."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a shard: its report, or why there is none."""

    index: int
    report: ShardReport | None
    error: str = ""
    usage: Usage | None = None
    """What the worker has done since the result before it that has one."""

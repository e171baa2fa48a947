"""A device that computes nothing and takes as long as one that does: the host's side of a job, measured without a GPU.

A step is queued and takes its rows / rate seconds from when the device is free; whoever waits for it sleeps, and holds no
lock of Python's meanwhile, as a wait for CUDA does. Vectors are ones, log-probabilities zeros, of the sizes of the real ones.
"""

# ruff: noqa: ARG002  what computes nothing looks at nothing

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from longscan.kernels.pool import PoolOutput, PoolState, closed_windows
from longscan.kernels.segments import TILE, Segments
from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.engine.forward import Forward
from longscan.pipeline.engine.settings import EngineSettings
from longscan.pipeline.engine.stepmodel import Mark, StepModel
from longscan.pipeline.meter import Meter
from longscan.pipeline.worker.job import EngineBuilder, Job

WIDTH = 768
"""Of mamba2-130m."""


class SleepingModel:
    """A model in name: `busy_until` is when the device, by time.perf_counter, is done with all steps so far."""

    def __init__(self, rate: float, width: int) -> None:
        """rate: rows a second."""
        self.rate, self.width = rate, width
        self.busy_until = 0.0

    def new_state(self, slots: int) -> None:
        return None

    def lane(self, state: None, lane: int) -> dict[str, torch.Tensor]:
        return {}

    def step(self, ids_T: torch.Tensor, segments: Segments, state: None) -> tuple[torch.Tensor, None]:
        self.busy_until = max(self.busy_until, time.perf_counter()) + segments.num_rows / self.rate
        return torch.ones(1, self.width).expand(segments.num_rows, -1), None

    def state_norms(self, state: Any, lane: int) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.float64)

    def logprobs(self, hidden_TD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(targets_T))


@dataclass(frozen=True, slots=True)
class Moment:
    """A mark in the queue of such a device, which it passes at `at`."""

    at: float

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def elapsed_time(self, later: Moment) -> float:
        return 1e3 * (later.at - self.at)


class SleepingForward(Forward):
    """Steps of a SleepingModel: packed, copied and collected as real ones are."""

    model: SleepingModel

    def __init__(self, model: StepModel, settings: EngineSettings, meter: Meter | None = None) -> None:
        """How long a step takes is known from the beginning, as on a GPU, where one is rehearsed."""
        super().__init__(model, settings, meter)
        if self.tiles is not None:
            self.step_seconds = self.tiles * TILE / self.model.rate

    @property
    def steps_behind(self) -> int:
        return 1

    def _mark(self) -> Mark | None:
        return Moment(max(self.model.busy_until, time.perf_counter()))

    def _pool(self, hidden_TD: torch.Tensor, segments: Segments, state: PoolState) -> PoolOutput:
        poolings = self.task.embedding.poolings
        ends = sum(entry.ends for entry in segments.entries)
        windows = {}
        if self.pool_windows is not None:
            closed = len(closed_windows(segments, self.pool_windows))
            windows = {pooling: torch.ones(closed, self.model.width) for pooling in poolings}
        return PoolOutput({pooling: torch.ones(ends, self.model.width) for pooling in poolings}, windows)


def sleeping_engine(rate: float, width: int = WIDTH) -> EngineBuilder:
    """Builds engines on such a device, of `rate` rows a second; its constant steps are as on a GPU."""
    return partial(_build, rate, width)


def _build(rate: float, width: int, job: Job, _folder: str, on_tokens: Callable[[int, int], None] | None, meter: Meter) -> Engine:
    settings = EngineSettings(
        task=job.config.task,
        lanes=job.sizes.lanes,
        step_tokens=job.sizes.step_tokens,
        segment_tokens=job.config.engine.segment_tokens,
        device="cpu",
        backend="torch",
        context_id=job.choice.context_id,
        vocab_size=job.choice.vocab_size,
        constant_shape=True,
    )
    return Engine(SleepingModel(rate, width), settings, on_tokens=on_tokens, meter=meter, forward=SleepingForward)

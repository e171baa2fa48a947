"""A device that is late, on a CPU: what comes back is NaN until the queue has come past it, and so is what is overwritten by then."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from longscan.kernels.segments import Segments
from longscan.pipeline.engine.forward import Forward
from longscan.pipeline.engine.settings import EngineSettings
from longscan.pipeline.engine.stepmodel import StepModel
from longscan.pipeline.meter import Meter

LATE_QUERIES = 2
"""How often it is asked in vain whether the device is done."""


@dataclass(slots=True)
class LateMark:
    """A mark behind so many copies of all."""

    forward: LateForward
    copies: int
    queries: int = 0

    def synchronize(self) -> None:
        self.forward.come_to(self.copies)

    def query(self) -> bool:
        self.queries += 1
        return self.queries > LATE_QUERIES

    def elapsed_time(self, later: LateMark) -> float:
        return float(later.copies - self.copies)


class OneMemory:
    """A model whose hidden states are in one memory, as those of recorded steps are: the next step overwrites them."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._hidden_TD = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(self, ids_T: torch.Tensor, segments: Segments, state: Any) -> tuple[torch.Tensor, Any]:
        self._hidden_TD.fill_(torch.nan)
        hidden_TD, state = self._model.step(ids_T, segments, state)
        if self._hidden_TD.shape != hidden_TD.shape:
            self._hidden_TD = torch.empty_like(hidden_TD)
        return self._hidden_TD.copy_(hidden_TD), state


class LateForward(Forward):
    """Steps on such a device: a step is queued before the results of the one before are there, as on a GPU."""

    def __init__(self, model: StepModel, settings: EngineSettings, meter: Meter | None = None) -> None:
        self._queue_of_copies: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._queued = self._done = 0
        super().__init__(OneMemory(model), settings, meter)

    @property
    def steps_behind(self) -> int:
        return 1

    def come_to(self, copies: int) -> None:
        """Make the first `copies` copies of all, as far as they are not made."""
        with torch.inference_mode():
            while self._done < copies:
                host, there = self._queue_of_copies.popleft()
                host.copy_(there)
                self._done += 1

    def copy_lane(self, lane: int) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            return {name: self._to_host(view) for name, view in self.lane(lane).items()}

    def read_lane(self, lane: int) -> dict[str, torch.Tensor]:
        tensors = self.copy_lane(lane)
        self.come_to(self._queued)
        return tensors

    def _put_back(self, lane: int, tensors: Mapping[str, torch.Tensor]) -> None:
        on_their_way = [host for host, _ in self._queue_of_copies]
        assert not any(tensor is host for tensor in tensors.values() for host in on_their_way), "a carry that is not there yet"
        super()._put_back(lane, tensors)

    def _mark(self) -> LateMark:
        return LateMark(self, self._queued)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.full_like(tensor, torch.nan)
        self._queue_of_copies.append((host, tensor.clone()))
        self._queued += 1
        return host

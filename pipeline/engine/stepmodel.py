"""What the engine needs of a model and of the queue of its device; nothing here knows a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from longscan.kernels.segments import Segments


class StepModel(Protocol):
    """What the engine needs of a model. `state` is the model's own: tables with a slot a lane, updated in place and returned."""

    @property
    def width(self) -> int:
        """D of the hidden states."""

    def new_state(self, slots: int) -> Any:
        """Tables of `slots` zero states."""

    def lane(self, state: Any, lane: int) -> Mapping[str, torch.Tensor]:
        """Views of one lane's own part of each table, by name: what a carry is made of, and where one is put back."""

    def step(self, ids_T: torch.Tensor, segments: Segments, state: Any) -> tuple[torch.Tensor, Any]:
        """Hidden states [T, D] after the final norm, and the state."""

    def logprobs(self, hidden_TD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        """Natural logarithm of each row's probability of its target, [T] fp32; NaN where the target is -1."""

    def state_norms(self, state: Any, lane: int) -> torch.Tensor:
        """[layers, ...], float64: norms of the parts of a lane's state in each layer; asked for where task.state_norm is."""


class Mark(Protocol):
    """A place in the device's queue, as torch.Event is one."""

    def synchronize(self) -> None:
        """Wait until the device has come past it."""

    def query(self) -> bool:
        """Whether it has."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds of the device from here to a later mark; both are passed."""

"""Memory that tells: what an operator allocates is NaN until it is written, and stands between fences that nobody may touch."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

FENCE = 1024
"""Elements on either side: a multiple of any alignment that a kernel asks for."""
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as integers, so that a NaN can be compared."""
    return tensor.view(WHOLE[tensor.element_size()])


class Fenced:
    """While entered, `torch.empty` and `torch.empty_like` give NaN between fences; an AssertionError follows where a fence has changed."""

    def __init__(self) -> None:
        self.allocated = 0
        self._buffers: list[torch.Tensor] = []
        self._empty, self._empty_like = torch.empty, torch.empty_like

    def __enter__(self) -> Fenced:
        torch.empty, torch.empty_like = self._fenced_empty, self._fenced_empty_like  # type: ignore[assignment]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.empty, torch.empty_like = self._empty, self._empty_like
        buffers, self._buffers = self._buffers, []
        if error is None:
            fences = [part for buffer in buffers for part in (buffer[:FENCE], buffer[-FENCE:])]
            touched = [(bits(fence) != bits(torch.full_like(fence[:1], torch.nan))).any() for fence in fences]
            assert not touched or not bool(torch.stack(touched).any()), "something was written beside a tensor of the operator's own"

    def _fenced_empty(self, *size: Any, **options: Any) -> torch.Tensor:
        return self._fence(self._empty(*size, **{**options, "device": "meta"}), options.get("device", "cpu"))

    def _fenced_empty_like(self, like: torch.Tensor, **options: Any) -> torch.Tensor:
        return self._fence(self._empty_like(like, **{**options, "device": "meta"}), options.get("device", like.device))

    def _fence(self, wanted: torch.Tensor, device: Any) -> torch.Tensor:
        assert wanted.dtype.is_floating_point, "integers hold no NaN"
        assert wanted.is_contiguous()
        self.allocated += 1
        buffer = torch.full((wanted.numel() + 2 * FENCE,), torch.nan, dtype=wanted.dtype, device=device)
        self._buffers.append(buffer)
        return buffer[FENCE : FENCE + wanted.numel()].view(wanted.shape)

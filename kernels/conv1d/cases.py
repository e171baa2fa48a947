"""Named inputs of the convolution, for tests and benchmark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from longscan.kernels.layouts import Layout
from longscan.kernels.segments import Segments


@dataclass(frozen=True, slots=True)
class Shape:
    """C channels, K taps, inside rows of `stride` elements."""

    name: str
    C: int
    K: int
    stride: int


SMALL = (Shape("K4", C=96, K=4, stride=160), Shape("K2", C=96, K=2, stride=99), Shape("K3_odd_width", C=40, K=3, stride=41))
"""For correctness."""
MODELS = (
    Shape("demo", C=640, K=4, stride=1160),
    Shape("mamba2-130m", C=1792, K=4, stride=3352),
    Shape("mamba2-2.7b", C=5376, K=4, stride=10576),
    Shape("codestral-7b", C=10240, K=4, stride=18560),
)
"""For timing."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of `causal_conv1d`, without the backend."""

    tensors: dict[str, torch.Tensor]
    segments: Segments

    def arguments(self, **changed: Any) -> dict[str, Any]:
        """As keyword arguments. The table of tails is a copy, for the operator writes to it."""
        return {**self.tensors, "segments": self.segments, "tail_SKC": self.tensors["tail_SKC"].clone(), **changed}


def make_inputs(
    shape: Shape,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    poison: bool = True,
) -> Inputs:
    """Random inputs: x is a strided view of a projection.

    poison: NaN in the tiles that belong to no entry and in the slots that no entry reads.
    """
    generator = torch.Generator(device).manual_seed(seed)
    projection = torch.randn(layout.num_tiles * 64, shape.stride, generator=generator, device=device)
    weight_CK = torch.randn(shape.C, shape.K, generator=generator, device=device) / math.sqrt(shape.K)
    bias_C = torch.randn(shape.C, generator=generator, device=device)
    tail_SKC = torch.randn(layout.slots, shape.K - 1, shape.C, generator=generator, device=device)
    if poison:
        projection[~layout.owned_rows()] = math.nan
        unread = torch.ones(layout.slots, dtype=torch.bool)
        unread[layout.read_slots()] = False
        tail_SKC[unread] = math.nan
    tensors = {
        "x_TC": projection.to(device, dtype)[:, shape.stride - shape.C :],
        "weight_CK": weight_CK.to(device, dtype),
        "bias_C": bias_C.to(device, dtype),
        "tail_SKC": tail_SKC.to(device, dtype),
    }
    return Inputs(tensors, layout.segments(device))

"""Named inputs of the SSD, for tests and benchmark: shapes of heads, and values as a trained mixer sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from longscan.kernels.layouts import Layout
from longscan.kernels.segments import Segments


@dataclass(frozen=True, slots=True)
class Shape:
    """H heads of width P in G groups, states of width N."""

    name: str
    H: int
    P: int
    G: int
    N: int


SMALL = tuple(Shape(f"G{G}", H=8, P=16, G=G, N=16) for G in (1, 2, 8))
"""For correctness: one group, several heads a group, a group a head."""
MODELS = (
    Shape("demo", H=8, P=64, G=1, N=64),
    Shape("mamba2-130m", H=24, P=64, G=1, N=128),
    Shape("mamba2-2.7b", H=80, P=64, G=1, N=128),
    Shape("codestral-7b", H=128, P=64, G=8, N=128),
)
"""For timing."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of `ssd`, without the backend."""

    tensors: dict[str, torch.Tensor]
    dt_limit: tuple[float, float]
    segments: Segments

    def arguments(self, **changed: Any) -> dict[str, Any]:
        """As keyword arguments. The state table is a copy, for the operator writes to it."""
        given: dict[str, Any] = {**self.tensors, "dt_limit": self.dt_limit, "segments": self.segments}
        return {**given, "ssm_SHNP": self.tensors["ssm_SHNP"].clone(), **changed}


def make_inputs(
    shape: Shape,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    gate: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    seed: int = 0,
    poison: bool = True,
) -> Inputs:
    """Random inputs: x, dt, B, C and z are strided views of one projection [T, 2HP + 2GN + H].

    poison: NaN in the tiles that belong to no entry and in the slots that no entry reads.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device)

    H, P, G, N = shape.H, shape.P, shape.G, shape.N
    wide = torch.promote_types(dtype, torch.float32)
    projection = normal(layout.num_tiles * 64, 2 * H * P + 2 * G * N + H)
    ssm_SHNP = normal(layout.slots, H, N, P)
    # A in -16 .. -1 and time steps around 0.001 .. 0.1, as Mamba-2 is initialised (arXiv 2405.21060, appendix).
    time_H = torch.exp(torch.rand(H, generator=generator, device=device) * math.log(100.0) + math.log(0.001))
    A_H = -1.0 - 15.0 * torch.rand(H, generator=generator, device=device)
    D_H = normal(H)
    if poison:
        projection[~layout.owned_rows()] = math.nan
        unread = torch.ones(layout.slots, dtype=torch.bool)
        unread[layout.read_slots()] = False
        ssm_SHNP[unread] = math.nan
    z, x, B, C, dt = torch.split(projection.to(device, dtype), [H * P, H * P, G * N, G * N, H], dim=1)
    tensors = {
        "x_THP": x.view(-1, H, P),
        "dt_TH": dt,
        "A_H": A_H.to(device, wide),
        "B_TGN": B.view(-1, G, N),
        "C_TGN": C.view(-1, G, N),
        "D_H": D_H.to(device, wide),
        "dt_bias_H": (time_H + torch.log(-torch.expm1(-time_H))).to(device, wide),
        "ssm_SHNP": ssm_SHNP.to(device, wide),
    }
    if gate:
        tensors["z_THP"] = z.view(-1, H, P)
    return Inputs(tensors, dt_limit, layout.segments(device))

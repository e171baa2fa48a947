"""Named inputs of the norms, for tests and benchmark."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of the given width; the gated norm has that many groups."""

    name: str
    width: int
    groups: int = 1


SMALL = (Shape("G1", 96, 1), Shape("G2", 96, 2), Shape("G8", 1024, 8), Shape("odd_width", 40, 2))
"""For correctness."""
RESIDUAL = (Shape("demo", 256), Shape("mamba2-130m", 768), Shape("mamba2-2.7b", 2560), Shape("codestral-7b", 4096))
GATED = (Shape("demo", 512), Shape("mamba2-130m", 1536), Shape("mamba2-2.7b", 5120), Shape("codestral-7b", 8192, 8))
"""For timing: the residual stream's norm and the mixer's."""

EPS = 1e-5


def make_rows(
    shape: Shape, num_rows: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, torch.Tensor]:
    """x, z, weight and residual: rows of very different sizes, x and z strided views, weight and residual fp32 at least."""
    generator = torch.Generator(device).manual_seed(seed)
    both = torch.randn(num_rows, 2 * shape.width + 8, generator=generator, device=device)
    both *= torch.exp(2.0 * torch.randn(num_rows, 1, generator=generator, device=device))
    weight = torch.randn(shape.width, generator=generator, device=device)
    residual = torch.randn(num_rows, shape.width, generator=generator, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    z, x = torch.split(both.to(device, dtype)[:, 8:], shape.width, dim=1)
    return {"x": x, "z": z, "weight": weight.to(device, wide), "residual": residual.to(device, wide)}

"""Products that tests and benchmarks share: those of a layer at the shapes of the models that people run."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """[T, inner] @ [inner, columns]; the result's rows are `pitch` elements apart."""

    name: str
    inner: int
    columns: int
    pitch: int
    add: bool = False
    """Onto the stream, in fp32."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """As the operator takes them."""

    x_TK: torch.Tensor
    weight_NK: torch.Tensor
    out_TN: torch.Tensor

    def truth(self, *, add: bool) -> torch.Tensor:
        """What should come out, in fp32."""
        product = self.x_TK.float() @ self.weight_NK.float().T
        return self.out_TN.float() + product if add else product


MODELS = (
    Shape("mamba2-130m", 768, 3352, 3392),
    Shape("mamba2-130m", 1536, 768, 768, add=True),
    Shape("mamba2-2.7b", 2560, 10576, 10624),
    Shape("mamba2-2.7b", 5120, 2560, 2560, add=True),
    Shape("codestral-7b", 4096, 18560, 18560),
    Shape("codestral-7b", 8192, 4096, 4096, add=True),
)


def make(shape: Shape, rows: int, *, dtype: torch.dtype, device: torch.device | str) -> Inputs:
    """Numbers around one; a stream where the product is added to one, NaN where it is written."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, shape.inner, generator=generator, device=device).to(dtype)
    weight = (torch.randn(shape.columns, shape.inner, generator=generator, device=device) * shape.inner**-0.5).to(dtype)
    if shape.add:
        out = torch.randn(rows, shape.pitch, generator=generator, device=device)
    else:
        out = torch.full((rows, shape.pitch), torch.nan, dtype=dtype, device=device)
    return Inputs(x, weight, out[:, : shape.columns])

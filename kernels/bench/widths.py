"""The projection into a mixer at other widths: whether cuBLAS is faster where rows of weight or of output are rounded up.

A layer's first product has 2 I + 2 G N + H columns, 3352 at 130m's shape: its tiles are 128 or 256 wide, and rows of its output begin
on no line of 128 bytes. What is spared by rounding up must be more than what is computed and written for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from longscan.kernels.bench.case import Candidate, Errors, relative_error
from longscan.kernels.bench.limits import product_work

TOLERANCE = 3e-3
"""Relative error in bf16: its own rounding is 1.7e-3."""
ROUNDED_TO = (64, 128, 256)
AS_IT_IS = "as it is"


def candidates(rows: int, inner: int, columns: int, heads: int, *, device: str = "cuda") -> Iterator[Candidate]:
    """Ways to make [rows, inner] @ [inner, columns] in bf16, the first as the network makes it; `columns` is a multiple of 8.

    heads: columns at the end, the time steps, that may be a product of their own.
    """
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, inner, generator=generator, device=device).bfloat16()
    weight = (torch.randn(columns, inner, generator=generator, device=device) * inner**-0.5).bfloat16()
    truth = x.float() @ weight.float().T

    def one(name: str, wide: int, stride: int) -> Candidate:
        padded = torch.nn.functional.pad(weight, (0, 0, 0, wide - columns))
        out = torch.empty(rows, stride, dtype=x.dtype, device=device)[:, :wide]
        return _candidate(name, lambda: torch.mm(x, padded.T, out=out), out[:, :columns], truth)

    yield one(AS_IT_IS, columns, columns)
    for width in ROUNDED_TO:
        rounded = -(-columns // width) * width
        yield one(f"output's rows a multiple of {width}", columns, rounded)
        yield one(f"weight's and output's rows a multiple of {width}", rounded, rounded)
    out = torch.empty(rows, columns, dtype=x.dtype, device=device)
    parts = [(weight[:-heads].T, out[:, :-heads]), (weight[-heads:].T, out[:, -heads:])]
    yield _candidate("time steps in a product of their own", lambda: [torch.mm(x, w, out=part) for w, part in parts], out, truth)


def limit_milliseconds(rows: int, inner: int, columns: int) -> float:
    return product_work(rows, inner, columns).seconds * 1e3


def _candidate(name: str, call: Callable[[], object], out: torch.Tensor, truth: torch.Tensor) -> Candidate:
    def check() -> Errors:
        out.fill_(torch.nan)
        call()
        return {"product": relative_error(out, truth)}

    return Candidate(name, call, check, TOLERANCE)

"""A layer's products with the tiles of the tuning table, beside what cuBLAS takes of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from longscan.kernels.bench.case import Candidate, Case, Errors, Peer, relative_error
from longscan.kernels.bench.limits import product_work
from longscan.kernels.checks import Backend
from longscan.kernels.product import cublas, product
from longscan.kernels.product.cases import Inputs, Shape, make

TOLERANCE = 3e-3
"""Relative error in bf16: its own rounding is 1.7e-3."""
ROWS = 90_112
"""Of a step on an H200, as the engine sizes it for mamba2-130m."""


def cases(
    shapes: Sequence[Shape], *, num_rows: int = ROWS, backend: Backend = "cutile", device: str = "cuda", proposed: bool = False
) -> Iterator[Case]:
    """proposed: a tile that cuBLAS does not propose is an error, and not PyTorch's product in its place."""
    for shape in shapes:
        yield _case(shape, make(shape, num_rows, dtype=torch.bfloat16, device=device), backend, proposed)


def _case(shape: Shape, inputs: Inputs, backend: Backend, proposed: bool) -> Case:
    x, weight, out = inputs.x_TK, inputs.weight_NK, inputs.out_TN
    truth, before = inputs.truth(add=shape.add), out.clone()

    def candidate(name: str, backend: Backend) -> Candidate:
        def call() -> None:
            product(x, weight, out_TN=out, add=shape.add, backend=backend)

        def check() -> Errors:
            out.copy_(before)
            if proposed and cublas.wanted(weight, add=shape.add) and not cublas.product(x, weight, out_TN=out, add=shape.add):
                raise LookupError(f"cuBLAS proposes no tile {cublas.wanted(weight, add=shape.add)} for {shape}")
            out.copy_(before)
            call()
            return {"product": relative_error(out, truth)}

        return Candidate(name, call, check, TOLERANCE)

    return Case(
        operator="product",
        shape=f"{shape.name}, [{shape.inner}, {shape.columns}]" + (" onto the stream" if shape.add else ""),
        load=f"{len(x)} rows",
        work=product_work(len(x), shape.inner, shape.columns, add=shape.add),
        ours=candidate("longscan", backend),
        in_turns=True,
        peers=[Peer("torch, cuBLAS's own choice", lambda: [candidate("", "torch")])],
    )

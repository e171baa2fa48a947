"""pool beside torch's sums in float64: all poolings and windows in one read of the hidden states, or the mean alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from longscan.kernels.bench.case import Candidate, Case, Errors, Peer, relative_error
from longscan.kernels.bench.limits import pool_work
from longscan.kernels.checks import Backend
from longscan.kernels.pool import PoolOutput, PoolState, pool
from longscan.kernels.pool.cases import Case as Shape
from longscan.kernels.pool.cases import Inputs, make

TOLERANCE = 1e-6
"""Relative error of vectors and running sums, which are float64, against the reference."""


def cases(shapes: Sequence[Shape], *, backend: Backend = "cutile", device: str = "cuda") -> Iterator[Case]:
    """Each shape twice: as it is, and with the mean of documents alone."""
    for shape in shapes:
        yield _case(shape, "all poolings, windows", make(shape, device, torch.bfloat16), backend)
        mean = replace(shape, poolings=("mean",), window_tokens=None)
        yield _case(mean, "mean", make(mean, device, torch.bfloat16), backend)


def _case(shape: Shape, what: str, inputs: Inputs, backend: Backend) -> Case:
    tokens = sum(piece.num_tokens for piece in shape.pieces)

    def run(state: PoolState, backend: Backend) -> tuple[PoolOutput, PoolState]:
        return pool(
            inputs.hidden_TD,
            state=state,
            poolings=shape.poolings,
            segments=inputs.segments,
            window_tokens=shape.window_tokens,
            backend=backend,
        )

    def numbers(state: PoolState, backend: Backend) -> dict[str, torch.Tensor]:
        output, state = run(state, backend)
        kept = {f"state of {name}": table[: len(shape.pieces)] for name, table in state.tables.items()}
        return {**output.documents, **{f"windows, {name}": found for name, found in output.windows.items()}, **kept}

    truth = numbers(_copy(inputs.state), "torch")
    kept = _copy(inputs.state)

    def check() -> Errors:
        found = numbers(_copy(inputs.state), backend)
        return {"vectors and sums": max(_error(found[name], truth[name]) for name in truth)}

    return Case(
        operator="pool",
        shape=f"D {shape.width}, {what}",
        load=shape.name,
        work=pool_work(shape.width, tokens),
        ours=Candidate("longscan", lambda: run(kept, backend), check, TOLERANCE),
        peers=[Peer("torch", lambda: [_torch(shape, inputs)])] if shape.poolings == ("mean",) else [],
    )


def _copy(state: PoolState) -> PoolState:
    return PoolState({name: table.clone() for name, table in state.tables.items()})


def _error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Where the reference holds a number; the two must agree on where that is."""
    number = truth.isfinite()
    if found.shape != truth.shape or not torch.equal(found.isfinite(), number):
        return float("inf")
    return relative_error(found[number], truth[number]) if number.any() else 0.0


def _torch(shape: Shape, inputs: Inputs) -> Candidate:
    """Sums of equally long documents, in float64."""
    count = len(shape.pieces)

    def call() -> torch.Tensor:
        padded = inputs.hidden_TD.unflatten(0, (count, -1))[:, : shape.pieces[0].num_tokens]
        return torch.sum(padded, 1, dtype=torch.float64)

    def check() -> Errors:
        truth = [inputs.hidden_TD[entry.rows].double().sum(0) for entry in inputs.segments.entries]
        return {"sum": relative_error(call(), torch.stack(truth))}

    return Candidate("", call, check)

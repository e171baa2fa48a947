"""The SSD beside mamba_ssm's Triton kernels, all launches counted, states read and kept on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from longscan.kernels.bench.case import Candidate, Case, Errors, Peer, relative_error
from longscan.kernels.bench.limits import ssd_work, tokens_of
from longscan.kernels.bench.peers import mamba_ssm
from longscan.kernels.checks import Backend
from longscan.kernels.layouts import Layout, packed
from longscan.kernels.segments import Segments
from longscan.kernels.ssd import ssd
from longscan.kernels.ssd.cases import Inputs, Shape, make_inputs
from longscan.kernels.ssd.spans import span_tiles

TOLERANCE = 3e-3
"""Relative error of outputs and states in bf16 that a timed kernel may have against float64."""
TOKENS = 65_536
DOCUMENTS = packed("16 documents of 4096", [4096] * 16)
FULL_WAVES = packed("11 documents of 5952", [5952] * 11)
ONE_DOCUMENT = packed("one document of 65536", [TOKENS])
CHUNKS = (64, 128, 256)
"""Of mamba_ssm; the fastest is kept."""


@dataclass(frozen=True, slots=True)
class Load:
    """Documents of a step, and how many tiles a span of theirs has."""

    layout: Layout
    span_tiles: int | None = None


def loads(shape: Shape) -> Sequence[Load]:
    """Documents enough to fill the GPU (with few heads, as many as fill its last wave of blocks as well), and one alone, in spans."""
    return (Load(FULL_WAVES if shape.H <= 32 else DOCUMENTS), Load(ONE_DOCUMENT, span_tiles(shape.H)))


def cases(
    shapes: Sequence[Shape],
    *,
    loads: Callable[[Shape], Sequence[Load]] = loads,
    backend: Backend = "cutile",
    device: str = "cuda",
    chunks: Sequence[int] = CHUNKS,
) -> Iterator[Case]:
    for shape in shapes:
        for load in loads(shape):
            yield _case(shape, load, backend, device, chunks)


def _case(shape: Shape, load: Load, backend: Backend, device: str, chunks: Sequence[int]) -> Case:
    layout = load.layout
    inputs = make_inputs(shape, layout, dtype=torch.bfloat16, device=device, poison=False)
    if load.span_tiles is not None:
        spans = Segments.pack(layout.entries, layout.num_tiles, device, span_tiles=load.span_tiles)
        inputs = replace(inputs, segments=spans)
    truth = _truth(inputs)
    arguments = inputs.arguments()

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        return ssd(**arguments, backend=backend)

    def check() -> Errors:
        return errors(ssd(**inputs.arguments(), backend=backend), truth, inputs)

    return Case(
        operator="ssd",
        shape=shape.name,
        load=layout.name,
        work=ssd_work(shape, layout),
        ours=Candidate("longscan", ours, check, TOLERANCE),
        peers=[Peer("mamba_ssm Triton", lambda: _mamba(inputs, truth, chunks))],
        token_heads=tokens_of(layout) * shape.H,
    )


def _truth(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and table of states by the reference, in float64."""
    wide = {name: tensor.double() for name, tensor in inputs.tensors.items()}
    return ssd(**Inputs(wide, inputs.dt_limit, inputs.segments).arguments(), backend="torch")


def errors(got: tuple[torch.Tensor, torch.Tensor], truth: tuple[torch.Tensor, torch.Tensor], inputs: Inputs) -> Errors:
    """Relative errors of the outputs of real rows, and of the table of states."""
    rows = inputs.segments.real_rows().to(truth[0].device)
    return {"y": relative_error(got[0][rows], truth[0][rows]), "state": relative_error(got[1], truth[1])}


def _mamba(inputs: Inputs, truth: tuple[torch.Tensor, torch.Tensor], chunks: Sequence[int]) -> list[Candidate]:
    """A candidate a chunk size, on a batch of the documents, which must be equally long and fill their tiles."""
    scan = mamba_ssm("ssd_combined").mamba_chunk_scan_combined
    tensors, entries = inputs.tensors, inputs.segments.entries
    count = len(entries)
    lanes = torch.tensor([entry.lane_in for entry in entries], device=truth[0].device)
    batch = {name: tensors[f"{name}"].unflatten(0, (count, -1)) for name in ("x_THP", "dt_TH", "B_TGN", "C_TGN")}
    states = tensors["ssm_SHNP"][lanes].transpose(2, 3).contiguous()

    def call(chunk: int) -> Any:
        return scan(
            batch["x_THP"],
            batch["dt_TH"],
            tensors["A_H"],
            batch["B_TGN"],
            batch["C_TGN"],
            chunk_size=chunk,
            D=tensors["D_H"],
            dt_bias=tensors["dt_bias_H"],
            initial_states=states,
            dt_softplus=True,
            dt_limit=inputs.dt_limit,
            return_final_states=True,
        )

    def check(chunk: int) -> Errors:
        y, final = call(chunk)
        return {"y": relative_error(y.flatten(0, 1), truth[0]), "state": relative_error(final.transpose(2, 3), truth[1][lanes])}

    return [Candidate(f"chunk {chunk}", lambda c=chunk: call(c), lambda c=chunk: check(c)) for chunk in chunks]  # type: ignore[misc]

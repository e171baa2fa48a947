"""The convolution with SiLU beside fla-core's, from a strided view of the projection, as in the network."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from longscan.kernels.bench.case import Candidate, Case, Errors, Peer, relative_error
from longscan.kernels.bench.limits import conv1d_work, tokens_of
from longscan.kernels.bench.peers import fla
from longscan.kernels.bench.ssd import DOCUMENTS
from longscan.kernels.checks import Backend
from longscan.kernels.conv1d import causal_conv1d
from longscan.kernels.conv1d.cases import Inputs, Shape, make_inputs
from longscan.kernels.layouts import Layout

TOLERANCE = 3e-3
"""Relative error in bf16, against the reference in fp32: bf16's own rounding is 1.7e-3."""


def cases(shapes: Sequence[Shape], *, load: Layout = DOCUMENTS, backend: Backend = "cutile", device: str = "cuda") -> Iterator[Case]:
    for shape in shapes:
        inputs = make_inputs(shape, load, dtype=torch.bfloat16, device=device, poison=False)
        yield _case(shape, load, inputs, backend)


def _case(shape: Shape, load: Layout, inputs: Inputs, backend: Backend) -> Case:
    wide = Inputs({name: tensor.float() for name, tensor in inputs.tensors.items()}, inputs.segments)
    truth = causal_conv1d(**wide.arguments(), backend="torch")
    # As the network keeps them: fp32, the taps one after the other, so that no call makes them anew.
    kept = {"weight_CK": inputs.tensors["weight_CK"].float().T.contiguous().T, "bias_C": inputs.tensors["bias_C"].float()}
    arguments = inputs.arguments() | kept

    def check() -> Errors:
        y_TC, tail_SKC = causal_conv1d(**inputs.arguments(), backend=backend)
        rows = inputs.segments.real_rows().to(y_TC.device)
        return {"y": relative_error(y_TC[rows], truth[0][rows]), "tail": relative_error(tail_SKC, truth[1])}

    return Case(
        operator="conv1d",
        shape=f"{shape.name}, C {shape.C}",
        load=load.name,
        work=conv1d_work(shape.C, tokens_of(load)),
        ours=Candidate("longscan", lambda: causal_conv1d(**arguments, backend=backend), check, TOLERANCE),
        peers=[
            Peer("fla-core, states carried,", lambda: _fla(inputs, truth, carried=True)),
            Peer("fla-core, no states,", lambda: _fla(inputs, truth, carried=False)),
            Peer("torch", lambda: [_torch(inputs, truth)]),
        ],
    )


def _fla(inputs: Inputs, truth: tuple[torch.Tensor, torch.Tensor], *, carried: bool) -> list[Candidate]:
    """Its Triton kernel, and its Gluon kernel, which it takes where the environment asks for it and it fits."""
    convolve = fla("causal_conv1d").causal_conv1d
    x, weight, bias, before, lanes = _batch(inputs)
    K = weight.shape[1]
    state = F.pad(before.transpose(1, 2), (1, 0)).contiguous() if carried else None

    def call(gluon: bool) -> tuple[torch.Tensor, torch.Tensor]:
        os.environ["FLA_GLUON"] = str(int(gluon))
        y, final = convolve(x, weight, bias, initial_state=state, output_final_state=carried, activation="silu")
        return y, final

    def check(gluon: bool) -> Errors:
        y, final = call(gluon)
        if not carried:  # its documents begin from zero, so the first rows of each are others
            return {"y": relative_error(y[:, K - 1 :], truth[0].unflatten(0, x.shape[:2])[:, K - 1 :])}
        tail = final[:, :, 1:].transpose(1, 2)
        return {"y": relative_error(y.flatten(0, 1), truth[0]), "tail": relative_error(tail, truth[1][lanes])}

    kernels = (("Triton", False), ("Gluon where it fits", True))
    return [Candidate(name, lambda g=gluon: call(g), lambda g=gluon: check(g)) for name, gluon in kernels]  # type: ignore[misc]


def _torch(inputs: Inputs, truth: tuple[torch.Tensor, torch.Tensor]) -> Candidate:
    """A grouped convolution, then SiLU; documents begin from zero."""
    x, weight, bias, _, _ = _batch(inputs)
    K = weight.shape[1]

    def call() -> torch.Tensor:
        y = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=K - 1, groups=len(weight))
        return F.silu(y[:, :, : x.shape[1]]).transpose(1, 2)

    def check() -> Errors:
        return {"y": relative_error(call()[:, K - 1 :], truth[0].unflatten(0, x.shape[:2])[:, K - 1 :])}

    return Candidate("", call, check)


def _batch(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """x [B, L, C] as a view, weight, bias, tails by document [B, K - 1, C], and their lanes."""
    tensors, entries = inputs.tensors, inputs.segments.entries
    lanes = torch.tensor([entry.lane_in for entry in entries], device=tensors["x_TC"].device)
    return tensors["x_TC"].unflatten(0, (len(entries), -1)), tensors["weight_CK"], tensors["bias_C"], tensors["tail_SKC"][lanes], lanes

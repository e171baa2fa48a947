"""The norms beside mamba_ssm's, fla-core's and torch's: of the residual stream, which is fp32, and of the mixer's gated output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from longscan.kernels.bench.case import Candidate, Case, Errors, Peer, relative_error
from longscan.kernels.bench.limits import gated_norm_work, residual_norm_work, stream_norm_work
from longscan.kernels.bench.peers import fla, mamba_ssm
from longscan.kernels.bench.ssd import TOKENS
from longscan.kernels.checks import Backend
from longscan.kernels.norm import gated_rms_norm, rms_norm
from longscan.kernels.norm.cases import EPS, Shape, make_rows

TOLERANCE = 3e-3
"""Relative error in bf16, against the reference in fp32: bf16's own rounding is 1.7e-3."""

Pair = tuple[torch.Tensor, torch.Tensor]
Rows = dict[str, torch.Tensor]


def cases(
    residual: Sequence[Shape],
    gated: Sequence[Shape],
    *,
    num_rows: int = TOKENS,
    backend: Backend = "cutile",
    device: str = "cuda",
) -> Iterator[Case]:
    for shape in residual:
        yield _residual(shape, make_rows(shape, num_rows, dtype=torch.bfloat16, device=device), backend)
        yield _stream(shape, make_rows(shape, num_rows, dtype=torch.bfloat16, device=device), backend)
    for shape in gated:
        yield _gated(shape, make_rows(shape, num_rows, dtype=torch.bfloat16, device=device), backend)


def _residual(shape: Shape, rows: Rows, backend: Backend) -> Case:
    x, weight, residual = rows["x"], rows["weight"], rows["residual"]
    truth = rms_norm(x.float(), weight, residual_TD=residual.clone(), eps=EPS, backend="torch")
    kept = residual.clone()  # the operator adds to it in place

    def errors(result: Pair) -> Errors:
        return {"y": relative_error(result[0], truth[0]), "residual": relative_error(result[1], truth[1])}

    def ours(stream: torch.Tensor) -> Pair:
        return rms_norm(x, weight, residual_TD=stream, eps=EPS, backend=backend)

    def triton(kernel: Callable[..., Pair]) -> Candidate:
        def call() -> Pair:
            return kernel(x, weight, None, residual=residual, eps=EPS, prenorm=True, residual_in_fp32=True)

        return Candidate("", call, lambda: errors(call()))

    def plain() -> Pair:
        stream = residual + x
        return F.rms_norm(stream, x.shape[1:], weight, EPS).to(x.dtype), stream

    return Case(
        operator="norm",
        shape=f"{shape.name}, residual + RMSNorm, D {shape.width}",
        load=f"{len(x)} rows",
        work=residual_norm_work(shape.width, len(x)),
        ours=Candidate("longscan", lambda: ours(kept), lambda: errors(ours(residual.clone())), TOLERANCE),
        peers=[
            Peer("mamba_ssm Triton", lambda: [triton(mamba_ssm("layer_norm").rms_norm_fn)]),
            Peer("fla-core Triton", lambda: [triton(fla("layernorm").rms_norm)]),
            Peer("torch", lambda: [Candidate("", plain, lambda: errors(plain()))]),
        ],
    )


def _stream(shape: Shape, rows: Rows, backend: Backend) -> Case:
    """The stream alone, to which the product before has added."""
    stream, weight = rows["residual"], rows["weight"]
    truth, _ = rms_norm(stream, weight, eps=EPS, backend="torch")

    def candidate(name: str, call: Callable[[], torch.Tensor], tolerance: float | None = None) -> Candidate:
        def check() -> Errors:
            return {"y": relative_error(call(), truth)}

        return Candidate(name, call, check) if tolerance is None else Candidate(name, call, check, tolerance)

    return Case(
        operator="norm",
        shape=f"{shape.name}, RMSNorm of the stream, D {shape.width}",
        load=f"{len(stream)} rows",
        work=stream_norm_work(shape.width, len(stream)),
        ours=candidate("longscan", lambda: rms_norm(stream, weight, eps=EPS, out_dtype=torch.bfloat16, backend=backend)[0], TOLERANCE),
        peers=[Peer("torch", lambda: [candidate("", lambda: F.rms_norm(stream, stream.shape[1:], weight, EPS).to(torch.bfloat16))])],
    )


def _gated(shape: Shape, rows: Rows, backend: Backend) -> Case:
    x, z, weight, groups = rows["x"], rows["z"], rows["weight"], shape.groups
    truth = gated_rms_norm(x.float(), z.float(), weight, groups=groups, eps=EPS, backend="torch")

    def candidate(name: str, call: Callable[[], torch.Tensor], tolerance: float | None = None) -> Candidate:
        def check() -> Errors:
            return {"y": relative_error(call(), truth)}

        return Candidate(name, call, check) if tolerance is None else Candidate(name, call, check, tolerance)

    def ours() -> torch.Tensor:
        return gated_rms_norm(x, z, weight, groups=groups, eps=EPS, backend=backend)

    def triton(kernel: Callable[..., torch.Tensor]) -> Candidate:
        size = shape.width // groups
        return candidate("", lambda: kernel(x, weight, None, z=z, eps=EPS, group_size=size, norm_before_gate=False))

    def plain() -> torch.Tensor:
        gated = (x.float() * F.silu(z.float())).unflatten(1, (groups, -1))
        return (F.rms_norm(gated, gated.shape[2:], eps=EPS).flatten(1) * weight).to(x.dtype)

    return Case(
        operator="norm",
        shape=f"{shape.name}, gated norm, I {shape.width}, G {groups}",
        load=f"{len(x)} rows",
        work=gated_norm_work(shape.width, len(x)),
        ours=candidate("longscan", ours, TOLERANCE),
        peers=[
            Peer("mamba_ssm Triton", lambda: [triton(mamba_ssm("layernorm_gated").rmsnorm_fn)]),
            Peer("fla-core Triton", lambda: [triton(fla("layernorm_gated").rmsnorm_fn)]),
            Peer("torch", lambda: [candidate("", plain)]),
        ],
    )

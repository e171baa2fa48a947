"""Whole networks of random weights at the shapes of real models: longscan's, the same one made of its peers' kernels, products alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from longscan.kernels.bench.peers import fla, mamba_ssm
from longscan.pipeline.model import Mamba2Geometry

Weights = Mapping[str, torch.Tensor]

GEOMETRIES = {
    "130m": Mamba2Geometry(50288, 768, 24, num_heads=24, head_dim=64, num_groups=1, state_size=128, conv_kernel=4, tied=True),
    "2.7b": Mamba2Geometry(50288, 2560, 64, num_heads=80, head_dim=64, num_groups=1, state_size=128, conv_kernel=4, tied=True),
    "7b": Mamba2Geometry(32768, 4096, 64, num_heads=128, head_dim=64, num_groups=8, state_size=128, conv_kernel=4),
}
"""mamba2-130m, mamba2-2.7b and Mamba-Codestral-7B."""


def random_weights(geometry: Mamba2Geometry, *, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights under the names that `Mamba2` takes, with time scales as Mamba-2 is initialised, and streams that stay near one."""
    g = geometry
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, spread: float = 1.0, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype).mul_(spread)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(g.num_heads, generator=generator, device=device)

    weights = {"embedding": normal(g.vocab_size, g.d_model), "final_norm": torch.ones(g.d_model, device=device)}
    weights["head"] = weights["embedding"] if g.tied else normal(g.vocab_size, g.d_model, spread=g.d_model**-0.5)
    for layer in range(g.num_layers):
        time_H = uniform(math.log(0.001), math.log(0.1)).exp()
        weights |= {
            f"layers.{layer}.{name}": tensor
            for name, tensor in {
                "norm": torch.ones(g.d_model, device=device),
                "in_proj": normal(g.projected, g.d_model, spread=g.d_model**-0.5),
                "conv_weight": normal(g.channels, g.conv_kernel, spread=g.conv_kernel**-0.5),
                "conv_bias": normal(g.channels, spread=0.1),
                "A_log": uniform(1.0, 16.0).log(),
                "dt_bias": time_H + torch.log(-torch.expm1(-time_H)),
                "D": torch.ones(g.num_heads, device=device),
                "gated_norm": torch.ones(g.inner, device=device),
                "out_proj": normal(g.d_model, g.inner, spread=(g.inner * g.num_layers) ** -0.5),
            }.items()
        }
    return weights


States = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""By layer: what the convolution and the scan take on, each with a row a document, in the peers' own forms."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a stack of peers is made of, on batches of equally long pieces of documents. A state that is None is zero."""

    convolve: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    """(x_BLC, weight_CK, bias_C, state, carried) -> silu of the convolution [B, L, C], and the state if it is `carried` on"""
    scan: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, state) -> [B, L, H, P], and the state"""
    gate: Callable[..., torch.Tensor]
    """(y, z, weight, size of a group, eps) -> norm(y silu(z)) weight"""
    add_and_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """(x, residual or None, weight, eps) -> the norm and the new residual, in fp32"""


def triton_parts(chunk: int) -> Parts:
    """mamba_ssm's scan and norms and fla-core's convolution. Raises ImportError where they are not installed."""
    scan = mamba_ssm("ssd_combined").mamba_chunk_scan_combined
    gate, norm = mamba_ssm("layernorm_gated").rmsnorm_fn, mamba_ssm("layer_norm").rms_norm_fn
    convolve = fla("causal_conv1d").causal_conv1d

    def scanned(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, bias: Any, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y, final = scan(
            x,
            dt,
            A,
            B,
            C,
            chunk_size=chunk,
            D=D,
            dt_bias=bias,
            initial_states=state,
            dt_softplus=True,
            return_final_states=True,
        )
        return y, final

    def convolved(x: Any, weight: Any, bias: Any, state: Any, carried: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, final = convolve(x, weight, bias, initial_state=state, output_final_state=carried, activation="silu")
        return y, final

    return Parts(
        convolve=convolved,
        scan=scanned,
        gate=lambda y, z, weight, size, eps: gate(y, weight, None, z=z, eps=eps, group_size=size, norm_before_gate=False),
        add_and_norm=lambda x, residual, weight, eps: norm(
            x, weight, None, residual=residual, eps=eps, prenorm=True, residual_in_fp32=True
        ),
    )


def peer_stack(geometry: Mamba2Geometry, weights: Weights, parts: Parts, ids_BL: torch.Tensor) -> torch.Tensor:
    """Hidden states [B, L, D] after the final norm, of documents that are equally long: a plain loop over the layers."""
    return _stack(geometry, weights, parts, ids_BL, None, carried=False)[0]


def carrying_stack(
    geometry: Mamba2Geometry, weights: Weights, parts: Parts, ids_BL: torch.Tensor, states: States | None
) -> tuple[torch.Tensor, States]:
    """The same of the next piece of each document: with the states behind the piece before it, and those behind this one."""
    hidden, found = _stack(geometry, weights, parts, ids_BL, states, carried=True)
    return hidden, [(conv, ssm) for conv, ssm in found if conv is not None]


def _stack(
    geometry: Mamba2Geometry, weights: Weights, parts: Parts, ids_BL: torch.Tensor, states: States | None, *, carried: bool
) -> tuple[torch.Tensor, Sequence[tuple[torch.Tensor | None, torch.Tensor]]]:
    g = geometry
    x = F.embedding(ids_BL, weights["embedding"])
    residual: torch.Tensor | None = None
    after: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    for layer in range(g.num_layers):
        conv, ssm = (None, None) if states is None else states[layer]
        w = {name: weights[f"layers.{layer}.{name}"] for name in ("norm", "in_proj", "conv_weight", "conv_bias", "A_log")}
        w |= {name: weights[f"layers.{layer}.{name}"] for name in ("dt_bias", "D", "gated_norm", "out_proj")}
        normed, residual = parts.add_and_norm(x, residual, w["norm"], g.eps)
        z, xbc, dt = (normed.to(x.dtype) @ w["in_proj"].T).split([g.inner, g.channels, g.num_heads], dim=-1)
        xbc, conv = parts.convolve(xbc, w["conv_weight"], w["conv_bias"], conv, carried)
        of_groups = g.num_groups * g.state_size
        x_, b, c = xbc.split([g.inner, of_groups, of_groups], dim=-1)
        heads = x_.unflatten(-1, (g.num_heads, g.head_dim))
        b, c = (t.unflatten(-1, (g.num_groups, g.state_size)) for t in (b, c))
        y, ssm = parts.scan(heads, dt, -w["A_log"].exp(), b, c, w["D"], w["dt_bias"], ssm)
        after.append((conv, ssm))
        x = parts.gate(y.flatten(-2), z, w["gated_norm"], g.inner // g.num_groups, g.eps) @ w["out_proj"].T
    return parts.add_and_norm(x, residual, weights["final_norm"], g.eps)[0], after


def products_alone(geometry: Mamba2Geometry, weights: Weights, rows: int) -> Callable[[], None]:
    """A call that makes the products of every layer and nothing else, results in 16 bits: what a layer adds to the stream too."""
    g = geometry
    like = weights["embedding"]
    x, y = (torch.randn(rows, width, device=like.device).to(like.dtype) for width in (g.d_model, g.inner))
    projected, mixed = x.new_empty(rows, g.projected), torch.empty_like(x)
    pairs = [(weights[f"layers.{layer}.in_proj"].T, weights[f"layers.{layer}.out_proj"].T) for layer in range(g.num_layers)]

    def call() -> None:
        for in_proj, out_proj in pairs:
            torch.mm(x, in_proj, out=projected)
            torch.mm(y, out_proj, out=mixed)

    return call

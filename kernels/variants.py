"""The shapes that kernels are compiled for ahead of time: each is a call that launches all of an operator's kernels.

The calls run on tensors of no memory (device meta), so they are of use only where launches are noted instead of made.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from longscan.kernels.pool import POOLINGS, PoolState
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.kernels.ssd.cases import MODELS, Shape

Call = Callable[[], object]
TILES = 4
WIDTHS = {"demo": 256, "mamba2-130m": 768, "mamba2-2.7b": 2560, "codestral-7b": 4096}
"""d_model of each of `MODELS`."""
VOCABULARIES = {"demo": 4096, "mamba2-130m": 50288, "mamba2-2.7b": 50288, "codestral-7b": 32768}


def calls(operator: str) -> list[tuple[str, Call]]:
    """Label and call of each shape of `operator`: those of the models, in all the forms that their kernels have."""
    return [(label, partial(call, importlib.import_module(f"longscan.kernels.{operator}.cutile"))) for label, call in _SHAPES[operator]]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _fp32(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.float32)


def _segments(span_tiles: int | None = None) -> Segments:
    entry = Entry(first_tile=0, num_tokens=TILES * TILE, lane_in=0, lane_out=0, ends=True)
    return Segments.pack([entry], TILES, "meta", span_tiles=span_tiles)


def _ssd(cutile: Any, *, shape: Shape, gate: bool = False, span_tiles: int | None = None) -> None:
    H, P, G, N = shape.H, shape.P, shape.G, shape.N
    # x, B and C come from the convolution, z and dt from the projection, which is padded.
    x_TI, B_TX, C_TX = torch.split(_empty(TILES * TILE, H * P + 2 * G * N), [H * P, G * N, G * N], dim=1)
    z_TI, _, dt_TH = torch.split(_empty(TILES * TILE, 2 * H * P + 2 * G * N + H), [H * P, H * P + 2 * G * N, H], dim=1)
    cutile.ssd(
        x_TI.view(-1, H, P),
        dt_TH,
        _fp32(H),
        B_TX.view(-1, G, N),
        C_TX.view(-1, G, N),
        D_H=_fp32(H),
        dt_bias_H=_fp32(H),
        z_THP=z_TI.view(-1, H, P) if gate else None,
        dt_limit=(0.0, math.inf),
        ssm_SHNP=_fp32(16, H, N, P),
        segments=_segments(span_tiles),
    )


def _conv1d(cutile: Any, *, shape: Shape) -> None:
    inner, channels = shape.H * shape.P, shape.H * shape.P + 2 * shape.G * shape.N
    x_TC = torch.split(_empty(TILES * TILE, inner + channels + shape.H), [inner, channels, shape.H], dim=1)[1]
    tail_SKC = _empty(16, 3, channels)
    cutile.causal_conv1d(x_TC, _empty(channels, 4), _empty(channels), tail_SKC=tail_SKC, segments=_segments(), activation="silu")


def _norm(cutile: Any, *, shape: Shape, width: int) -> None:
    T, inner = TILES * TILE, shape.H * shape.P
    cutile.rms_norm(_empty(T, width), _fp32(width), residual_TD=_fp32(T, width), eps=1e-5, out_dtype=torch.bfloat16)
    z_TI = torch.split(_empty(T, 2 * inner + 2 * shape.G * shape.N + shape.H), [inner, inner + 2 * shape.G * shape.N + shape.H], dim=1)[0]
    cutile.gated_rms_norm(_empty(T, inner), z_TI, _fp32(inner), groups=shape.G, eps=1e-5, norm_before_gate=False)


def _pool(cutile: Any, *, width: int, window_tokens: int | None) -> None:
    state = PoolState.new(16, width, POOLINGS, window_tokens, "meta")
    cutile.pool(_empty(TILES * TILE, width), state=state, poolings=POOLINGS, segments=_segments(), window_tokens=window_tokens)


def _logprob(cutile: Any, *, width: int, vocabulary: int) -> None:
    targets_T = _empty(TILES * TILE, dtype=torch.int32)
    cutile.logprob(_empty(TILES * TILE, width), _empty(vocabulary, width), targets_T)


_SHAPES: dict[str, list[tuple[str, Callable[[Any], None]]]] = {
    "ssd": [
        *((shape.name, partial(_ssd, shape=shape)) for shape in MODELS),
        ("mamba2-130m, gate", partial(_ssd, shape=MODELS[1], gate=True)),
        ("mamba2-130m, spans", partial(_ssd, shape=MODELS[1], span_tiles=2)),
    ],
    "conv1d": [(shape.name, partial(_conv1d, shape=shape)) for shape in MODELS],
    "norm": [(shape.name, partial(_norm, shape=shape, width=WIDTHS[shape.name])) for shape in MODELS],
    "pool": [
        (f"width {width}, windows {size}", partial(_pool, width=width, window_tokens=size)) for width in (768, 256) for size in (None, 512)
    ],
    "logprob": [(name, partial(_logprob, width=WIDTHS[name], vocabulary=VOCABULARIES[name])) for name in WIDTHS],
}
OPERATORS = tuple(_SHAPES)

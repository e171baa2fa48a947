"""The shapes that kernels are compiled for ahead of time: each is a call that launches all of an operator's kernels.

The calls run on tensors of no memory (device meta), so they are of use only where launches are noted instead of made.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from longscan.kernels.pool import POOLINGS, PoolState
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.kernels.ssd.cases import MODELS, Shape
from longscan.kernels.tuning import Setting, trying

Call = Callable[[], object]
TILES = 4
WIDTHS = {"demo": 256, "mamba2-130m": 768, "mamba2-2.7b": 2560, "codestral-7b": 4096}
"""d_model of each of `MODELS`."""
VOCABULARIES = {"demo": 4096, "mamba2-130m": 50288, "mamba2-2.7b": 50288, "codestral-7b": 32768}


def calls(operator: str, *, full: bool = False) -> list[tuple[str, Call]]:
    """Label and call of each shape of `operator`: those of the models, in all the forms that their kernels have.

    full: instead, every width, state size, number of taps and dtype that the kernels take.
    """
    shapes = _matrix(operator) if full else _DEFAULT[operator]
    return [(label, partial(call, importlib.import_module(f"longscan.kernels.{operator}.cutile"))) for label, call in shapes]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _fp32(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.float32)


def _segments(span_tiles: int | None = None) -> Segments:
    entry = Entry(first_tile=0, num_tokens=TILES * TILE, lane_in=0, lane_out=0, ends=True)
    return Segments.pack([entry], TILES, "meta", span_tiles=span_tiles)


def _joined_ssd(cutile: Any, *, shape: Shape) -> None:
    """With one launch before the scan, whatever the tables say."""
    with trying("ssd.prepare", Setting({}, {"JOINED": 1})):
        _ssd(cutile, shape=shape)


def _ssd(cutile: Any, *, shape: Shape, gate: bool = False, span_tiles: int | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
    H, P, G, N = shape.H, shape.P, shape.G, shape.N
    # x, B and C come from the convolution, z and dt from the projection, which is padded.
    x_TI, B_TX, C_TX = torch.split(_empty(TILES * TILE, H * P + 2 * G * N, dtype=dtype), [H * P, G * N, G * N], dim=1)
    projected = _empty(TILES * TILE, 2 * H * P + 2 * G * N + H, dtype=dtype)
    z_TI, _, dt_TH = torch.split(projected, [H * P, H * P + 2 * G * N, H], dim=1)
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


def _conv1d(cutile: Any, *, shape: Shape, taps: int = 4, dtype: torch.dtype = torch.bfloat16) -> None:
    inner, channels = shape.H * shape.P, shape.H * shape.P + 2 * shape.G * shape.N
    x_TC = torch.split(_empty(TILES * TILE, inner + channels + shape.H, dtype=dtype), [inner, channels, shape.H], dim=1)[1]
    weight_CK, bias_C, tail_SKC = (_empty(*sizes, dtype=dtype) for sizes in ((channels, taps), (channels,), (16, taps - 1, channels)))
    cutile.causal_conv1d(x_TC, weight_CK, bias_C, tail_SKC=tail_SKC, segments=_segments(), activation="silu")


def _norm(cutile: Any, *, shape: Shape, width: int, dtype: torch.dtype = torch.bfloat16) -> None:
    T, inner = TILES * TILE, shape.H * shape.P
    cutile.rms_norm(_empty(T, width, dtype=dtype), _fp32(width), residual_TD=_fp32(T, width), eps=1e-5, out_dtype=dtype)
    cutile.rms_norm(_fp32(T, width), _fp32(width), residual_TD=None, eps=1e-5, out_dtype=dtype)
    projected = _empty(T, 2 * inner + 2 * shape.G * shape.N + shape.H, dtype=dtype)
    z_TI = torch.split(projected, [inner, inner + 2 * shape.G * shape.N + shape.H], dim=1)[0]
    y_TI = _empty(T, inner, dtype=dtype)
    cutile.gated_rms_norm(y_TI, z_TI, _fp32(inner), groups=shape.G, eps=1e-5, norm_before_gate=False)


def _pool(
    cutile: Any, *, width: int, window_tokens: int | None, poolings: Sequence[str] = POOLINGS, dtype: torch.dtype = torch.bfloat16
) -> None:
    state, hidden_TD = PoolState.new(16, width, poolings, window_tokens, "meta"), _empty(TILES * TILE, width, dtype=dtype)
    cutile.pool(hidden_TD, state=state, poolings=poolings, segments=_segments(), window_tokens=window_tokens)


def _logprob(cutile: Any, *, width: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> None:
    targets_T = _empty(TILES * TILE, dtype=torch.int32)
    cutile.logprob(_empty(TILES * TILE, width, dtype=dtype), _empty(vocabulary, width, dtype=dtype), targets_T)


_DEFAULT: dict[str, list[tuple[str, Callable[[Any], None]]]] = {
    "ssd": [
        *((shape.name, partial(_ssd, shape=shape)) for shape in MODELS),
        ("mamba2-130m, gate", partial(_ssd, shape=MODELS[1], gate=True)),
        *((f"{shape.name}, spans", partial(_ssd, shape=shape, span_tiles=2)) for shape in MODELS[1:]),
        (f"{MODELS[1].name}, joined", partial(_joined_ssd, shape=MODELS[1])),
    ],
    "conv1d": [(shape.name, partial(_conv1d, shape=shape)) for shape in MODELS],
    "norm": [(shape.name, partial(_norm, shape=shape, width=WIDTHS[shape.name])) for shape in MODELS],
    "pool": [
        *((f"width {width}, windows {n}", partial(_pool, width=width, window_tokens=n)) for width in (768, 256) for n in (None, 512)),
        ("width 768, mean", partial(_pool, width=768, window_tokens=None, poolings=("mean",))),
        # With little to do in its loop, the compiler does most with it.
        *((" and ".join(chosen), partial(_pool, width=768, window_tokens=512, poolings=chosen)) for chosen in (("max",), ("mean", "max"))),
    ],
    "logprob": [(name, partial(_logprob, width=WIDTHS[name], vocabulary=VOCABULARIES[name])) for name in WIDTHS],
}
OPERATORS = tuple(_DEFAULT)

HEAD_WIDTHS = (32, 64, 128)
STATE_SIZES = (16, 64, 128, 256)
TAPS = (2, 3, 4)
DTYPES = (torch.bfloat16, torch.float16)


def _matrix(operator: str) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """One group of eight heads, and a group a head; with the gate, and with spans."""
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        if operator == "ssd":
            for P, N, G in itertools.product(HEAD_WIDTHS, STATE_SIZES, (1, 8)):
                shape = Shape("", H=8, P=P, G=G, N=N)
                for form, options in (("", {}), (", gate", {"gate": True}), (", spans", {"span_tiles": 2})):
                    yield f"P {P}, N {N}, G {G}, {name}{form}", partial(_ssd, shape=shape, dtype=dtype, **options)
        elif operator == "conv1d":
            for model, taps in itertools.product(MODELS, TAPS):
                yield f"{model.name}, K {taps}, {name}", partial(_conv1d, shape=model, taps=taps, dtype=dtype)
        elif operator == "norm":
            yield from ((f"{model.name}, {name}", partial(_norm, shape=model, width=WIDTHS[model.name], dtype=dtype)) for model in MODELS)
        elif operator == "pool":
            for width, size in itertools.product((768, 256), (None, 512)):
                yield f"width {width}, windows {size}, {name}", partial(_pool, width=width, window_tokens=size, dtype=dtype)
        else:
            for label, width in WIDTHS.items():
                yield f"{label}, {name}", partial(_logprob, width=width, vocabulary=VOCABULARIES[label], dtype=dtype)

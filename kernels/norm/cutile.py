"""The norms on CUDA Tile: one read of each row, the row's sum of squares on chip, one write. Bound by memory.

A tile's sides are powers of two and the widths are not (768, 1536, 2560), so a row is covered by parts of descending
powers of two: nothing is computed on padding, and an offset is always a whole number of its part's widths. Loads and
stores go without TMA: a block does one row's worth of work, and TMA's staging costs it the registers of four. They go
without a check of bounds as well: parts fit exactly, and a check is a branch that keeps each load waiting for the one before.
"""

from __future__ import annotations

import cuda.tile as ct
import torch
from longscan.kernels.tuning import Setting, setting, tuned

CI = ct.Constant[int]
CB = ct.Constant[bool]

ROW_ELEMENTS = 1024
"""Elements of a block where rows are short: as many rows as fit, at least one."""
NARROWEST = 16
"""The narrowest part of a row: widths are multiples of it."""


def parts(width: int) -> list[tuple[int, int]]:
    """Cover `width` by (index, part): part is a power of two, the piece begins at index * part."""
    covered, cover = 0, []
    while covered < width:
        part = 1 << (width - covered).bit_length() - 1
        cover.append((covered // part, part))
        covered += part
    return cover


@ct.kernel(occupancy=8)
def add_and_norm(x_TD, residual_TD, weight_D, y_TD, eps: float, D: CI, ROWS: CI, ADD: CB, KEEP: CB):  # type: ignore[no-untyped-def]
    """residual = x + residual (x alone without ADD), in place (nowhere without KEEP); y = residual / sqrt(mean(residual^2) + eps) * weight.

    x_TD: bf16, fp16 or fp32; y_TD: bf16 or fp16; residual_TD: fp32; weight_D: any float.
    Grid: (T / ROWS,), rows in parallel, nothing serial.
    """
    row = ct.num_blocks(0) - 1 - ct.bid(0)
    values = ()
    squares = ct.zeros((ROWS, 1), dtype=ct.float32)
    for at, width in ct.static_iter(parts(D)):
        value = ct.load(x_TD, (row, at), (ROWS, width), allow_tma=False, check_bounds=False).astype(ct.float32)
        if ADD:
            value = value + ct.load(residual_TD, (row, at), (ROWS, width), allow_tma=False, check_bounds=False)
        if KEEP:
            ct.store(residual_TD, (row, at), value, allow_tma=False, check_bounds=False)
        squares = squares + ct.sum(value * value, 1, keepdims=True)
        values += (value,)
    scale = ct.rsqrt(squares / D + eps)
    for i, at, width in ct.static_iter([(i, *part) for i, part in enumerate(parts(D))]):
        weight = ct.load(weight_D, (at,), (width,), allow_tma=False, check_bounds=False).astype(ct.float32).reshape((1, width))
        ct.store(y_TD, (row, at), (values[i] * scale * weight).astype(y_TD.dtype), allow_tma=False, check_bounds=False)


@ct.kernel(occupancy=4)
def gate_and_norm(x_TGJ, z_TGJ, weight_GJ, y_TGJ, eps: float, J: CI, ROWS: CI, NORM_FIRST: CB):  # type: ignore[no-untyped-def]
    """y = norm(x silu(z)) weight, or norm(x) weight silu(z) with NORM_FIRST; a norm over each group's J channels.

    x_TGJ, z_TGJ, y_TGJ: bf16 or fp16, G groups of J channels; weight_GJ: any float.
    Grid: (T / ROWS, G), all in parallel, nothing serial.
    """
    row = ct.num_blocks(0) - 1 - ct.bid(0)
    g = ct.bid(1)
    values = ()
    gates = ()
    squares = ct.zeros((ROWS, 1), dtype=ct.float32)
    for at, width in ct.static_iter(parts(J)):
        x = ct.load(x_TGJ, (row, g, at), (ROWS, 1, width), allow_tma=False, check_bounds=False)
        value = x.reshape((ROWS, width)).astype(ct.float32)
        z = ct.load(z_TGJ, (row, g, at), (ROWS, 1, width), allow_tma=False, check_bounds=False).reshape((ROWS, width)).astype(ct.float32)
        denominator = 1.0 + ct.exp2(z * -1.4426950408889634, flush_to_zero=True)
        gate = ct.truediv(z, denominator, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
        if not NORM_FIRST:
            value = value * gate
        squares = squares + ct.sum(value * value, 1, keepdims=True)
        values += (value,)
        gates += (gate,)
    scale = ct.rsqrt(squares / J + eps)
    for i, at, width in ct.static_iter([(i, *part) for i, part in enumerate(parts(J))]):
        weight = ct.load(weight_GJ, (g, at), (1, width), allow_tma=False, check_bounds=False).astype(ct.float32)
        value = values[i] * scale * weight
        if NORM_FIRST:
            value = value * gates[i]
        ct.store(y_TGJ, (row, g, at), value.astype(y_TGJ.dtype).reshape((ROWS, 1, width)), allow_tma=False, check_bounds=False)


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, *, residual_TD: torch.Tensor | None, eps: float, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`longscan.kernels.norm.rms_norm`; the residual handed in takes the new one."""
    T, D = x_TD.shape
    add, keep = residual_TD is not None, residual_TD is not None or x_TD.dtype != torch.float32
    if residual_TD is None:
        residual_TD = torch.empty((T, D), dtype=torch.float32, device=x_TD.device) if keep else x_TD
    y_TD = torch.empty((T, D), dtype=out_dtype, device=x_TD.device)
    rows = _rows(T, D, setting("norm.add_and_norm", D=D))
    kernel = tuned(add_and_norm, "norm.add_and_norm", D=D)
    if T:
        ct.launch(torch.cuda.current_stream(), (T // rows,), kernel, (x_TD, residual_TD, weight_D, y_TD, eps, D, rows, add, keep))
    return y_TD, residual_TD


def gated_rms_norm(
    x_TI: torch.Tensor, z_TI: torch.Tensor, weight_I: torch.Tensor, *, groups: int, eps: float, norm_before_gate: bool
) -> torch.Tensor:
    """`longscan.kernels.norm.gated_rms_norm`."""
    T, width = x_TI.shape[0], x_TI.shape[1] // groups
    y_TI = torch.empty_like(x_TI, memory_format=torch.contiguous_format)
    rows = _rows(T, width, setting("norm.gate_and_norm", J=width))
    kernel = tuned(gate_and_norm, "norm.gate_and_norm", J=width)
    x_TGJ, z_TGJ, y_TGJ = (t.unflatten(1, (groups, width)) for t in (x_TI, z_TI, y_TI))
    arguments = (x_TGJ, z_TGJ, weight_I.view(groups, width), y_TGJ, eps, width, rows, norm_before_gate)
    if T:
        ct.launch(torch.cuda.current_stream(), (T // rows, groups), kernel, arguments)
    return y_TI


def _rows(T: int, width: int, setting: Setting) -> int:
    """Rows of a block: a power of two that divides T, `setting`'s at most."""
    if width % NARROWEST:
        raise ValueError(f"width: expected a multiple of {NARROWEST} on cutile, got {width}; use the torch backend")
    most = setting.sizes.get("ROWS", ROW_ELEMENTS // width)
    rows = 1
    while 2 * rows <= most and T % (2 * rows) == 0:
        rows *= 2
    return rows

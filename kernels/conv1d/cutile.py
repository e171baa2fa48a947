"""The short causal convolution on CUDA Tile. Bound by memory: each input is read once from it, the neighbours come from L1.

A tile cannot be shifted by a row in registers, so rows are taken in phases: a block's 64 rows are 4 groups of 16, and
phase b is the tile of the rows b, 16 + b, 32 + b, 48 + b. What precedes phase b is phase b - 1, whole, already in registers.
Only phases -1, -2 and -3 are loaded anew: the last phases of the groups one earlier, or the lane's tail.
"""

from __future__ import annotations

import cuda.tile as ct
import torch
from longscan.kernels.segments import TILE, Segments

CI = ct.Constant[int]
CB = ct.Constant[bool]

PHASES = 16
GROUPS = TILE // PHASES
CHANNELS = 256
"""Channels of a block at most: 16 bytes a thread and load."""


@ct.kernel(occupancy=4)
def convolve(  # type: ignore[no-untyped-def]
    x_AUC, weight_KC, bias_C, tail_SKC, y_AUC, tile_entry, first_tile, lane_in, K: CI, BLOCK: CI, SILU: CB
):
    """y_t = act(bias + sum_k weight_k x_{t - K + 1 + k}) over one tile of 64 rows and BLOCK channels.

    x_AUC, y_AUC: [T / 16, 16, C] bf16 or fp16; weight_KC, bias_C: fp32; tail_SKC: x's dtype, read only.
    Grid: (C / BLOCK, T / 64), all in parallel; a tile reads its predecessor's last rows, or a tail, from memory.
    """
    c = ct.bid(0)
    tile = ct.bid(1)
    entry = ct.load(tile_entry, (tile,), (1,)).item()
    if entry < 0:
        for b in ct.static_iter(range(PHASES)):
            ct.store(y_AUC, (tile, b, c), ct.zeros((GROUPS, 1, BLOCK), dtype=y_AUC.dtype), allow_tma=False)
    else:
        history = ()
        if ct.load(first_tile, (entry,), (1,)).item() == tile:
            lane = ct.load(lane_in, (entry,), (1,)).item()
            for k in ct.static_iter(range(K - 1)):
                b = ct.static_eval(PHASES - K + 1 + k)
                x = ct.load(x_AUC, (tile, b, c), (GROUPS, 1, BLOCK), allow_tma=False).reshape((GROUPS, BLOCK)).astype(ct.float32)
                before = ct.zeros((1, BLOCK), dtype=ct.float32)
                if lane >= 0:
                    before = ct.load(tail_SKC, (lane, k, c), (1, 1, BLOCK), allow_tma=False).reshape((1, BLOCK)).astype(ct.float32)
                early = ct.cat((before, ct.extract(x, (0, 0), (1, BLOCK))), 0)
                late = ct.cat((ct.extract(x, (1, 0), (1, BLOCK)), ct.extract(x, (2, 0), (1, BLOCK))), 0)
                history += (ct.cat((early, late), 0),)
        else:
            shifted = x_AUC.tiled_view((GROUPS, 1, BLOCK), traversal_steps=(1, 1, BLOCK))
            for k in ct.static_iter(range(K - 1)):
                b = ct.static_eval(PHASES - K + 1 + k)
                x = shifted.load((tile * GROUPS - 1, b, c), allow_tma=False)
                history += (x.reshape((GROUPS, BLOCK)).astype(ct.float32),)
        taps = ()
        for k in ct.static_iter(range(K)):
            taps += (ct.load(weight_KC, (k, c), (1, BLOCK), allow_tma=False),)
        bias = ct.load(bias_C, (c,), (BLOCK,), allow_tma=False).reshape((1, BLOCK))
        for b in ct.static_iter(range(PHASES)):
            x = ct.load(x_AUC, (tile, b, c), (GROUPS, 1, BLOCK), allow_tma=False).reshape((GROUPS, BLOCK)).astype(ct.float32)
            history += (x,)
            y = bias + taps[0] * history[b]
            for k in ct.static_iter(range(1, K)):
                y = y + taps[k] * history[b + k]
            if SILU:
                # Faithful to fp32's last bits but one, at a quarter of the instructions of the correctly rounded division.
                denominator = 1.0 + ct.exp2(y * -1.4426950408889634, flush_to_zero=True)
                y = ct.truediv(y, denominator, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
            ct.store(y_AUC, (tile, b, c), y.astype(y_AUC.dtype).reshape((GROUPS, 1, BLOCK)), allow_tma=False)


@ct.kernel(occupancy=8)
def keep_tails(  # type: ignore[no-untyped-def]
    x_TC, tail_SKC, first_tile, num_tokens, lane_in, lane_out, K: CI, BLOCK: CI
):
    """Leave each entry's last K - 1 inputs in its lane; an entry shorter than that keeps the end of the tail it found.

    x_TC: bf16 or fp16; tail_SKC: x's dtype, in place.
    Grid: (C / BLOCK, E), all in parallel.
    """
    c = ct.bid(0)
    entry = ct.bid(1)
    lane = ct.load(lane_out, (entry,), (1,)).item()
    if lane >= 0:
        count = ct.load(num_tokens, (entry,), (1,)).item()
        start = ct.load(first_tile, (entry,), (1,)).item() * TILE
        source = ct.load(lane_in, (entry,), (1,)).item()
        kept = ()
        for k in ct.static_iter(range(K - 1)):
            at = count - (K - 1) + k
            row = ct.zeros((1, 1, BLOCK), dtype=tail_SKC.dtype)
            if at >= 0:
                row = ct.load(x_TC, (start + at, c), (1, BLOCK), allow_tma=False).reshape((1, 1, BLOCK))
            else:
                if source >= 0:
                    row = ct.load(tail_SKC, (source, at + (K - 1), c), (1, 1, BLOCK), allow_tma=False)
            kept += (row,)
        for k in ct.static_iter(range(K - 1)):
            ct.store(tail_SKC, (lane, k, c), kept[k], allow_tma=False)


def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    *,
    tail_SKC: torch.Tensor,
    segments: Segments,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`longscan.kernels.conv1d.causal_conv1d`: the convolution, then the tails, which the first launch still reads."""
    T, C = x_TC.shape
    K = weight_CK.shape[1]
    block = _block(C, K)
    weight_KC = weight_CK.float().t().contiguous()
    bias_C = torch.zeros(C, device=x_TC.device) if bias_C is None else bias_C.float()
    y_TC = torch.empty((T, C), dtype=x_TC.dtype, device=x_TC.device)
    x_AUC, y_AUC = x_TC.unflatten(0, (-1, PHASES)), y_TC.unflatten(0, (-1, PHASES))
    s = segments
    stream = torch.cuda.current_stream()
    arguments = (x_AUC, weight_KC, bias_C, tail_SKC, y_AUC, s.tile_entry, s.first_tile, s.lane_in, K, block, activation == "silu")
    ct.launch(stream, (C // block, s.num_tiles), convolve, arguments)
    if s.num_tokens.numel():
        arguments = (x_TC, tail_SKC, s.first_tile, s.num_tokens, s.lane_in, s.lane_out, K, block)
        ct.launch(stream, (C // block, s.num_tokens.numel()), keep_tails, arguments)
    return y_TC, tail_SKC


def _block(C: int, K: int) -> int:
    """Channels of a block: a power of two that divides C."""
    if not 2 <= K <= 4:
        raise ValueError(f"weight_CK: expected 2 to 4 taps on cutile, got {K}; use the torch backend")
    block = min(CHANNELS, C & -C)
    if block < 16:
        raise ValueError(f"x_TC: expected channels that are a multiple of 16 on cutile, got {C}; use the torch backend")
    return block

"""The short causal convolution on CUDA Tile. Bound by memory: each input is read once from it, the neighbours come from L1.

A tile cannot be shifted by a row in registers, so rows are taken in phases: a block's 32 rows are 4 groups of 8, and
phase b is the tile of the rows b, 8 + b, 16 + b, 24 + b. What precedes phase b is phase b - 1, whole, already in registers.
Only what precedes phase 0 is gathered anew. All phases are loaded before the first is worked on, and without a check of bounds,
which blocks fit exactly: a check is a branch, and keeps each load waiting for the one before it.

The first rows of an entry, which follow a tail and not the rows above them, are done over by the launch that keeps the tails:
a branch for them in the first one costs every block a change of layout.
"""

from __future__ import annotations

import cuda.tile as ct
import torch
from longscan.kernels.segments import MOST_ROWS, TILE, Segments
from longscan.kernels.tuning import setting, tuned

CI = ct.Constant[int]
CB = ct.Constant[bool]

PHASES = 8
GROUPS = 4
ROWS = GROUPS * PHASES
"""Rows of a block, a divisor of a tile's."""
CHANNELS = 256
"""Channels of a block at most: 16 bytes a thread and load."""


@ct.function
def activate(y, silu: CB):  # type: ignore[no-untyped-def]
    """silu(y) = y / (1 + exp(-y)), with a division good to the last bit but one."""
    if silu:
        denominator = 1.0 + ct.exp2(y * -1.4426950408889634, flush_to_zero=True)
        return ct.truediv(y, denominator, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    return y


def _outputs(x_TC, x_AUC, weight_KC, bias_C, dtype, block, c, K, BLOCK, SILU):  # type: ignore[no-untyped-def]
    """The outputs of a block, by phases."""
    inputs = ()
    channel = (c * BLOCK + ct.arange(BLOCK, dtype=ct.int32)).reshape((1, BLOCK))
    for k in ct.static_iter(range(K - 1)):
        row = block * ROWS + (ct.arange(GROUPS, dtype=ct.int32) - 1) * PHASES + (PHASES - K + 1 + k)
        above = ct.gather(x_TC, (ct.maximum(row, 0).reshape((GROUPS, 1)), channel), check_bounds=False)
        inputs += (above.astype(ct.float32),)
    taps = ()
    for k in ct.static_iter(range(K)):
        taps += (ct.load(weight_KC, (k, c), (1, BLOCK), allow_tma=False, check_bounds=False),)
    bias = ct.load(bias_C, (c,), (BLOCK,), allow_tma=False, check_bounds=False).reshape((1, BLOCK))
    phases = ()
    for b in ct.static_iter(range(PHASES)):
        phases += (ct.load(x_AUC, (block, b, c), (GROUPS, 1, BLOCK), allow_tma=False, check_bounds=False),)
    outputs = ()
    for b in ct.static_iter(range(PHASES)):
        inputs += (phases[b].reshape((GROUPS, BLOCK)).astype(ct.float32),)
        y = bias + taps[0] * inputs[b]
        for k in ct.static_iter(range(1, K)):
            y = y + taps[k] * inputs[b + k]
        outputs += (activate(y, SILU).astype(dtype).reshape((GROUPS, 1, BLOCK)),)
    return outputs


@ct.kernel(occupancy=4)
def convolve(x_TC, x_AUC, weight_KC, bias_C, y_AUC, tile_entry, K: CI, BLOCK: CI, SILU: CB, SELECT: CB):  # type: ignore[no-untyped-def]
    """y_t = act(bias + sum_k weight_k x_{t - K + 1 + k}) over 32 rows and BLOCK channels, as if the rows above an entry were its own.

    x_TC, and the same as x_AUC [T / 8, 8, C], y_AUC: bf16 or fp16; weight_KC, bias_C: fp32. Zero in tiles of no entry.
    SELECT: those are computed as well, and zero is chosen at the end: so no load waits to know whose the tile is.
    Grid: (C / BLOCK, T / 32), all in parallel.
    """
    c = ct.bid(0)
    block = ct.num_blocks(1) - 1 - ct.bid(1)  # from the last rows to the first: L2 holds what the product before has written last
    if SELECT:
        owned = ct.load(tile_entry, (block // (TILE // ROWS),), (1,), check_bounds=False).item() >= 0
        outputs = _outputs(x_TC, x_AUC, weight_KC, bias_C, y_AUC.dtype, block, c, K, BLOCK, SILU)
        for b in ct.static_iter(range(PHASES)):
            ct.store(y_AUC, (block, b, c), ct.where(owned, outputs[b], 0.0), allow_tma=False, check_bounds=False)
    elif ct.load(tile_entry, (block // (TILE // ROWS),), (1,)).item() < 0:
        for b in ct.static_iter(range(PHASES)):
            ct.store(y_AUC, (block, b, c), ct.zeros((GROUPS, 1, BLOCK), dtype=y_AUC.dtype), allow_tma=False, check_bounds=False)
    else:
        outputs = _outputs(x_TC, x_AUC, weight_KC, bias_C, y_AUC.dtype, block, c, K, BLOCK, SILU)
        for b in ct.static_iter(range(PHASES)):
            ct.store(y_AUC, (block, b, c), outputs[b], allow_tma=False, check_bounds=False)


@ct.kernel(occupancy=8)
def join_tails(  # type: ignore[no-untyped-def]
    x_TC, weight_KC, bias_C, tail_SKC, y_TC, first_tile, num_tokens, lane_in, lane_out, K: CI, BLOCK: CI, SILU: CB
):
    """An entry's first K - 1 outputs, which see the tail of its lane; then its last K - 1 inputs are the lane's new tail.

    An entry shorter than that keeps the end of the tail it found. x_TC, y_TC: bf16 or fp16; tail_SKC: x's dtype, in place.
    Grid: (C / BLOCK, E), all in parallel.
    """
    c = ct.bid(0)
    entry = ct.bid(1)
    # All loads come first and without a check of bounds, which is a branch: so the lanes are waited for once, and what they lead to once.
    count = ct.load(num_tokens, (entry,), (1,), check_bounds=False).item()
    start = ct.load(first_tile, (entry,), (1,), check_bounds=False).item() * TILE
    source = ct.load(lane_in, (entry,), (1,), check_bounds=False).item()
    lane = ct.load(lane_out, (entry,), (1,), check_bounds=False).item()
    if count > 0:
        inputs = ()
        for k in ct.static_iter(range(K - 1)):
            before = ct.zeros((1, 1, BLOCK), dtype=tail_SKC.dtype)
            if source >= 0:
                before = ct.load(tail_SKC, (source, k, c), (1, 1, BLOCK), allow_tma=False, check_bounds=False)
            inputs += (before.reshape((1, BLOCK)),)
        for k in ct.static_iter(range(K - 1)):
            inputs += (ct.load(x_TC, (start + k, c), (1, BLOCK), allow_tma=False, check_bounds=False),)
        # The last K - 1 inputs, or the first where the entry is shorter, and they are not used.
        last = start + ct.maximum(count - (K - 1), 0)
        ends = ()
        for k in ct.static_iter(range(K - 1)):
            ends += (ct.load(x_TC, (last + k, c), (1, BLOCK), allow_tma=False, check_bounds=False),)
        taps = ()
        for k in ct.static_iter(range(K)):
            taps += (ct.load(weight_KC, (k, c), (1, BLOCK), allow_tma=False, check_bounds=False),)
        bias = ct.load(bias_C, (c,), (BLOCK,), allow_tma=False, check_bounds=False).reshape((1, BLOCK))
        for t in ct.static_iter(range(K - 1)):
            y = bias
            for k in ct.static_iter(range(K)):
                y = y + taps[k] * inputs[t + k].astype(ct.float32)
            ct.store(y_TC, (start + t, c), activate(y, SILU).astype(y_TC.dtype), allow_tma=False, check_bounds=False)
        if lane >= 0:
            for k in ct.static_iter(range(K - 1)):
                # The k-th of the last K - 1 inputs: token count - (K - 1) + k, or what the tail holds where there is none.
                kept = ct.where(count >= K - 1, ends[k], inputs[k])
                for shorter in ct.static_iter(range(1, K - 1)):
                    kept = ct.where(count == shorter, inputs[k + shorter], kept)
                ct.store(tail_SKC, (lane, k, c), kept.reshape((1, 1, BLOCK)), allow_tma=False, check_bounds=False)


def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    *,
    tail_SKC: torch.Tensor,
    segments: Segments,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`longscan.kernels.conv1d.causal_conv1d`: the convolution, then what joins an entry to its lane's tail."""
    T, C = x_TC.shape
    if T > MOST_ROWS:
        raise ValueError(f"x_TC: expected at most {MOST_ROWS} rows on cutile, got {T}; use smaller steps")
    K = weight_CK.shape[1]
    block = _block(C, K)
    weight_KC = weight_CK.float().t().contiguous()
    bias_C = torch.zeros(C, device=x_TC.device) if bias_C is None else bias_C.float()
    y_TC = torch.empty((T, C), dtype=x_TC.dtype, device=x_TC.device)
    x_AUC, y_AUC = x_TC.unflatten(0, (-1, PHASES)), y_TC.unflatten(0, (-1, PHASES))
    s, silu = segments, activation == "silu"
    stream = torch.cuda.current_stream()
    select = setting("conv1d.convolve", C=C, K=K).sizes.get("SELECT", 0) == 1
    arguments = (x_TC, x_AUC, weight_KC, bias_C, y_AUC, s.tile_entry, K, block, silu, select)
    kernel = tuned(convolve, "conv1d.convolve", C=C, K=K)
    if T:
        ct.launch(stream, (C // block, T // ROWS), kernel, arguments)
    if s.chains:
        lanes = (s.first_tile, s.num_tokens, s.lane_in, s.lane_out)
        ct.launch(stream, (C // block, s.chains), join_tails, (x_TC, weight_KC, bias_C, tail_SKC, y_TC, *lanes, K, block, silu))
    return y_TC, tail_SKC


def _block(C: int, K: int) -> int:
    """Channels of a block: a power of two that divides C."""
    if not 2 <= K <= 4:
        raise ValueError(f"weight_CK: expected 2 to 4 taps on cutile, got {K}; use the torch backend")
    block = min(CHANNELS, C & -C)
    if block < 16:
        raise ValueError(f"x_TC: expected channels that are a multiple of 16 on cutile, got {C}; use the torch backend")
    return block

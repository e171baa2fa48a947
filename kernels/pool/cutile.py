"""pool on CUDA Tile: one read of the hidden states gives each tile's totals; a second, small launch adds them up in order.

A document's tiles are added one by one, as in the reference, so that the bits depend on positions alone. The tiles' totals are
a fortieth of the hidden states, so this second launch is cheap even where one document fills the step and it runs on few blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cuda.tile as ct
import numpy as np
import numpy.typing as npt
import torch
from longscan.kernels.pool import PoolOutput, PoolState, closed_windows
from longscan.kernels.segments import TILE, Segments, to_device

CI = ct.Constant[int]
CB = ct.Constant[bool]

COLUMNS = 128
"""Columns of a block at most."""
AHEAD = 8
"""Tiles whose totals a block loads at once, before it adds them one after the other."""
LATENCY = 8
"""Hint of these loads: without one the compiler keeps up to seven groups under way, until registers spill."""
ROWS_AT_ONCE = 16
"""Vectors are written into arrays of a multiple of so many rows, one at least: kernels are compiled anew for arrays of other lengths."""
ENDLESS = 1 << 30
"""Tiles of a window that no document fills."""


@ct.kernel(occupancy=4)
def fold_tiles(  # type: ignore[no-untyped-def]
    hidden_TD, sum_AD, weighted_AD, max_AD, tile_entry, first_tile, num_tokens, BLOCK: CI, SUM: CB, WEIGHTED: CB, MAX: CB
):
    """Totals of each tile's real rows: their sum and their sum weighed 1 .. 64 in float64, their maximum in fp32.

    hidden_TD: bf16, fp16 or fp32; sum_AD, weighted_AD: [T / 64, D] fp64; max_AD: [T / 64, D] fp32.
    Grid: (D / BLOCK, T / 64), all in parallel.
    """
    c = ct.bid(0)
    tile = ct.bid(1)
    # No load checks bounds, which is a branch: blocks cover tiles and columns exactly, and a tile's entry is one of those there are.
    entry = ct.load(tile_entry, (tile,), (1,), check_bounds=False).item()
    if entry >= 0:
        first = ct.load(first_tile, (entry,), (1,), check_bounds=False).item()
        count = ct.load(num_tokens, (entry,), (1,), check_bounds=False).item() - (tile - first) * TILE
        row = ct.arange(TILE, dtype=ct.int32).reshape((TILE, 1))
        hidden = ct.load(hidden_TD, (tile, c), (TILE, BLOCK), allow_tma=False, check_bounds=False).astype(ct.float32)
        if MAX:
            largest = ct.max(ct.where(row < count, hidden, -float("inf")), 0, propagate_nan=True)
            ct.store(max_AD, (tile, c), largest.reshape((1, BLOCK)), allow_tma=False, check_bounds=False)
        if SUM:
            wide = ct.where(row < count, hidden, 0.0).astype(ct.float64)
            ct.store(sum_AD, (tile, c), ct.sum(wide, 0).reshape((1, BLOCK)), allow_tma=False, check_bounds=False)
            if WEIGHTED:
                weighted = ct.sum(wide * (row + 1).astype(ct.float64), 0)
                ct.store(weighted_AD, (tile, c), weighted.reshape((1, BLOCK)), allow_tma=False, check_bounds=False)


def _load_totals(  # type: ignore[no-untyped-def]
    sum_AD, weighted_AD, max_AD, tile, stop, c, BLOCK, AHEAD, SUM, WEIGHTED, MAX
):
    """Totals of AHEAD tiles from `tile` on: past the last before `stop` the last is loaded again, so that no load is behind a branch."""
    sums = ()
    weights = ()
    maxima = ()
    for i in ct.static_iter(range(AHEAD)):
        at = ct.minimum(tile + i, stop - 1)
        if SUM:
            sums += (ct.load(sum_AD, (at, c), (1, BLOCK), latency=LATENCY, allow_tma=False, check_bounds=False),)
        if WEIGHTED:
            weights += (ct.load(weighted_AD, (at, c), (1, BLOCK), latency=LATENCY, allow_tma=False, check_bounds=False),)
        if MAX:
            maxima += (ct.load(max_AD, (at, c), (1, BLOCK), latency=LATENCY, allow_tma=False, check_bounds=False),)
    return sums, weights, maxima


@ct.kernel(occupancy=4)
def add_tiles(  # type: ignore[no-untyped-def]
    sum_AD,
    weighted_AD,
    max_AD,
    hidden_TD,
    mean_SD,
    weighted_mean_SD,
    max_SD,
    mean_WD,
    weighted_mean_WD,
    max_WD,
    last_WD,
    first_tile,
    num_tokens,
    position_tile,
    lane_in,
    lane_out,
    first_window,
    ends,
    BLOCK: CI,
    WINDOW: CI,
    AHEAD: CI,
    MEAN: CB,
    WEIGHTED: CB,
    MAX: CB,
    LAST: CB,
):
    """Carry the windows of WINDOW tiles along one entry: read its lane, add its tiles in order, leave the open window in its lane.

    sum_AD, weighted_AD, max_AD: totals of tiles; mean_SD, weighted_mean_SD (fp64), max_SD (fp32): tables by lane, in place.
    mean_WD .. last_WD: fp32 vectors of the windows that close, those of an entry from row first_window on, in order.
    Grid: (D / BLOCK, E), in parallel; an entry's tiles are serial, the loads of AHEAD of them are made at once.
    """
    c = ct.bid(0)
    entry = ct.bid(1)
    # Every entry has a number in each of these arrays, so none needs a check of bounds, which is a branch: all are read at once.
    begin = ct.load(first_tile, (entry,), (1,), check_bounds=False).item()
    tokens = ct.load(num_tokens, (entry,), (1,), check_bounds=False).item()
    position = ct.load(position_tile, (entry,), (1,), check_bounds=False).item()
    source = ct.load(lane_in, (entry,), (1,), check_bounds=False).item()
    kept = ct.load(lane_out, (entry,), (1,), check_bounds=False).item()
    window = ct.load(first_window, (entry,), (1,), check_bounds=False).item()
    ended = ct.load(ends, (entry,), (1,), check_bounds=False).item()
    mean = ct.zeros((1, BLOCK), dtype=ct.float64)
    weighted = ct.zeros((1, BLOCK), dtype=ct.float64)
    largest = ct.full((1, BLOCK), -float("inf"), dtype=ct.float32)
    begun = position % WINDOW
    if begun > 0 and source >= 0:
        if MEAN:
            mean = ct.load(mean_SD, (source, c), (1, BLOCK), allow_tma=False, check_bounds=False)
        if WEIGHTED:
            weighted = ct.load(weighted_mean_SD, (source, c), (1, BLOCK), allow_tma=False, check_bounds=False)
        if MAX:
            largest = ct.load(max_SD, (source, c), (1, BLOCK), allow_tma=False, check_bounds=False)
    end = begin + (tokens + (TILE - 1)) // TILE
    for run in range((begun + (end - begin) + (WINDOW - 1)) // WINDOW):
        # The entry's part of one window, which begins on tile `start`, or would. Nothing is stored before its tiles are added.
        start = begin - begun + run * WINDOW
        stop = ct.minimum(start + WINDOW, end)
        for tile in range(ct.maximum(start, begin), stop, AHEAD):
            sums, weights, maxima = _load_totals(sum_AD, weighted_AD, max_AD, tile, stop, c, BLOCK, AHEAD, MEAN or WEIGHTED, WEIGHTED, MAX)
            for i in ct.static_iter(range(AHEAD)):
                # Chosen, not branched to: what is used behind a branch alone, the compiler would load there.
                real = tile + i < stop
                if MEAN:
                    mean = ct.where(real, mean + sums[i], mean)
                if WEIGHTED:
                    more = weights[i] + sums[i] * ct.astype((tile + i - start) * TILE, ct.float64)
                    weighted = ct.where(real, weighted + more, weighted)
                if MAX:
                    # The last tile once more, where there is none: that changes no maximum.
                    largest = ct.maximum(largest, maxima[i], propagate_nan=True)
        rows = ct.minimum(tokens - (stop - 1 - begin) * TILE, TILE)
        full = stop - start == WINDOW and rows == TILE
        if full or (ended > 0 and stop == end):
            count = ct.astype((stop - 1 - start) * TILE + rows, ct.float64)
            if MEAN:
                ct.store(mean_WD, (window + run, c), (mean / count).astype(ct.float32), allow_tma=False, check_bounds=False)
            if WEIGHTED:
                vector = weighted / (count * (count + 1.0) / 2.0)
                ct.store(weighted_mean_WD, (window + run, c), vector.astype(ct.float32), allow_tma=False, check_bounds=False)
            if MAX:
                ct.store(max_WD, (window + run, c), largest, allow_tma=False, check_bounds=False)
            if LAST:
                newest = ct.load(hidden_TD, ((stop - 1) * TILE + rows - 1, c), (1, BLOCK), allow_tma=False, check_bounds=False)
                ct.store(last_WD, (window + run, c), newest.astype(ct.float32), allow_tma=False, check_bounds=False)
        if full:
            mean = ct.zeros((1, BLOCK), dtype=ct.float64)
            weighted = ct.zeros((1, BLOCK), dtype=ct.float64)
            largest = ct.full((1, BLOCK), -float("inf"), dtype=ct.float32)
    if kept >= 0:
        if MEAN:
            ct.store(mean_SD, (kept, c), mean, allow_tma=False, check_bounds=False)
        if WEIGHTED:
            ct.store(weighted_mean_SD, (kept, c), weighted, allow_tma=False, check_bounds=False)
        if MAX:
            ct.store(max_SD, (kept, c), largest, allow_tma=False, check_bounds=False)


def pool(
    hidden_TD: torch.Tensor, *, state: PoolState, poolings: Sequence[str], segments: Segments, window_tokens: int | None
) -> tuple[PoolOutput, PoolState]:
    """`longscan.kernels.pool.pool`: tiles once, then documents and, where asked for, windows over the tiles' totals."""
    D = hidden_TD.shape[1]
    block = min(COLUMNS, D & -D)
    summed, weighted, largest = _fold(hidden_TD, poolings, segments, block)
    ends = np.array([entry.ends for entry in segments.entries], dtype=np.int32)
    first = np.cumsum(ends) - ends
    num_ended = int(ends.sum())
    totals = (summed, weighted, largest, hidden_TD)
    documents = _add(totals, state, "", poolings, segments, ENDLESS, first, ends, num_ended, block)
    if window_tokens is None:
        return PoolOutput(documents, {}), state
    closed = np.zeros(len(segments.entries) + 1, dtype=np.int32)
    for run in closed_windows(segments, window_tokens):
        closed[run.entry + 1] += 1
    first = np.cumsum(closed)
    windows = _add(totals, state, "window_", poolings, segments, window_tokens // TILE, first[:-1], ends, int(first[-1]), block)
    return PoolOutput(documents, windows), state


def _fold(
    hidden_TD: torch.Tensor, poolings: Sequence[str], segments: Segments, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    D, A = hidden_TD.shape[1], segments.num_tiles
    weigh, maximum = "weighted_mean" in poolings, "max" in poolings
    add = weigh or "mean" in poolings
    shapes = ((add, torch.float64), (weigh, torch.float64), (maximum, torch.float32))
    totals = [torch.empty((A if used else 1, D), dtype=dtype, device=hidden_TD.device) for used, dtype in shapes]
    arguments = (hidden_TD, *totals, segments.tile_entry, segments.first_tile, segments.num_tokens, block, add, weigh, maximum)
    if (add or maximum) and segments.entries:
        ct.launch(torch.cuda.current_stream(), (D // block, A), fold_tiles, arguments)
    return totals[0], totals[1], totals[2]


def _add(
    totals: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    state: PoolState,
    prefix: str,
    poolings: Sequence[str],
    segments: Segments,
    window: int,
    first: npt.NDArray[Any],
    ends: npt.NDArray[Any],
    num_closed: int,
    block: int,
) -> dict[str, torch.Tensor]:
    """Vectors of the windows (of the documents, where a window is endless) that close in the step."""
    hidden_TD = totals[3]
    device, D, s = hidden_TD.device, hidden_TD.shape[1], segments
    unused = {"mean": totals[0], "weighted_mean": totals[1], "max": totals[2]}
    tables = [state.tables.get(prefix + pooling, torch.empty_like(unused[pooling][:1])) for pooling in unused]
    names = ("mean", "weighted_mean", "max", "last")
    room = (num_closed // ROWS_AT_ONCE + 1) * ROWS_AT_ONCE
    written = [torch.empty((room if name in poolings else ROWS_AT_ONCE, D), device=device) for name in names]
    slots = s.num_tokens.numel()
    on_host = np.zeros((2, -(-max(slots, 1) // 4) * 4), dtype=np.int32)
    on_host[0, : len(first)] = first
    on_host[1, : len(ends)] = ends
    by_entry = to_device(on_host, device)
    if s.entries:
        lanes = (s.first_tile, s.num_tokens, s.position_tile, s.lane_in, s.lane_out, by_entry[0], by_entry[1])
        flags = tuple(name in poolings for name in names)
        arguments = (*totals, *tables, *written, *lanes, block, window, AHEAD, *flags)
        ct.launch(torch.cuda.current_stream(), (D // block, len(s.entries)), add_tiles, arguments)
    return {name: vectors[:num_closed] for name, vectors in zip(names, written, strict=True) if name in poolings}

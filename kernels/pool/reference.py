"""pool in plain PyTorch, on any device: totals of tiles first, then tile after tile along each document and each window.

Both steps add in an order that is fixed by the position in the document: a tile's rows by halving (r and r + 32, then r
and r + 16, ...), its tiles one by one. Nothing is left to a library's choice of reduction, which may depend on the shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from longscan.kernels.pool import PoolOutput, PoolState, Run, empty_table, window_runs
from longscan.kernels.segments import NO_LANE, TILE, Segments

BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
"""Bound on the float64 copy of a block of tiles; on a CPU it stays in the cache."""

ENDLESS = 1 << 62
"""A document is a window that no document fills."""

Totals = dict[str, torch.Tensor]
"""Of tiles, each [tiles, D]: `sum` of rows, `weighted` sum of rows times 1 .. 64, `max`; those that the poolings need."""


def pool(
    hidden_TD: torch.Tensor, *, state: PoolState, poolings: Sequence[str], segments: Segments, window_tokens: int | None
) -> tuple[PoolOutput, PoolState]:
    """See `longscan.kernels.pool.pool`."""
    tiles = _tile_totals(hidden_TD, segments, poolings)
    tables = {pooling: state.tables[pooling] for pooling in poolings if pooling != "last"}
    documents = _pool_windows(hidden_TD, tiles, tables, poolings, segments, ENDLESS)
    if window_tokens is None:
        return PoolOutput(documents, {}), state
    tables = {pooling: state.tables[f"window_{pooling}"] for pooling in tables}
    return PoolOutput(documents, _pool_windows(hidden_TD, tiles, tables, poolings, segments, window_tokens)), state


def _tile_totals(hidden_TD: torch.Tensor, segments: Segments, poolings: Sequence[str]) -> Totals:
    """Totals of the step's tiles, up to the last entry's end; a tile's rows of padding take no part."""
    used = max((entry.first_tile + entry.num_tiles for entry in segments.entries), default=0)
    hidden_xQD = hidden_TD[: used * TILE].unflatten(0, (used, TILE))
    totals = _totals(hidden_xQD, poolings)
    cut = [(entry.first_tile + entry.num_tiles - 1, entry.num_tokens % TILE) for entry in segments.entries if entry.num_tokens % TILE]
    if cut:
        tile, num_rows = torch.tensor(cut, device=hidden_TD.device).unbind(1)
        padding = torch.arange(TILE, device=hidden_TD.device) >= num_rows[:, None]
        for name, total in _totals(hidden_xQD[tile], poolings, padding[:, :, None]).items():
            totals[name][tile] = total
    return totals


def _totals(hidden_xQD: torch.Tensor, poolings: Sequence[str], padding: torch.Tensor | None = None) -> Totals:
    def masked(value: float) -> torch.Tensor:
        return hidden_xQD if padding is None else hidden_xQD.masked_fill(padding, value)

    totals: Totals = {}
    if "mean" in poolings or "weighted_mean" in poolings:
        totals |= _fold(masked(0.0), "weighted_mean" in poolings)
    if "max" in poolings:
        totals["max"] = masked(-torch.inf).amax(1).float()
    return totals


def _fold(hidden_xQD: torch.Tensor, weighted: bool) -> Totals:
    """Add up each tile's rows in float64, a block of tiles at a time."""
    count, _, width = hidden_xQD.shape
    device = hidden_xQD.device
    block = max(1, BLOCK_BYTES.get(device.type, BLOCK_BYTES["cpu"]) // (8 * TILE * width))
    totals = {name: torch.empty((count, width), dtype=torch.float64, device=device) for name in ("sum", "weighted")[: 1 + weighted]}
    for start in range(0, count, block):
        rows = hidden_xQD[start : start + block].double()
        extra = torch.zeros((), dtype=torch.float64, device=device).expand(rows.shape)
        half = TILE // 2
        while half:
            low, high = rows[:, :half], rows[:, half : 2 * half]
            if weighted:
                # Row r takes in row r + half, which weighs `half` more: the weights 0 .. 63 bit by bit, each product exact.
                extra = extra[:, :half] + extra[:, half : 2 * half] + half * high
            rows = low + high
            half //= 2
        totals["sum"][start : start + block] = rows[:, 0]
        if weighted:
            totals["weighted"][start : start + block] = extra[:, 0] + rows[:, 0]
    return totals


def _pool_windows(
    hidden_TD: torch.Tensor, tiles: Totals, tables: Totals, poolings: Sequence[str], segments: Segments, window_tokens: int
) -> dict[str, torch.Tensor]:
    """Carry the windows of one size through the step: read `tables`, add tiles, write `tables`; vectors of those that close."""
    device = hidden_TD.device
    runs = list(window_runs(segments, window_tokens))
    running = {pooling: _begin(pooling, table, runs, segments) for pooling, table in tables.items()}
    if runs and running:
        _add_tiles(running, tiles, runs)
    for pooling, table in tables.items():
        _leave(pooling, table, running[pooling], runs, segments, window_tokens)

    closed = [(r, run.offset + run.num_tokens, run.first_tile * TILE + run.num_tokens - 1) for r, run in enumerate(runs) if run.closes]
    row, count, last = torch.tensor(closed, dtype=torch.int64, device=device).view(-1, 3).unbind(1)
    n = count.double()[:, None]
    divisors = {"mean": n, "weighted_mean": n * (n + 1) / 2}
    vectors: dict[str, torch.Tensor] = {}
    for pooling in poolings:
        total = hidden_TD[last] if pooling == "last" else running[pooling][row]
        vectors[pooling] = (total / divisors[pooling] if pooling in divisors else total).float()
    return vectors


def _begin(pooling: str, table_SD: torch.Tensor, runs: Sequence[Run], segments: Segments) -> torch.Tensor:
    """[runs, D]: what each run's window holds before it: its lane's row, or nothing yet where the window starts."""
    running = empty_table(pooling, len(runs), table_SD.shape[1], table_SD.device)
    lanes = [segments.entries[run.entry].lane_in if run.offset else NO_LANE for run in runs]
    begun = [(r, lane) for r, lane in enumerate(lanes) if lane != NO_LANE]
    if begun:
        row, slot = torch.tensor(begun, device=table_SD.device).unbind(1)
        running[row] = table_SD[slot]
    return running


def _add_tiles(running: Totals, tiles: Totals, runs: Sequence[Run]) -> None:
    """Add to each run its tiles in order: the k-th tile of every run that has one, for k = 0, 1, ..."""
    device = next(iter(tiles.values())).device
    order = sorted(range(len(runs)), key=lambda r: -runs[r].num_tiles)
    longest_first = torch.tensor(order, device=device)
    first_tile = torch.tensor([runs[r].first_tile for r in order], device=device)
    offset = torch.tensor([runs[r].offset for r in order], dtype=torch.float64, device=device)[:, None]
    ordered = {pooling: total[longest_first] for pooling, total in running.items()}
    active = len(order)
    for k in range(runs[order[0]].num_tiles):
        while runs[order[active - 1]].num_tiles <= k:
            active -= 1
        tile = first_tile[:active] + k
        for pooling, total in ordered.items():
            if pooling == "max":
                total[:active] = torch.maximum(total[:active], tiles["max"][tile])
            elif pooling == "mean":
                total[:active] += tiles["sum"][tile]
            else:
                total[:active] += tiles["weighted"][tile] + (offset[:active] + k * TILE) * tiles["sum"][tile]
    for pooling, total in ordered.items():
        running[pooling][longest_first] = total


def _leave(
    pooling: str, table_SD: torch.Tensor, running: torch.Tensor, runs: Sequence[Run], segments: Segments, window_tokens: int
) -> None:
    """Leave in each entry's lane the window that its last token is in, and the empty state where that window is full."""
    last = {run.entry: r for r, run in enumerate(runs)}
    kept = [(last[e], entry.lane_out) for e, entry in enumerate(segments.entries) if entry.lane_out != NO_LANE]
    if not kept:
        return
    row, slot = torch.tensor(kept, device=table_SD.device).unbind(1)
    table_SD[slot] = running[row]
    full = [lane for r, lane in kept if runs[r].offset + runs[r].num_tokens == window_tokens]
    if full:
        table_SD[torch.tensor(full, device=table_SD.device)] = empty_table(pooling, len(full), table_SD.shape[1], table_SD.device)

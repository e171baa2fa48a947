"""Named inputs of pool: steps in the middle of documents, with what the lanes hold from before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from longscan.kernels.pool import POOLINGS, PoolState
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments


@dataclass(frozen=True, slots=True)
class Piece:
    """A document's part in the step."""

    position: int
    num_tokens: int
    ends: bool


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    width: int
    pieces: tuple[Piece, ...]
    window_tokens: int | None
    poolings: tuple[str, ...] = POOLINGS
    spare_tiles: int = 1
    """Tiles past the entries: they belong to nobody."""


@dataclass(frozen=True, slots=True)
class Inputs:
    hidden_TD: torch.Tensor
    state: PoolState
    segments: Segments


def make(case: Case, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Hidden states with a mean and a spread, NaN in the tiles of nobody, and lanes that hold what came before (NaN where nothing did)."""
    generator = torch.Generator().manual_seed(seed)
    entries: list[Entry] = []
    tile = 0
    for lane, piece in enumerate(case.pieces):
        lane_out = NO_LANE if piece.ends else lane
        entries.append(Entry(tile, piece.num_tokens, piece.position, lane if piece.position else NO_LANE, lane_out, piece.ends))
        tile += entries[-1].num_tiles
    hidden_TD = torch.full(((tile + case.spare_tiles) * TILE, case.width), torch.nan)
    hidden_TD[: tile * TILE] = 0.5 + torch.randn(tile * TILE, case.width, generator=generator)
    state = PoolState.new(len(entries) + 1, case.width, case.poolings, case.window_tokens)
    for name, table in state.tables.items():
        for lane, piece in enumerate(case.pieces):
            table[lane] = _before(name, piece.position, case, generator)
    tables = {name: table.to(device) for name, table in state.tables.items()}
    segments = Segments.pack(entries, tile + case.spare_tiles, device)
    return Inputs(hidden_TD.to(device, dtype), PoolState(tables), segments)


def _before(name: str, position: int, case: Case, generator: torch.Generator) -> torch.Tensor:
    """[D]: totals like those of `position` tokens, or of as many as the open window has."""
    tokens = position % (case.window_tokens or 1) if name.startswith("window_") else position
    if not tokens:
        return torch.full((case.width,), torch.nan, dtype=torch.float64)
    noise = torch.randn(case.width, generator=generator, dtype=torch.float64)
    if name.endswith("max"):
        return 2 + noise
    weight = tokens * (tokens + 1) / 2 if name.endswith("weighted_mean") else tokens
    return weight * (0.5 + 0.1 * noise)


def grouped(ahead: int, window_tokens: int | None) -> Case:
    """Entries of 1, ahead - 1, ahead, ahead + 1 and 2 ahead + 3 tiles: begun and from a lane, ended and not."""
    sizes = (1, ahead - 1, ahead, ahead + 1, 2 * ahead + 3)
    ends = [(position, TILE * size - 37, True) for size in sizes for position in (0, 3 * TILE)]
    pieces = [*ends, *((position, TILE * size, False) for size in sizes for position in (0, 3 * TILE))]
    return Case(f"groups_of_{ahead}_tiles_windows_of_{window_tokens}", 32, tuple(Piece(*piece) for piece in pieces), window_tokens)


CASES = (
    Case(
        "ragged_with_state",
        48,
        (Piece(128, 200, True), Piece(0, 1, True), Piece(64, 320, False), Piece(0, 65, True), Piece(192, 63, True), Piece(0, 128, False)),
        192,
    ),
    Case("T1", 32, (Piece(0, 1, True),), 64),
    Case("T63", 32, (Piece(0, 63, True),), 64),
    Case("T64", 32, (Piece(0, 64, True),), 64),
    Case("T65", 32, (Piece(0, 65, True),), 64),
    Case("window_closes_at_the_end_of_an_entry", 32, (Piece(64, 128, False), Piece(64, 128, True), Piece(0, 192, False)), 192),
    Case("many_windows_in_an_entry", 32, (Piece(64, 1000, True), Piece(0, 640, False)), 128),
    Case("a_window_over_many_entries", 32, (Piece(1 << 20, 256, False), Piece(1 << 19, 300, True)), 1 << 22),
    Case("no_windows", 32, (Piece(64, 100, True), Piece(0, 128, False)), None),
    Case("last_alone", 32, (Piece(64, 100, True), Piece(0, 70, True)), 64, ("last",)),
    grouped(8, None),
    grouped(8, 5 * TILE),
    Case("far_along", 32, (Piece(12_800_000, 130, True), Piece(64_000_000, 64, False)), 8192),
    Case("crowd", 64, tuple(Piece(64 * (i % 3), 1 + 37 * i % 300, i % 2 == 0 or (1 + 37 * i % 300) % 64 != 0) for i in range(40)), 256),
)
"""Checked by tests, on a CPU and on a GPU."""

BENCHMARKS = (
    Case("one_document_768", 768, (Piece(65_536, 65_536, False),), 8192, spare_tiles=0),
    Case("documents_of_500_768", 768, tuple(Piece(0, 500, True) for _ in range(128)), 8192, spare_tiles=0),
    Case("four_documents_2560", 2560, tuple(Piece(8192 * i, 16_384, False) for i in range(4)), 8192, spare_tiles=0),
)
"""Shapes worth timing."""

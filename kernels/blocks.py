"""Blocks: the consecutive tiles of a step that the PyTorch path works on at once, so that what is in between stays in the cache.

Inside a block everything is done for all tiles together, save the passing of states from tile to tile. That goes in waves: wave k
holds the k-th tile of every piece that has one. So one long document costs a short operation a tile, and many short ones share
their operations. Tiles that belong to no entry are in no block: nothing reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments

CACHE_BYTES_A_THREAD = 4 << 20
"""What a block of one CPU thread may touch: measured best on cores with 1 MiB of second-level cache."""
GPU_BYTES = 256 << 20
"""What a block may hold on a GPU."""


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive tiles of a step and how states pass through them.

    A piece is the part of an entry that lies in the block. Pieces are sorted, the longest first, so that each wave
    takes the first few; tensors of initial and final states follow that order.
    """

    first_tile: int
    num_tiles: int
    waves: tuple[int, ...]
    """Pieces that take part in each wave, never more than in the one before."""
    order: torch.Tensor | None
    """[M], int64: the block's tiles in the order of the waves; None where that is their own order."""
    place: torch.Tensor | None
    """[M], int64: for each tile its place in the order of the waves."""
    begun: slice
    """The entries that begin in the block."""
    begins: torch.Tensor | None
    """[begun], int64: the tile of the block on which each of them begins; None where there are none."""
    opens: bool
    """An entry begins on the block's first tile."""
    padding: torch.Tensor | None
    """[M * TILE], bool: rows past their entry's last token; None where there are none."""
    lanes_in: torch.Tensor | None
    """[pieces], int64: slots of the initial states, NO_LANE for zero or carried ones; None where all are."""
    carried_in: int | None
    """The piece that goes on from the block before."""
    carried_out: int | None
    """The piece that goes on in the next block."""
    kept: torch.Tensor | None
    """[kept], int64: the pieces whose final state goes to a slot; None where none does."""
    lanes_out: torch.Tensor | None
    """[kept], int64: those slots."""

    @property
    def rows(self) -> slice:
        return slice(self.first_tile * TILE, (self.first_tile + self.num_tiles) * TILE)


@dataclass(frozen=True, slots=True)
class _Piece:
    index: int
    entry: Entry
    first_tile: int
    num_tiles: int

    @property
    def begins(self) -> bool:
        return self.first_tile == self.entry.first_tile

    @property
    def finishes(self) -> bool:
        return self.first_tile + self.num_tiles == self.entry.first_tile + self.entry.num_tiles


def tiles_a_block(bytes_a_tile: int, device: torch.device) -> int:
    """How many tiles, each with `bytes_a_tile` of results in between, make a block."""
    budget = CACHE_BYTES_A_THREAD * torch.get_num_threads() if device.type == "cpu" else GPU_BYTES
    return max(1, budget // bytes_a_tile)


def row_chunks(num_rows: int, bytes_a_row: int, device: torch.device) -> Iterator[slice]:
    """Cut rows that need nothing of each other into chunks as large as a block."""
    size = TILE * tiles_a_block(bytes_a_row * TILE, device)
    for first in range(0, num_rows, size):
        yield slice(first, min(first + size, num_rows))


def spans(segments: Segments) -> list[tuple[int, int]]:
    """Runs of tiles that belong to entries, as (first, end)."""
    found: list[tuple[int, int]] = []
    for entry in segments.entries:
        end = entry.first_tile + entry.num_tiles
        if found and found[-1][1] == entry.first_tile:
            found[-1] = (found[-1][0], end)
        else:
            found.append((entry.first_tile, end))
    return found


def gaps(segments: Segments) -> list[slice]:
    """Rows of the tiles that belong to no entry."""
    borders = [0, *(tile for span in spans(segments) for tile in span), segments.num_tiles]
    return [slice(first * TILE, end * TILE) for first, end in zip(borders[::2], borders[1::2], strict=True) if first < end]


def blocks(segments: Segments, num_tiles: int) -> tuple[Block, ...]:
    """Cut the step's entries into blocks of at most `num_tiles` tiles."""
    key = (Block, num_tiles)
    if key not in segments.derived:
        device = segments.first_tile.device
        segments.derived[key] = tuple(_block(pieces, device) for pieces in _pieces(segments, num_tiles))
    cut: tuple[Block, ...] = segments.derived[key]
    return cut


def _pieces(segments: Segments, num_tiles: int) -> Iterator[list[_Piece]]:
    pieces: list[_Piece] = []
    room = num_tiles
    end = 0
    for index, entry in enumerate(segments.entries):
        if pieces and entry.first_tile > end:
            yield pieces
            pieces, room = [], num_tiles
        tile, end = entry.first_tile, entry.first_tile + entry.num_tiles
        while tile < end:
            count = min(room, end - tile)
            pieces.append(_Piece(index, entry, tile, count))
            tile, room = tile + count, room - count
            if room == 0:
                yield pieces
                pieces, room = [], num_tiles
    if pieces:
        yield pieces


def _block(pieces: list[_Piece], device: torch.device) -> Block:
    first_tile = pieces[0].first_tile
    num_tiles = sum(piece.num_tiles for piece in pieces)
    begun = [piece for piece in pieces if piece.begins]
    opens = pieces[0].begins
    pieces = sorted(pieces, key=lambda piece: -piece.num_tiles)
    waves = tuple(sum(piece.num_tiles > k for piece in pieces) for k in range(pieces[0].num_tiles))
    order = [piece.first_tile - first_tile + k for k, wave in enumerate(waves) for piece in pieces[:wave]]
    place = sorted(range(num_tiles), key=order.__getitem__)
    lanes_in = [piece.entry.lane_in if piece.begins else NO_LANE for piece in pieces]
    kept = [p for p, piece in enumerate(pieces) if piece.finishes and piece.entry.lane_out != NO_LANE]
    moved = order != place or order != sorted(order)

    def indices(values: list[int], wanted: bool) -> torch.Tensor | None:
        return torch.tensor(values, dtype=torch.int64, device=device) if wanted else None

    return Block(
        first_tile=first_tile,
        num_tiles=num_tiles,
        waves=waves,
        order=indices(order, moved),
        place=indices(place, moved),
        begun=slice(begun[0].index, begun[-1].index + 1) if begun else slice(0, 0),
        begins=indices([piece.first_tile - first_tile for piece in begun], bool(begun)),
        opens=opens,
        padding=_padding(pieces, first_tile, num_tiles, device),
        lanes_in=indices(lanes_in, any(lane != NO_LANE for lane in lanes_in)),
        carried_in=next((p for p, piece in enumerate(pieces) if not piece.begins), None),
        carried_out=next((p for p, piece in enumerate(pieces) if not piece.finishes), None),
        kept=indices(kept, bool(kept)),
        lanes_out=indices([pieces[p].entry.lane_out for p in kept], bool(kept)),
    )


def _padding(pieces: list[_Piece], first_tile: int, num_tiles: int, device: torch.device) -> torch.Tensor | None:
    mask = np.zeros(num_tiles * TILE, dtype=np.bool_)
    for piece in pieces:
        if piece.finishes:
            end = (piece.first_tile + piece.num_tiles - first_tile) * TILE
            mask[end - (-piece.entry.num_tokens % TILE) : end] = True
    return torch.from_numpy(mask).to(device) if mask.any() else None

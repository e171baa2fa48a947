"""The packed layout that every operator takes: which rows of a step belong to which document.

A step holds the segments of many documents end to end. Each entry is a run of consecutive tokens of one document; it
begins on a tile (64 rows), so the rows between its last token and the next tile are padding. Padding rows are ordinary
finite rows (a pad token through every layer): an operator may read them, but they change no state and nothing of theirs is used.

State lives in tables with one slot a lane. An entry reads its initial state from slot `lane_in` and leaves its final
state in slot `lane_out`; -1 stands for the zero state and for a state that nobody needs again. The two differ when a
document starts from a prefix that many share, and a document that begins and ends in one step needs no slot at all.
No two entries of a step write one slot, and no entry reads a slot that another one writes, so entries never race.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

TILE = 64
"""Tokens in a tile: every entry begins on a multiple of it."""

MOST_ROWS = 65_535 * 32
"""Rows of a step on a GPU: a launch has so many blocks at most on its second axis, and the convolution's are of 32 rows."""

NO_LANE = -1
"""As `lane_in`: begin from the zero state. As `lane_out`: the final state is not kept."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A run of consecutive tokens of one document inside a step."""

    first_tile: int
    """Tile of the step on which the entry begins."""
    num_tokens: int
    """Real tokens, at least 1; the entry occupies ceil(num_tokens / TILE) tiles."""
    position: int = 0
    """Position in the document of the entry's first token, a multiple of TILE."""
    lane_in: int = NO_LANE
    lane_out: int = NO_LANE
    ends: bool = False
    """The document ends with this entry."""

    @property
    def num_tiles(self) -> int:
        return -(-self.num_tokens // TILE)

    @property
    def rows(self) -> slice:
        """Rows of the step that hold the entry's real tokens."""
        start = self.first_tile * TILE
        return slice(start, start + self.num_tokens)


@dataclass(frozen=True, eq=False)
class Segments:
    """One step's entries, on the host (`entries`) and as int32 tensors [E] on the device."""

    entries: tuple[Entry, ...]
    num_tiles: int
    """Tiles of the whole step: its tensors have T = num_tiles * TILE rows."""
    first_tile: torch.Tensor
    num_tokens: torch.Tensor
    position_tile: torch.Tensor
    """Position of the entry's first token in the document, in tiles."""
    lane_in: torch.Tensor
    lane_out: torch.Tensor
    order: torch.Tensor
    """Entries, those of most tiles first: where each is a chain of tiles, blocks that begin first should be the longest."""
    tile_entry: torch.Tensor
    """[num_tiles]: the entry that a tile belongs to, -1 where it belongs to none."""
    buffer: torch.Tensor
    """All of these in one, on the device."""
    chains: int
    """Entries that a launch makes blocks for: all there are, and more of no tokens where launches are recorded, to be made again."""
    span_tiles: int | None = None
    """Tiles of a span, counted from the document's start, at whose borders the SSD's states are made at once on a GPU, from spans
    that run side by side; None: a document's state goes from tile to tile. The two differ in the last bits: a run keeps to one."""
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What operators worked out from the entries, by a key of theirs: worked out once a step, not once a layer."""

    @classmethod
    def pack(
        cls,
        entries: Sequence[Entry],
        num_tiles: int,
        device: torch.device | str = "cpu",
        *,
        slots: int | None = None,
        span_tiles: int | None = None,
    ) -> Segments:
        """Check `entries` and lay them out for `device`.

        slots: length of the device tensors, for steps of one constant shape; those past the entries hold 0 tokens.

        Raises ValueError where entries overlap, leave the step, are misaligned, or race for a lane.
        """
        _check(entries, num_tiles)
        count = len(entries) if slots is None else slots
        if span_tiles is not None and span_tiles < 1:
            raise ValueError(f"span_tiles: expected at least 1, got {span_tiles}")
        if count < len(entries):
            raise ValueError(f"slots: expected at least {len(entries)} (the entries), got {count}")
        # One buffer, so that a step costs one copy to the device; every array in it begins on 16 bytes, which kernels are compiled for.
        stride, real = -(-count // 4) * 4, len(entries)
        flat = np.zeros(6 * stride + num_tiles, dtype=np.int32)
        by_entry, tile_entry = flat[: 6 * stride].reshape(6, stride), flat[6 * stride :]
        by_entry[3:5, real:count], by_entry[5, real:count] = NO_LANE, range(real, count)
        first_tile, num_tokens = by_entry[:2, :real]
        first_tile[:], num_tokens[:] = [e.first_tile for e in entries], [e.num_tokens for e in entries]
        by_entry[2, :real] = [e.position // TILE for e in entries]
        by_entry[3, :real], by_entry[4, :real] = [e.lane_in for e in entries], [e.lane_out for e in entries]
        by_entry[5, :real] = np.argsort(-num_tokens, kind="stable")
        tile_entry[:] = -1
        num_tiles_of = -(-num_tokens // TILE)
        entry_of = np.repeat(np.arange(real, dtype=np.int32), num_tiles_of)
        tile_entry[np.arange(len(entry_of)) + np.repeat(first_tile - np.cumsum(num_tiles_of) + num_tiles_of, num_tiles_of)] = entry_of
        buffer = to_device(flat, device)
        arrays = _arrays(buffer, count, num_tiles)
        return cls(tuple(entries), num_tiles, **arrays, buffer=buffer, chains=len(entries), span_tiles=span_tiles)

    def recorded(self, chains: int) -> Segments:
        """The same in memory of its own, with blocks for `chains` entries: for launches that are made again when it holds others."""
        buffer, slots = self.buffer.clone(), self.num_tokens.numel()
        if not len(self.entries) <= chains <= slots:
            raise ValueError(f"chains: expected {len(self.entries)} (the entries) to {slots} (the slots), got {chains}")
        arrays = _arrays(buffer, slots, self.num_tiles)
        return Segments(self.entries, self.num_tiles, **arrays, buffer=buffer, chains=chains, span_tiles=self.span_tiles)

    @property
    def num_rows(self) -> int:
        """T, the rows of the step's tensors."""
        return self.num_tiles * TILE

    @cached_property
    def highest_lane(self) -> int:
        """The highest slot that an entry reads or writes; NO_LANE where none does."""
        return max((max(entry.lane_in, entry.lane_out) for entry in self.entries), default=NO_LANE)

    def real_rows(self) -> torch.Tensor:
        """Mask [T], bool, on the host: the rows that hold tokens."""
        mask = torch.zeros(self.num_rows, dtype=torch.bool)
        for entry in self.entries:
            mask[entry.rows] = True
        return mask


def _arrays(buffer: torch.Tensor, slots: int, num_tiles: int) -> dict[str, Any]:
    """The arrays of a step, as views of one buffer: those by entry, each from a multiple of 16 bytes, then that by tile."""
    by_entry = buffer[: len(buffer) - num_tiles].view(6, -1)[:, :slots]
    names = ("first_tile", "num_tokens", "position_tile", "lane_in", "lane_out", "order")
    return dict(zip(names, by_entry.unbind(0), strict=True)) | {"tile_entry": buffer[len(buffer) - num_tiles :]}


def to_device(array: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """A copy of `array` on `device`: to a GPU from pinned memory, since a plain copy makes the host wait for all that is queued there."""
    on_host = torch.from_numpy(array)
    return on_host.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else on_host.to(device)


def _check(entries: Sequence[Entry], num_tiles: int) -> None:
    end = 0
    for e, entry in enumerate(entries):
        if entry.num_tokens < 1:
            raise ValueError(f"entries[{e}].num_tokens: expected at least 1, got {entry.num_tokens}")
        if entry.position < 0 or entry.position % TILE:
            raise ValueError(f"entries[{e}].position: expected a multiple of {TILE}, at least 0, got {entry.position}")
        for name, lane in (("lane_in", entry.lane_in), ("lane_out", entry.lane_out)):
            if lane < NO_LANE:
                raise ValueError(f"entries[{e}].{name}: expected a slot, or {NO_LANE} for none, got {lane}")
        if entry.first_tile < end:
            raise ValueError(f"entries[{e}].first_tile: expected at least {end} (in order, not overlapping), got {entry.first_tile}")
        end = entry.first_tile + entry.num_tiles
    if end > num_tiles:
        raise ValueError(f"num_tiles: expected at least {end} (the entries' end), got {num_tiles}")
    slots = [entry.lane_out for entry in entries if entry.lane_out != NO_LANE]
    written = set(slots)
    if len(written) != len(slots):
        raise ValueError(f"lane_out: expected no slot twice in a step, got {sorted(slots)}")
    for e, entry in enumerate(entries):
        if entry.lane_in != entry.lane_out and entry.lane_in in written:
            raise ValueError(f"entries[{e}].lane_in: slot {entry.lane_in} is written by another entry of the same step")

"""Packed layouts by name: the ragged edges that tests hold operators to, and the loads that the benchmark times.

In the layouts of the edges tiles before, between and behind the entries belong to nobody, slots are not in order, and documents
begin from zero, from their own lane and from a prefix that is shared: whoever mixes up rows, slots or borders is found out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments


@dataclass(frozen=True, slots=True)
class Layout:
    """The entries of a step, and the slots of the state tables that go with it."""

    name: str
    entries: tuple[Entry, ...]
    num_tiles: int
    slots: int

    def segments(self, device: torch.device | str = "cpu") -> Segments:
        return Segments.pack(self.entries, self.num_tiles, device)

    def owned_rows(self) -> torch.Tensor:
        """Mask [T], bool: the rows of tiles that belong to an entry, padding and all."""
        mask = torch.zeros(self.num_tiles * TILE, dtype=torch.bool)
        for entry in self.entries:
            mask[entry.first_tile * TILE : (entry.first_tile + entry.num_tiles) * TILE] = True
        return mask

    def read_slots(self) -> list[int]:
        return sorted({entry.lane_in for entry in self.entries} - {NO_LANE})


def one(name: str, num_tokens: int) -> Layout:
    """One entry in mid-document, from slot 2 to slot 0, a tile of nobody on either side."""
    entry = Entry(first_tile=1, num_tokens=num_tokens, position=128, lane_in=2, lane_out=0)
    return Layout(name, (entry,), entry.num_tiles + 2, slots=3)


def packed(name: str, lengths: Iterable[int], *, lanes: bool = True) -> Layout:
    """Documents end to end, each in a lane of its own or, where each begins and ends in the step, in none."""
    entries: list[Entry] = []
    tile = 0
    for e, length in enumerate(lengths):
        lane = e if lanes else NO_LANE
        entries.append(Entry(tile, length, lane_in=lane, lane_out=lane, ends=not lanes))
        tile += entries[-1].num_tiles
    return Layout(name, tuple(entries), tile, slots=len(entries) if lanes else 0)


def _ragged() -> Iterator[Entry]:
    yield Entry(1, 130, lane_in=NO_LANE, lane_out=3)  # a document's first tokens
    yield Entry(4, 1, position=64, lane_in=5, lane_out=5, ends=True)  # one token goes on in its own lane
    yield Entry(5, 3, lane_in=1, lane_out=0, ends=True)  # from the shared prefix; shorter than the convolution
    yield Entry(8, 64, lane_in=1, lane_out=NO_LANE, ends=True)  # from the same prefix, its state not kept
    yield Entry(9, 65, lane_in=NO_LANE, lane_out=NO_LANE, ends=True)  # begins and ends here
    yield Entry(11, 640, position=640, lane_in=6, lane_out=6)
    yield Entry(21, 63, position=6400, lane_in=2, lane_out=4, ends=True)


EDGES: tuple[Layout, ...] = (
    Layout("ragged", tuple(_ragged()), num_tiles=24, slots=8),
    one("T1", 1),
    one("T2", 2),
    one("T3_shorter_than_conv", 3),
    one("T4", 4),
    one("T63", 63),
    one("T64", 64),
    one("T65", 65),
    one("T1000", 1000),
    one("T5000", 5000),
    packed("short_documents", [1 + 7 * i % 150 for i in range(40)], lanes=False),
)
"""For correctness: the first is everything at once."""

LOADS: tuple[Layout, ...] = (
    packed("one_16384", [16384]),
    packed("four_4096", [4096] * 4),
    packed("256_documents_of_50", [50] * 256, lanes=False),
    packed("one_2048", [2048]),
)
"""For timing on a CPU."""


def names(layouts: Sequence[Layout]) -> list[str]:
    return [layout.name for layout in layouts]

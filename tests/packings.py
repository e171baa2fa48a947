"""Random packings: steps that no one would think of, many of them side by side as one, and one document of theirs alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from longscan.kernels.layouts import Layout
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments

SLOTS = 64
"""Of a packing's tables."""
ENTRIES = 32
"""Length of a packing's device arrays, and the most entries it has."""


@dataclass(frozen=True)
class Place:
    """Where kernels run, and how much can be run there."""

    name: str
    device: str
    tiles: int
    """Of a step."""
    packings: int
    together: int
    """Packings whose truth is worked out at once."""
    lengths: tuple[int, ...]

    def random_groups(self, seed: str, count: int) -> Iterator[tuple[int, list[Layout]]]:
        """`count` random packings in groups to be checked at once, each with the number of its first."""
        layouts = [random_layout(f"{seed} {n}", self.tiles) for n in range(count)]
        for first in range(0, count, self.together):
            yield first, layouts[first : first + self.together]


def at(places: Sequence[Place]) -> list[Any]:
    """Parameters of a test or a fixture; those on a GPU are marked so."""
    return [pytest.param(place, marks=[pytest.mark.gpu] * (place.device == "cuda"), id=place.name) for place in places]


def to_be_told_apart(layout: Layout, n: int, total: int) -> Sequence[Entry]:
    """Entries that are run again alone: all of a single layout, one of each, the n-th, of several."""
    return layout.entries if total == 1 else layout.entries[n % len(layout.entries) :][:1]


def random_layout(seed: str, num_tiles: int) -> Layout:
    """Entries of all lengths in random lanes, with gaps: documents that begin, go on, change their lane, or start from a shared prefix."""
    rng = random.Random(seed)
    lanes = rng.sample(range(SLOTS), SLOTS)
    prefixes = [lanes.pop(), lanes.pop()]
    entries: list[Entry] = []
    tile = rng.choice((0, 0, 1, 2))
    while tile < num_tiles and len(entries) < ENTRIES // 2:
        lengths = (
            rng.randint(1, 4),
            rng.randint(1, 200),
            TILE * rng.randint(1, 4) + rng.choice((-1, 0, 1)),
            rng.randint(1, TILE * num_tiles),
        )
        length = min(rng.choice(lengths), (num_tiles - tile) * TILE)
        lane_in, lane_out, position = _lanes(rng, lanes, prefixes)
        entries.append(Entry(tile, length, position, lane_in, lane_out, ends=lane_out == NO_LANE or rng.random() < 0.4))
        tile += entries[-1].num_tiles + rng.choice((0, 0, 0, 1, 3))
    return Layout(f"random {seed}", tuple(entries), num_tiles, SLOTS)


def _lanes(rng: random.Random, lanes: list[int], prefixes: Sequence[int]) -> tuple[int, int, int]:
    """lane_in, lane_out and the position of an entry."""
    fresh, last = rng.random() < 0.4, rng.random() < 0.3
    position = 0 if fresh else TILE * rng.randint(1, 3000)
    lane_in = lanes.pop() if position else rng.choice((NO_LANE, *prefixes))
    if last:
        return lane_in, NO_LANE, position
    return lane_in, lane_in if position and rng.random() < 0.7 else lanes.pop(), position


def every_length(lengths: Sequence[int]) -> Layout:
    """A document of each length that begins, and one that goes on from its lane, which a tile of nobody parts from the next pair."""
    entries: list[Entry] = []
    tile = 0
    for n, length in enumerate(lengths):
        for lane_in, lane_out, position in ((NO_LANE, 2 * n, 0), (2 * n + 1, 2 * n + 1, TILE * (n + 1))):
            entries.append(Entry(tile, length, position, lane_in, lane_out, ends=n % 2 == 0))
            tile += entries[-1].num_tiles
        tile += 1
    return Layout("every length", tuple(entries), -(-tile // 16) * 16, slots=-(-2 * len(lengths) // 16) * 16)


def joined(layouts: Sequence[Layout]) -> Layout:
    """Steps side by side as one step, each with a table of its own in one."""
    entries: list[Entry] = []
    tile = slot = 0
    for layout in layouts:
        for entry in layout.entries:
            lanes = (lane if lane == NO_LANE else lane + slot for lane in (entry.lane_in, entry.lane_out))
            entries.append(replace(entry, first_tile=entry.first_tile + tile, **dict(zip(("lane_in", "lane_out"), lanes, strict=True))))
        tile, slot = tile + layout.num_tiles, slot + layout.slots
    return Layout("joined", tuple(entries), tile, slot)


def parts(layouts: Sequence[Layout]) -> Iterator[tuple[Layout, slice, slice]]:
    """Each of `joined`'s layouts, with its rows and its slots there."""
    tiles, slots = (list(accumulate(sizes, initial=0)) for sizes in zip(*((x.num_tiles, x.slots) for x in layouts), strict=True))
    for n, layout in enumerate(layouts):
        yield layout, slice(tiles[n] * TILE, tiles[n + 1] * TILE), slice(slots[n], slots[n + 1])


def pack(layout: Layout, device: str, span_tiles: int | None = None) -> Segments:
    """With device arrays of a length that is a multiple of 16: kernels are compiled anew where it is none."""
    return Segments.pack(
        layout.entries, layout.num_tiles, device, slots=-(-len(layout.entries) // ENTRIES) * ENTRIES, span_tiles=span_tiles
    )


def whole_tiles(entry: Entry) -> slice:
    """Rows of an entry, its padding among them."""
    return slice(entry.first_tile * TILE, (entry.first_tile + entry.num_tiles) * TILE)


def elsewhere(entry: Entry, num_tiles: int) -> Entry:
    """The entry alone in a step of `num_tiles`, at its end, and in other lanes."""
    lane_out = entry.lane_out if entry.lane_out == NO_LANE else 5
    lane_in = entry.lane_in if entry.lane_in == NO_LANE else 5 if entry.lane_in == entry.lane_out else 9
    return replace(entry, first_tile=num_tiles - entry.num_tiles, lane_in=lane_in, lane_out=lane_out)


def moved(rows: torch.Tensor, entry: Entry, alone: Entry, num_tiles: int) -> torch.Tensor:
    """An entry's rows at its other place; NaN around them, and other numbers in its padding."""
    result = torch.full((num_tiles * TILE, *rows.shape[1:]), torch.nan, dtype=rows.dtype, device=rows.device)
    result[whole_tiles(alone)] = 7.0
    result[alone.rows] = rows[entry.rows]
    return result


def assert_rows(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float, worst: float) -> None:
    """Off by at most `tolerance`, and no row (last axis) by `worst` of its own size (of the mean size, where that is larger).

    Worked out where the tensors are; expected: float64.
    """
    assert got.shape == expected.shape, f"{name}: shape {list(got.shape)}, expected {list(expected.shape)}"
    assert bool(got.isfinite().all()), f"{name}: {int((~got.isfinite()).sum())} of {got.numel()} elements are not finite"
    difference, sizes = ((t.flatten(0, -2).norm(dim=-1)) for t in (got.double() - expected, expected))
    mean = sizes.square().mean().sqrt()
    error, row = float(difference.square().mean().sqrt() / mean), float((difference / sizes.maximum(mean)).max())
    assert error <= tolerance, f"{name}: relative error {error:.2e}, allowed {tolerance:.0e}"
    assert row <= worst, f"{name}: a row is off by {row:.2e}, allowed {worst:.0e}"

"""Spans: a document cut at fixed positions, so that its parts can run side by side and their states be joined after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments, to_device

PADDED_TO = 16
"""Spans are padded to a multiple of it by spans of no tokens: kernels are compiled anew for arrays of other lengths."""


FEW_BLOCKS = 0.5
"""Of the GPU's processors: with fewer blocks than these the scan in spans is the faster one. By one document's times on an H200, both
ways, the two are even at 0.52 (H 24), 0.63 (H 80) and 0.67 (H 128) of them."""


def heads_a_block(group: int, P: int, N: int) -> int:
    """Heads of a block of the scan, of the `group` heads that share B and C: two, each with a warp group, where their states fit."""
    return 2 if group % 2 == 0 and P * N <= 64 * 128 else 1


def span_tiles(heads: int, segment: int = 64) -> int:
    """Tiles of a span: with few heads more spans are wanted to fill a GPU, and each costs the traffic of a state.

    segment: tiles of a segment. Spans end where segments do, since an entry may: a span that it cut in two would have other bits.
    """
    most = 32 if heads <= 32 else 64
    return max(tiles for tiles in range(1, most + 1) if segment % tiles == 0)


def pays(documents: int, blocks: int, processors: int) -> bool:
    """Whether spans are faster for a step of `documents` long entries, of `blocks` blocks each, on `processors` multiprocessors."""
    return documents * blocks < FEW_BLOCKS * processors


def full_waves(entries: int, blocks: int, processors: int) -> float:
    """Share of a GPU's multiprocessors that `entries` of one length, of `blocks` blocks each, keep busy: the last wave may be small."""
    wanted = entries * blocks
    return wanted / (-(-wanted // processors) * processors) if processors else 1.0


@dataclass(frozen=True, slots=True)
class Spans:
    """The entries of a step cut at multiples of `segments.span_tiles` from their documents' starts: int32 tensors."""

    first_tile: torch.Tensor
    """[K], like the next five."""
    num_tokens: torch.Tensor
    wanted: torch.Tensor
    """`num_tokens` of the spans whose final state somebody needs, 0 of the others."""
    slot: torch.Tensor
    """k: the slot of span k in a table of spans."""
    source: torch.Tensor
    """The slot of the state before the span: k, or NO_LANE where a document begins and in the padding."""
    none: torch.Tensor
    """NO_LANE, for every span."""
    first_span: torch.Tensor
    """[E], like the next."""
    num_spans: torch.Tensor
    buffer: torch.Tensor
    """All of these in one."""
    count: int
    """Spans that a launch makes blocks for: those that hold tokens, or, where launches are recorded, all K with the padding."""

    def recorded(self) -> Spans:
        """The same in memory of its own, with blocks for all: for launches that are made again when it holds others."""
        return _spans(self.buffer.clone(), self.slot.numel(), self.num_spans.numel(), self.slot.numel())


def cut(segments: Segments) -> Spans:
    """The spans of a step, worked out once."""
    if Spans not in segments.derived:
        segments.derived[Spans] = _cut(segments)
    found: Spans = segments.derived[Spans]
    return found


def _cut(segments: Segments) -> Spans:
    assert segments.span_tiles is not None
    of_entries = [list(_of(entry, segments.span_tiles)) for entry in segments.entries]
    counts = [len(spans) for spans in of_entries]
    K, E = -(-max(sum(counts), 1) // PADDED_TO) * PADDED_TO, segments.num_tokens.numel()
    by_span, by_entry = np.zeros((6, K), dtype=np.int32), np.zeros((2, -(-E // 4) * 4), dtype=np.int32)
    by_span[:3, : sum(counts)] = np.array([span for spans in of_entries for span in spans], dtype=np.int32).reshape(-1, 3).T
    by_entry[0, : len(counts)] = np.cumsum(counts) - counts
    begins = by_entry[0, : len(counts)][[entry.lane_in == NO_LANE for entry in segments.entries]]
    by_span[3], by_span[4], by_span[5] = np.arange(K), np.arange(K), NO_LANE
    by_span[4, begins], by_span[4, sum(counts) :] = NO_LANE, NO_LANE
    by_entry[1, : len(counts)] = counts
    buffer = to_device(np.concatenate([by_span.ravel(), by_entry.ravel()]), segments.first_tile.device)
    return _spans(buffer, K, E, sum(counts))


def _spans(buffer: torch.Tensor, K: int, E: int, count: int) -> Spans:
    first_tile, num_tokens, wanted, slot, source, none = buffer[: 6 * K].view(6, K).unbind(0)
    first_span, num_spans = buffer[6 * K :].view(2, -1)[:, :E].unbind(0)
    return Spans(first_tile, num_tokens, wanted, slot, source, none, first_span, num_spans, buffer, count)


def _of(entry: Entry, span_tiles: int) -> Iterator[tuple[int, int, int]]:
    """(first tile, tokens, wanted) of each span of an entry."""
    tile, stop = entry.first_tile, entry.first_tile + entry.num_tiles
    while tile < stop:
        position = entry.position // TILE + tile - entry.first_tile
        end = min(stop, tile + span_tiles - position % span_tiles)
        tokens = min(end * TILE, entry.rows.stop) - tile * TILE
        yield tile, tokens, tokens if end < stop or entry.lane_out != NO_LANE else 0
        tile = end

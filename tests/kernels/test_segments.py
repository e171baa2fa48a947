"""The packed layout, its checks, and how the PyTorch path cuts it into blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from longscan.kernels.blocks import Block, blocks, gaps
from longscan.kernels.layouts import EDGES, Layout, names
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments


@st.composite
def steps(draw: st.DrawFn) -> Segments:
    """Entries of 1 to 8 tiles with gaps between them, each in a lane of its own or in none."""
    entries, tile = [], 0
    for e in range(draw(st.integers(0, 12))):
        tile += draw(st.sampled_from([0, 0, 0, 1, 3]))
        lane = draw(st.sampled_from([NO_LANE, e]))
        entries.append(Entry(tile, draw(st.integers(1, 8 * TILE)), lane_in=lane, lane_out=lane))
        tile += entries[-1].num_tiles
    return Segments.pack(entries, tile + draw(st.integers(0, 2)))


def test_segments_tell_the_host_and_the_device_the_same() -> None:
    entries = [Entry(0, 65, lane_out=2), Entry(3, 3, position=128, lane_in=1, lane_out=1, ends=True)]
    segments = Segments.pack(entries, 5, slots=3)
    assert segments.entries == tuple(entries)
    assert segments.num_rows == 320
    assert segments.first_tile.tolist() == [0, 3, 0]
    assert segments.num_tokens.tolist() == [65, 3, 0]
    assert segments.position_tile.tolist() == [0, 2, 0]
    assert segments.lane_in.tolist() == [-1, 1, -1]
    assert segments.lane_out.tolist() == [2, 1, -1]
    assert segments.tile_entry.tolist() == [0, 0, -1, 1, -1]
    assert segments.highest_lane == 2
    assert all(tensor.dtype == torch.int32 for tensor in (segments.first_tile, segments.lane_out, segments.tile_entry))
    assert segments.real_rows().nonzero()[:, 0].tolist() == [*range(65), 192, 193, 194]


def test_a_prefix_may_be_read_by_many() -> None:
    Segments.pack([Entry(0, 64, lane_in=7, lane_out=0), Entry(1, 64, lane_in=7, lane_out=1)], 2)


WRONG: list[tuple[str, list[Entry], int, str]] = [
    ("no_tokens", [Entry(0, 0)], 1, r"entries\[0\].num_tokens: expected at least 1, got 0"),
    ("misaligned", [Entry(0, 5, position=63)], 1, r"entries\[0\].position: expected a multiple of 64, at least 0, got 63"),
    ("before_the_start", [Entry(0, 5, position=-64)], 1, r"entries\[0\].position: expected a multiple of 64, at least 0, got -64"),
    ("no_lane_in", [Entry(0, 5, lane_in=-2)], 1, r"entries\[0\].lane_in: expected a slot, or -1 for none, got -2"),
    ("no_lane_out", [Entry(0, 5, lane_out=-7)], 1, r"entries\[0\].lane_out: expected a slot, or -1 for none, got -7"),
    ("overlap", [Entry(0, 65), Entry(1, 1)], 3, r"entries\[1\].first_tile: expected at least 2 .*, got 1"),
    ("too_long", [Entry(1, 65)], 2, r"num_tiles: expected at least 3 \(the entries' end\), got 2"),
    ("two_writers", [Entry(0, 1, lane_out=3), Entry(1, 1, lane_out=3)], 2, r"lane_out: expected no slot twice in a step, got \[3, 3\]"),
    ("race", [Entry(0, 1, lane_out=3), Entry(1, 1, lane_in=3)], 2, r"entries\[1\].lane_in: slot 3 is written by another entry"),
]


@pytest.mark.parametrize(("entries", "num_tiles", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_layouts_that_cannot_be_are_named(entries: list[Entry], num_tiles: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segments.pack(entries, num_tiles)


def test_too_few_slots_are_named() -> None:
    with pytest.raises(ValueError, match=r"slots: expected at least 1 \(the entries\), got 0"):
        Segments.pack([Entry(0, 1)], 1, slots=0)


@pytest.mark.parametrize("layout", EDGES, ids=names(EDGES))
def test_layouts_of_the_cases_can_be(layout: Layout) -> None:
    segments = layout.segments()
    assert int(layout.owned_rows().sum()) == TILE * sum(entry.num_tiles for entry in layout.entries)
    assert segments.highest_lane < max(layout.slots, 1)


def walk(block: Block) -> dict[int, list[int]]:
    """Follow the waves: for each piece, by its place among the initial states, the tiles that its state goes through."""
    order = list(range(block.num_tiles)) if block.order is None else block.order.tolist()
    paths: dict[int, list[int]] = {piece: [] for piece in range(block.waves[0])}
    turn = iter(order)
    for count in block.waves:
        for piece in range(count):
            paths[piece].append(block.first_tile + next(turn))
    assert next(turn, None) is None
    return paths


@given(steps(), st.integers(1, 9))
def test_blocks_take_each_state_through_its_tiles_in_order(segments: Segments, num_tiles: int) -> None:
    """Each tile of an entry once, in order; begun from its lane, carried from block to block, and left in its lane."""
    seen: dict[int, list[int]] = {e: [] for e in range(len(segments.entries))}
    carried: int | None = None
    owner = segments.tile_entry.tolist()
    for block in blocks(segments, num_tiles):
        assert block.num_tiles <= num_tiles
        paths = walk(block)
        whose = {piece: owner[tiles[0]] for piece, tiles in paths.items()}
        for piece, tiles in paths.items():
            entry = segments.entries[whose[piece]]
            assert {owner[tile] for tile in tiles} == {whose[piece]}
            begins = tiles[0] == entry.first_tile
            assert begins == (piece != block.carried_in)
            if begins:
                assert (NO_LANE if block.lanes_in is None else int(block.lanes_in[piece])) == entry.lane_in
            else:
                assert whose[piece] == carried
            seen[whose[piece]] += tiles
        carried = None if block.carried_out is None else whose[block.carried_out]
        kept = (
            {} if block.kept is None or block.lanes_out is None else dict(zip(block.kept.tolist(), block.lanes_out.tolist(), strict=True))
        )
        for piece, tiles in paths.items():
            entry = segments.entries[whose[piece]]
            finished = tiles[-1] == entry.first_tile + entry.num_tiles - 1
            assert finished == (piece != block.carried_out)
            assert kept.get(piece, NO_LANE) == (entry.lane_out if finished else NO_LANE)
    for e, entry in enumerate(segments.entries):
        assert seen[e] == list(range(entry.first_tile, entry.first_tile + entry.num_tiles))


@given(steps(), st.integers(1, 9))
def test_rows_are_real_or_padding_or_in_a_gap(segments: Segments, num_tiles: int) -> None:
    count = torch.zeros(segments.num_rows, dtype=torch.int64)
    count[segments.real_rows()] += 1
    for block in blocks(segments, num_tiles):
        if block.padding is not None:
            count[block.rows][block.padding] += 1
    for rows in gaps(segments):
        count[rows] += 1
    assert torch.equal(count, torch.ones_like(count))


@given(steps(), st.integers(1, 9))
def test_blocks_name_the_entries_that_begin_in_them(segments: Segments, num_tiles: int) -> None:
    begun = []
    for block in blocks(segments, num_tiles):
        entries = segments.entries[block.begun]
        tiles = [] if block.begins is None else block.begins.tolist()
        assert [block.first_tile + tile for tile in tiles] == [entry.first_tile for entry in entries]
        assert block.opens == (bool(tiles) and tiles[0] == 0)
        begun += entries
    assert begun == list(segments.entries)


def test_blocks_are_worked_out_once_a_step() -> None:
    segments = EDGES[0].segments()
    assert blocks(segments, 4) is blocks(segments, 4)
    assert blocks(segments, 4) is not blocks(segments, 5)

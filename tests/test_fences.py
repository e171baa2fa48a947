"""What tests of operators stand on: memory that tells, and packings that are what they say."""

from __future__ import annotations

import pytest
import torch
from fences import FENCE, Fenced
from longscan.kernels.segments import NO_LANE
from packings import SLOTS, every_length, joined, moved, pack, parts, random_layout


def test_what_is_allocated_is_nan_between_fences() -> None:
    with Fenced() as fenced:
        made = [
            torch.empty((3, 5), dtype=torch.bfloat16),
            torch.empty(4, 2),
            torch.empty_like(torch.zeros(2, 3).T, memory_format=torch.contiguous_format),
        ]
    assert fenced.allocated == 3
    assert [tuple(tensor.shape) for tensor in made] == [(3, 5), (4, 2), (3, 2)]
    assert all(bool(tensor.isnan().all()) and tensor.is_contiguous() for tensor in made)
    assert torch.empty(3).untyped_storage().nbytes() == 12, "outside, nothing is fenced"


@pytest.mark.parametrize("place", [-1, 15, FENCE + 14, -FENCE])
def test_a_touched_fence_is_told(place: int) -> None:
    with pytest.raises(AssertionError, match="beside a tensor"):
        write(place)


def write(place: int) -> None:
    with Fenced():
        torch.empty((3, 5)).as_strided((1,), (1,), FENCE + place).zero_()


def test_what_fails_inside_is_what_is_told() -> None:
    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    assert torch.empty_like(torch.zeros(3)).untyped_storage().nbytes() == 12, "fences are gone all the same"


def write_and_fail() -> None:
    with Fenced():
        torch.empty(3).as_strided((1,), (1,), 0).zero_()
        raise ZeroDivisionError


def test_random_packings_hold_everything() -> None:
    layouts = [random_layout(str(n), 48) for n in range(200)]
    entries = [entry for layout in layouts for entry in layout.entries]
    for layout in layouts:
        pack(layout, "cpu", 2)  # which checks them
    assert {(entry.lane_in != NO_LANE, entry.lane_out != NO_LANE, entry.ends) for entry in entries} == {
        (begun, kept, ends) for begun in (True, False) for kept in (True, False) for ends in (True, False) if kept or ends
    }
    assert any(entry.lane_in != entry.lane_out != NO_LANE != entry.lane_in for entry in entries), "some change their lane"
    assert set(range(1, 5)) <= {entry.num_tokens for entry in entries}
    assert max(entry.num_tokens for entry in entries) > 2000
    whole = joined(layouts)
    pack(whole, "cpu")
    assert (whole.num_tiles, whole.slots, len(whole.entries)) == (200 * 48, 200 * SLOTS, len(entries))
    assert [layout.name for layout, _, _ in parts(layouts)] == [layout.name for layout in layouts]
    lengths = every_length(range(1, 201)).entries
    assert sorted({entry.num_tokens for entry in lengths if entry.lane_in == NO_LANE}) == list(range(1, 201))
    assert sorted({entry.num_tokens for entry in lengths if entry.lane_in != NO_LANE}) == list(range(1, 201))


def test_a_moved_entry_has_other_company() -> None:
    layout = random_layout("moved", 6)
    entry = layout.entries[0]
    rows = torch.arange(6.0 * 64)[:, None]
    other = moved(rows, entry, entry, 6)
    assert torch.equal(other[entry.rows], rows[entry.rows])
    assert bool(other[~layout.owned_rows()].isnan().all())

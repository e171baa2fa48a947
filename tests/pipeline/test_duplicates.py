"""Ids that come twice are counted in memory that does not grow; what is counted is one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from longscan.pipeline.output.duplicates import Duplicates, count_duplicates


@given(st.lists(st.sampled_from("abcdefgh")))
def test_all_are_found_where_there_is_room(ids: list[str]) -> None:
    found = count_duplicates(ids, slots=1 << 16)
    assert found.number == len(ids) - len(set(ids))
    assert found.first == next((doc_id for n, doc_id in enumerate(ids) if doc_id in ids[:n]), None)


@given(st.lists(st.integers(0, 50)), st.integers(1, 5))
def test_none_is_found_that_is_not_there(numbers: list[int], slots: int) -> None:
    ids = [f"doc-{number}" for number in numbers]
    found = count_duplicates(ids, slots=slots)
    assert found.number <= len(ids) - len(set(ids))
    if len(set(ids)) == len(ids):
        assert found == Duplicates(0, None)


def test_neighbours_are_found_however_small_the_table_is() -> None:
    assert count_duplicates(["a", "a", "b", "b", "b"], slots=1) == Duplicates(3, "a")

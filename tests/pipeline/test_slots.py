"""Slots of the state tables when lanes become fewer: what the next step needs is kept, each state in a slot of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from longscan.kernels.segments import NO_LANE
from longscan.pipeline.engine.slots import Slots, fewer_lanes


def test_the_tables_hold_lanes_then_contexts_then_spare_slots() -> None:
    slots = Slots(3, contexts=2, spare=4)
    assert [*slots.of_lanes, *slots.of_contexts, *slots.of_spare] == list(range(slots.total))
    assert [slots.before(replaced) for replaced in range(2)] == list(slots.of_contexts)
    assert Slots(3, has_context=False).before() == NO_LANE


@pytest.mark.parametrize(
    ("lanes", "held", "in_step", "left"),
    [(8, [], set(), 4), (8, [0, 1, 2, 3, 4, 5], {0, 1, 2, 3, 4, 5}, 6), (3, [2], {2}, 1), (1, [0], {0}, None), (2, [0, 1], {0, 1}, None)],
    ids=["half", "as_many_as_the_step_has", "half_of_an_odd_number", "one", "all_in_the_step"],
)
def test_half_of_the_lanes_or_what_the_step_needs(lanes: int, held: list[int], in_step: set[int], left: int | None) -> None:
    lowering = fewer_lanes(Slots(lanes, spare=1), held, in_step)
    assert (None if lowering is None else lowering.slots.lanes) == left


@given(lanes=st.integers(1, 12), contexts=st.integers(1, 3), spare=st.integers(0, 6), has_context=st.booleans(), data=st.data())
def test_each_state_that_is_kept_has_a_slot_of_its_own(
    lanes: int, contexts: int, spare: int, has_context: bool, data: st.DataObject
) -> None:
    slots = Slots(lanes, contexts, spare, has_context)
    documents = [*slots.of_lanes, *slots.of_spare]
    held = data.draw(st.lists(st.sampled_from(documents), unique=True, max_size=lanes))
    in_step = data.draw(st.sets(st.sampled_from(documents)))
    lowering = fewer_lanes(slots, held, in_step)
    if lowering is None:
        return
    fewer, moved, aside = lowering.slots, lowering.moved, lowering.set_aside
    assert fewer.lanes < lanes
    assert (fewer.contexts, fewer.spare, fewer.has_context) == (contexts, spare, has_context)
    assert in_step <= moved.keys(), "what the step reads or writes is kept"
    assert {slot for slot in held if slot not in moved} == set(aside), "what is not kept is set aside"
    assert held == [slot for slot in held if slot in moved or slot in aside]
    assert aside == [slot for slot in held if slot not in in_step][len(held) - len(aside) - len(in_step.intersection(held)) :], "the last"
    assert len(set(moved.values())) == len(moved), "no two in one slot"
    of_documents = {slot: new for slot, new in moved.items() if slot not in slots.of_contexts}
    assert set(of_documents.values()) <= {*fewer.of_lanes, *fewer.of_spare}
    assert len([slot for slot in held if slot in moved]) <= fewer.lanes
    assert moved.keys() - of_documents.keys() == (set(slots.of_contexts) if has_context else set())
    assert all(moved[slot] - fewer.lanes == slot - lanes for slot in moved.keys() - of_documents.keys())

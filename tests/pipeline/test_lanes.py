"""The book of documents inside the engine: tokens taken once, lanes lent and given back, nothing left behind."""

from __future__ import annotations

import numpy as np
import pytest
from fake_model import document, settings_of
from hypothesis import given
from hypothesis import strategies as st
from longscan.kernels.segments import NO_LANE
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.engine.lanes import Lanes
from longscan.pipeline.engine.opened import NO_TOKEN, Caller, OpenDocument, TokenQueue
from longscan.pipeline.engine.slots import Slots
from longscan.pipeline.engine.steps import Step
from longscan.pipeline.records import TokenBlock

FIRST_LANE = 2


def block(start: int, count: int, offsets: bool = True) -> TokenBlock:
    ids = np.arange(start, start + count, dtype=np.int32)
    places = ids.astype(np.int64)
    return TokenBlock(ids, *((3 * places, 3 * places + 2) if offsets else ()))


@given(st.lists(st.integers(0, 50)), st.data())
def test_tokens_come_out_as_they_went_in(blocks: list[int], data: st.DataObject) -> None:
    queue, total = TokenQueue(), sum(blocks)
    start = 0
    for count in blocks:
        queue.push(block(start, count))
        start += count
    taken = 0
    while queue.held:
        count = data.draw(st.integers(1, queue.held))
        part = queue.take(count)
        assert part.char_starts is not None
        assert part.char_ends is not None
        assert part.ids.tolist() == list(range(taken, taken + count))
        assert part.char_starts.tolist() == [3 * i for i in range(taken, taken + count)]
        assert part.char_ends.tolist() == [3 * i + 2 for i in range(taken, taken + count)]
        taken += count
        assert part.next_id == (NO_TOKEN if taken == total else taken)
    assert taken == total


def test_tokens_without_offsets() -> None:
    queue = TokenQueue()
    queue.push(block(0, 5, offsets=False))
    assert (queue.take(3).char_starts, queue.take(2).char_ends) == (None, None)


@pytest.fixture
def lanes() -> Lanes:
    return Lanes(settings_of(TaskConfig("embed"), lanes=2, step_tokens=256, segment_tokens=64), Slots(2))


@pytest.fixture
def caller() -> Caller:
    return Caller()


def admit(lanes: Lanes, caller: Caller, tokens: int, *, complete: bool = False) -> OpenDocument:
    opened = lanes.admit(caller, document(len(caller.documents)), None)
    lanes.push(opened, [block(0, tokens)], complete=complete)
    return opened


def entries(step: Step | None) -> list[tuple[int, int, int, int, bool]]:
    assert step is not None
    return [(e.entry.position, e.entry.num_tokens, e.entry.lane_in, e.entry.lane_out, e.entry.ends) for e in step.entries]


def test_a_document_starts_from_the_first_lane_and_leaves_its_own_unwritten(lanes: Lanes, caller: Caller) -> None:
    opened = admit(lanes, caller, 129)
    assert entries(lanes.next_step()) == [(0, 128, FIRST_LANE, 0, False)]
    lanes.push(opened, [block(129, 70)], complete=True)
    assert entries(lanes.next_step()) == [(128, 71, 0, NO_LANE, True)]
    assert lanes.next_step() is None


def test_a_freed_lane_is_taken_in_the_very_next_step(lanes: Lanes, caller: Caller) -> None:
    first = admit(lanes, caller, 65)
    admit(lanes, caller, 65)
    third = admit(lanes, caller, 65)
    assert [e[3] for e in entries(lanes.next_step())] == [0, 1], "the third waits for a lane"
    lanes.push(first, [], complete=True)
    assert entries(lanes.next_step()) == [(64, 1, 0, NO_LANE, True)]
    assert entries(lanes.next_step()) == [(0, 64, FIRST_LANE, 0, False)]
    assert third.place.lane == 0


def test_nothing_is_left_of_a_document_that_is_dropped(lanes: Lanes, caller: Caller) -> None:
    running, waiting = admit(lanes, caller, 200), admit(lanes, caller, 20)
    assert entries(lanes.next_step()) == [(0, 192, FIRST_LANE, 0, False)]
    lanes.push(running, [block(200, 100)], complete=False)
    assert (lanes.ready_rows, caller.held_tokens) == (64, 128)
    for opened in (running, waiting, running):
        lanes.drop(opened)
        assert opened.gone
    assert (lanes.ready_rows, caller.held_tokens, caller.documents) == (0, 0, set())
    assert lanes.next_step() is None
    assert [e[3] for e in entries(_two_more(lanes, caller))] == [1, 0], "both lanes are free"


def _two_more(lanes: Lanes, caller: Caller) -> Step | None:
    admit(lanes, caller, 65)
    admit(lanes, caller, 65)
    return lanes.next_step()


@pytest.mark.parametrize("estimated", [64 * 24, 64 * 20, 0])
def test_a_giant_among_many_is_done_when_they_are(lanes: Lanes, caller: Caller, estimated: int) -> None:
    """Of four segments a step it has one in each, as long as it is known to be long; as little as there is known, it does not come last."""
    giant = lanes.admit(caller, document(0), None, estimated_tokens=estimated)
    lanes.push(giant, [block(0, 64 * 24)], complete=estimated == 0)
    for _ in range(60):
        admit(lanes, caller, 64, complete=True)
    assert giant.place.long
    served = []
    while (step := lanes.next_step()) is not None:
        served.append({e.document is giant: e.entry.num_tokens for e in step.entries})
        if giant.place.position == 64 * 12:
            lanes.push(giant, [], complete=True)
    with_giant = [n for n, taken in enumerate(served) if True in taken]
    assert with_giant[:20] == list(range(20)), "its last four segments are no more than a step"
    assert served[0] == {True: 64, False: 64}
    assert sum(False not in taken for taken in served) <= 1


def test_documents_of_little_more_than_a_step_end_as_others_begin(caller: Caller) -> None:
    """In steps of one segment: were each first while it is long, all would wait for their last tokens, each with its lane."""
    lanes = Lanes(settings_of(TaskConfig("embed"), lanes=20, step_tokens=64, segment_tokens=64), Slots(20))
    opened: list[OpenDocument] = []
    for _ in range(60):
        while sum(not document.place.position for document in opened) < 3:
            opened.append(admit(lanes, caller, 70, complete=True))
            assert opened[-1].place.long
        lanes.next_step()
        assert sum(document.place.lane != NO_LANE for document in opened) <= 3
    assert len(opened) > 30


def test_how_long_a_document_is_yet_is_known_as_it_goes_on(lanes: Lanes, caller: Caller) -> None:
    opened = lanes.admit(caller, document(0), None, estimated_tokens=600)
    lanes.push(opened, [block(0, 65)], complete=False)
    assert opened.place.long, "600 of 256 a step"
    lanes.push(opened, [block(65, 280)], complete=False)
    lanes.next_step()
    assert (opened.place.position, opened.place.long) == (256, True), "344 by estimate"
    lanes.push(opened, [block(345, 104)], complete=False)
    lanes.next_step()
    assert (opened.place.position, opened.place.long) == (448, False), "152 by estimate"
    lanes.push(opened, [block(449, 600)], complete=False)
    assert opened.place.long, "there are more than was thought"
    lanes.push(opened, [], complete=True)
    assert opened.place.long
    while lanes.next_step() is not None:
        pass
    assert not caller.held_tokens


def test_totals(lanes: Lanes, caller: Caller) -> None:
    assert lanes.totals.waste == 0.0
    admit(lanes, caller, 65, complete=True)
    lanes.next_step()
    admit(lanes, caller, 64, complete=True)
    lanes.next_step()
    assert (lanes.totals.steps, lanes.totals.tokens, lanes.totals.rows) == (2, 129, 192)
    assert lanes.totals.waste == pytest.approx(63 / 192)

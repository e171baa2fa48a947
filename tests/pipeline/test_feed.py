"""Callers that feed one engine: how far each is ahead, and when each is through."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from fake_model import CountingModel, engine_of, settings_of, stream
from longscan.kernels.segments import Segments
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.engine.feed import STEPS_AHEAD, Feed
from longscan.pipeline.engine.lanes import Lanes
from longscan.pipeline.engine.opened import Caller
from longscan.pipeline.engine.rows import RowMaker
from longscan.pipeline.engine.slots import Slots
from waiting import HANG_S, until

STEP, LENGTH, STEPS_EACH = 512, 64, 40


def through_at(before: Sequence[int] | None = None) -> list[int]:
    """The step in which each of four callers, of as much work each, has its last document; `before` is what they are told, if given."""
    settings = settings_of(TaskConfig("embed"), lanes=8, step_tokens=STEP, segment_tokens=LENGTH)
    lanes, maker = Lanes(settings, Slots(8)), RowMaker(settings)
    feeds = []
    for n in range(4):
        documents = range(n * 1000, n * 1000 + STEPS_EACH * STEP // LENGTH)
        feeds.append(Feed(Caller(), iter([stream(ordinal, [1] * LENGTH) for ordinal in documents]), lanes, maker, None))
    ends = [0] * 4
    step_number = 0
    while True:
        for n, feed in enumerate(feeds):
            bringing = sum(not earlier.caller.fed for earlier in feeds[:n]) if before is None else before[n]
            while (pull := feed.choose(bringing)) is not None:
                feed.give(pull())
            assert feed.caller.held_tokens <= STEPS_AHEAD[bringing] * STEP + STEP // 4
        step = lanes.next_step()
        if step is None:
            return ends
        step_number += 1
        assert step.num_tokens == STEP, "no step waits for anybody"
        for entry in step.entries:
            entry.document.caller.documents.discard(entry.document)
            ends[[feed.caller for feed in feeds].index(entry.document.caller)] = step_number


def test_callers_that_begin_together_end_one_after_the_other() -> None:
    ends = through_at()
    assert ends == sorted(ends)
    assert ends[-1] == 4 * STEPS_EACH
    assert min(after - before for before, after in pairwise(ends)) >= STEPS_EACH // 4


@pytest.mark.parametrize("before", [0, 3])
def test_callers_alike_would_end_together(before: int) -> None:
    ends = through_at([before] * 4)
    assert max(ends) - min(ends) <= 4 * STEPS_AHEAD[before]


def test_callers_of_an_engine_are_ahead_by_how_many_began_before_and_still_bring_some() -> None:
    """While the device is busy all come to a rest; the second has brought all, so the third is ahead as one that began second."""
    gate = threading.Event()

    class Held(CountingModel):
        def step(self, ids_T: torch.Tensor, segments: Segments, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            assert gate.wait(HANG_S)
            return super().step(ids_T, segments, state)

    with engine_of(Held(), TaskConfig("embed"), lanes=8, step_tokens=STEP, segment_tokens=LENGTH) as one, ThreadPoolExecutor(5) as pool:
        try:
            # The step that is held back has taken its tokens before the callers that are looked at begin.
            rows = [pool.submit(lambda: list(one.process([stream(0, [1] * LENGTH)])))]
            until(lambda: one.under_way[0])
            for n, documents in enumerate([200, 1, 200, 200]):
                streams = [stream(1000 * (n + 1) + ordinal, [1] * LENGTH) for ordinal in range(documents)]
                rows.append(pool.submit(lambda given: list(one.process(given)), streams))
                until(lambda n=n: len(one._callers) == n + 2 and one._callers[-1].idle)
            assert [caller.fed for caller in one._callers] == [True, False, True, False, False]
            held = [caller.held_tokens // STEP for caller in one._callers]
            assert [held[1], held[3], held[4]] == list(STEPS_AHEAD[:3])
        finally:
            gate.set()
        assert [len(found.result()) for found in rows] == [1, 200, 1, 200, 200]


def of_one_giant() -> tuple[Feed, Lanes]:
    settings = settings_of(TaskConfig("embed"), lanes=8, step_tokens=STEP, segment_tokens=LENGTH)
    lanes = Lanes(settings, Slots(8))
    return Feed(Caller(), iter([stream(0, [1] * 20 * STEP, block=100)]), lanes, RowMaker(settings), None), lanes


def test_a_document_is_known_to_be_long_from_its_first_tokens_on() -> None:
    feed, _ = of_one_giant()
    pull = feed.choose()
    assert pull is not None
    feed.give(pull())
    (opened,) = feed.caller.documents
    assert (opened.tokens.held, opened.place.long) == (100, True)


def test_who_has_no_more_since_its_last_document_was_given_up_has_brought_all() -> None:
    """As where a vector of it does not fit into float16, while others are still on the device: nobody waits for more of such a caller."""
    feed, lanes = of_one_giant()
    while (pull := feed.choose()) is not None:
        feed.give(pull())
    (opened,) = feed.caller.documents
    assert not feed.caller.fed
    lanes.drop(opened)
    assert feed.choose() is None
    assert feed.caller.fed

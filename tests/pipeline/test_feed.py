"""Callers that feed one engine: how far each is ahead, and when each is through."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from fake_model import settings_of, stream
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.engine.feed import STEPS_AHEAD, Feed
from longscan.pipeline.engine.lanes import Lanes
from longscan.pipeline.engine.opened import Caller
from longscan.pipeline.engine.rows import RowMaker
from longscan.pipeline.engine.slots import Slots

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

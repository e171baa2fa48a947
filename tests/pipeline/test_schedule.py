"""Each token once, in order, in its own segments; no lane twice; nobody starves; no step too long."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from longscan.kernels.segments import NO_LANE, TILE
from longscan.pipeline.engine.schedule import Assignment, Candidate, StepPlan, check_sizes, plan_step, ready_tokens
from longscan.pipeline.errors import ConfigError


@dataclass
class Case:
    """A queue of documents, and how many tokens reach the engine between two steps."""

    lengths: list[int]
    lanes: int
    segment_tokens: int
    step_tokens: int
    inflow: list[int]
    """Tokens that arrive for each open document before a step, in turn; documents arrive one a step where it is 0."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    segment = TILE * draw(st.integers(1, 3))
    step = draw(st.integers(segment // TILE, 12)) * TILE
    lengths = draw(st.lists(st.one_of(st.integers(1, 2 * segment + 1), st.integers(1, 20 * segment)), min_size=1, max_size=25))
    inflow = draw(st.lists(st.integers(0, 2 * step), min_size=1, max_size=8).filter(any))
    return Case(lengths, draw(st.integers(1, 6)), segment, step, inflow)


@dataclass
class Simulation:
    """The engine's bookkeeping around `plan_step`, with counts in place of tokens."""

    case: Case
    constant_shape: bool = False
    long_first: bool = False
    """Documents that would fill more than a step by themselves say so, as they do in the engine."""
    plans: list[StepPlan] = field(default_factory=list)
    entries: dict[int, list[Assignment]] = field(default_factory=dict)
    waited: int = 0
    """Most steps in a row that a document sat ready, with a lane or a free lane, and had no entry."""

    def run(self) -> Simulation:
        case = self.case
        arrived = [0] * len(case.lengths)
        candidates = {key: Candidate(key, 0) for key in range(len(case.lengths))}
        free = list(range(case.lanes))
        idle = dict.fromkeys(candidates, 0)
        step = 0
        while candidates:
            step += 1
            assert step < 10_000, "no progress"
            inflow = case.inflow[step % len(case.inflow)]
            for key, c in candidates.items():
                arrived[key] = min(case.lengths[key], arrived[key] + inflow)
                c.complete = arrived[key] == case.lengths[key]
                c.ready = ready_tokens(arrived[key] - c.position, c.complete, case.segment_tokens)
                c.long = self.long_first and case.lengths[key] - c.position > case.step_tokens
            plan = plan_step(
                candidates.values(),
                free,
                step_tokens=case.step_tokens,
                segment_tokens=case.segment_tokens,
                constant_shape=self.constant_shape,
            )
            self.check_lanes(plan, candidates, free)
            served = {a.key for a in plan.assignments}
            for key, c in candidates.items():
                left_out = c.ready and key not in served and (c.lane != NO_LANE or free)
                idle[key] = idle[key] + 1 if left_out else 0
                self.waited = max(self.waited, idle[key])
            for a in plan.assignments:
                self.entries.setdefault(a.key, []).append(a)
                c = candidates[a.key]
                if c.lane == NO_LANE and a.lane != NO_LANE:
                    free.remove(a.lane)
                c.lane, c.position, c.last_served = a.lane, c.position + a.num_tokens, step
                if a.ends:
                    free.extend([a.lane] if a.lane != NO_LANE else [])
                    del candidates[a.key]
            self.plans.append(plan)
        assert sorted(free) == list(range(case.lanes)), "a lane was lost"
        return self

    def check_lanes(self, plan: StepPlan, candidates: dict[int, Candidate], free: list[int]) -> None:
        lanes = [a.lane for a in plan.assignments if a.lane != NO_LANE]
        assert len(set(lanes)) == len(lanes), "a lane twice in one step"
        for a in plan.assignments:
            held = candidates[a.key].lane
            assert a.position == candidates[a.key].position
            if held != NO_LANE:
                assert a.lane == held, "a document changed its lane"
            elif a.ends:
                assert a.lane == NO_LANE, "a lane for a document that begins and ends in the step"
            else:
                assert a.lane in free, "a lane that another document holds"


@given(cases(), st.booleans())
@settings(deadline=None)
def test_each_token_is_scheduled_once_in_order_in_whole_segments(case: Case, long_first: bool) -> None:
    entries = Simulation(case, long_first=long_first).run().entries
    for key, length in enumerate(case.lengths):
        position = 0
        for a in entries[key]:
            assert a.position == position
            assert a.num_tokens > 0
            position += a.num_tokens
            assert a.ends == (position == length)
            assert a.ends or a.num_tokens % case.segment_tokens == 0
        assert position == length


@given(cases(), st.booleans(), st.booleans())
@settings(deadline=None)
def test_a_step_holds_what_it_says_and_no_more(case: Case, constant_shape: bool, long_first: bool) -> None:
    for plan in Simulation(case, constant_shape, long_first).run().plans:
        end = 0
        for a in plan.assignments:
            assert a.first_tile == end, "entries lie end to end"
            end += -(-a.num_tokens // TILE)
        assert plan.used_tiles == end <= case.step_tokens // TILE
        assert plan.num_tiles == (case.step_tokens // TILE if constant_shape and plan.assignments else end)
        rows = plan.num_tiles * TILE
        assert rows * plan.waste == pytest.approx(rows - plan.num_tokens)


@given(cases())
@settings(deadline=None)
def test_nobody_who_could_go_waits_longer_than_one_round_of_all(case: Case) -> None:
    """In the worst case every other document is served one segment, or all it holds without a lane, before this one."""
    simulation = Simulation(case).run()
    segments_a_step = case.step_tokens // case.segment_tokens
    whole = -(-max(case.lengths) // case.segment_tokens)
    assert simulation.waited <= (len(case.lengths) * min(whole, segments_a_step)) // segments_a_step + 1


@given(cases())
@settings(deadline=None)
def test_with_long_ones_first_nobody_waits_more_than_twice_as_long(case: Case) -> None:
    """Of a step's segments half at most are for those that come first."""
    simulation = Simulation(case, long_first=True).run()
    segments_a_step = case.step_tokens // case.segment_tokens
    whole = -(-max(case.lengths) // case.segment_tokens)
    shared = segments_a_step - segments_a_step // 2
    assert simulation.waited <= (len(case.lengths) * min(whole, segments_a_step)) // shared + 1


def candidates(*documents: tuple[int, bool, int], last_served: int = 0) -> list[Candidate]:
    return [Candidate(key, last_served, 0, ready, complete, lane) for key, (ready, complete, lane) in enumerate(documents)]


def plan(documents: list[Candidate], free: list[int], step_tokens: int = 512, segment_tokens: int = 128) -> list[tuple[int, int, int]]:
    entries = plan_step(documents, free, step_tokens=step_tokens, segment_tokens=segment_tokens).assignments
    return [(a.key, a.num_tokens, a.lane) for a in entries]


def test_a_giant_alone_fills_the_step_with_one_entry() -> None:
    assert plan(candidates((12_800, False, 3)), [0]) == [(0, 512, 3)]


def test_a_giant_shares_the_step_with_the_many() -> None:
    many = candidates((12_800, False, 3), *[(100, True, NO_LANE)] * 9)
    assert plan(many, [0]) == [(0, 128, 3), (1, 100, NO_LANE), (2, 100, NO_LANE), (3, 100, NO_LANE)]


def test_what_was_left_out_leads_the_next_step() -> None:
    giant, *rest = candidates((12_800, False, 3), *[(100, True, NO_LANE)] * 4, last_served=0)
    giant.last_served = 1
    assert [key for key, _, _ in plan([giant, *rest], [])] == [1, 2, 3, 4]


def test_one_that_would_be_left_alone_is_in_every_step() -> None:
    giant, *many = candidates((12_800, False, 3), *[(100, True, NO_LANE)] * 9)
    giant.last_served, giant.long = 7, True
    assert plan([*many, giant], []) == [(0, 128, 3), (1, 100, NO_LANE), (2, 100, NO_LANE), (3, 100, NO_LANE)]
    other, *_ = candidates((12_800, False, 2), last_served=6)
    other.key, other.long = 20, True
    assert [key for key, _, _ in plan([*many, giant, other], [])] == [20, 0, 1, 2], "the long ones in turn"


def test_long_ones_leave_half_of_a_step_to_the_others() -> None:
    """However many they are: one that is no longer long would wait for them all, with its lane."""
    ending, *long = candidates((100, True, 9), *[(12_800, False, lane) for lane in range(6)], last_served=7)
    ending.last_served = 8
    for n, c in enumerate(long):
        c.long, c.last_served = True, n + 2
    assert [key for key, _, _ in plan([ending, *long], [])] == [1, 2, 3, 4]
    ending.last_served = 3
    assert [key for key, _, _ in plan([ending, *long], [])] == [1, 2, 0, 3]
    assert [key for key, _, _ in plan([ending, *long], [], step_tokens=128)] == [1], "one segment a step goes to whose turn it is"
    ending.last_served = 1
    assert [key for key, _, _ in plan([ending, *long], [], step_tokens=128)] == [0]


def test_a_long_one_that_has_no_lane_yet_keeps_no_other_from_coming_first() -> None:
    new, giant, *many = candidates((12_800, False, NO_LANE), (12_800, False, 3), *[(100, True, NO_LANE)] * 9)
    new.long, giant.long, giant.last_served = True, True, 7
    assert [key for key, _, _ in plan([new, giant, *many], [], step_tokens=256)] == [1, 2]
    assert [key for key, _, _ in plan([new, giant, *many], [5], step_tokens=256)] == [1, 0]


def test_a_short_document_overtakes_one_that_waits_for_a_lane() -> None:
    assert plan(candidates((512, False, NO_LANE), (70, True, NO_LANE)), []) == [(1, 70, NO_LANE)]
    assert plan(candidates((512, False, NO_LANE), (512, False, NO_LANE)), [5]) == [(0, 512, 5)]


def test_a_document_that_fits_whole_needs_no_lane() -> None:
    assert plan(candidates((300, True, NO_LANE)), []) == [(0, 300, NO_LANE)]
    assert plan(candidates((300, True, NO_LANE)), [0]) == [(0, 300, NO_LANE)]
    assert plan(candidates((600, True, NO_LANE)), []) == []
    assert plan(candidates((600, True, NO_LANE)), [4]) == [(0, 512, 4)]


def test_a_lane_kept_for_one_that_then_ends_serves_another() -> None:
    """The first is granted one segment and the lane, then its end: the second takes the lane in the same step."""
    assert plan(candidates((200, True, NO_LANE), (256, False, NO_LANE)), [7]) == [(0, 200, NO_LANE), (1, 256, 7)]


def test_an_empty_step_has_no_shape() -> None:
    step = plan_step([], [0], step_tokens=512, segment_tokens=128, constant_shape=True)
    assert (step.assignments, step.num_tiles, step.waste) == ((), 0, 0.0)


@pytest.mark.parametrize(
    ("held", "complete", "expected"),
    [(0, False, 0), (0, True, 0), (1, True, 1), (128, False, 0), (129, False, 128), (128, True, 128), (300, False, 256), (300, True, 300)],
)
def test_a_segment_goes_once_the_token_after_it_is_known(held: int, complete: bool, expected: int) -> None:
    assert ready_tokens(held, complete, 128) == expected


@pytest.mark.parametrize(
    ("lanes", "step_tokens", "segment_tokens", "key"),
    [
        (4, 100, 64, "engine.step_tokens"),
        (4, 0, 64, "engine.step_tokens"),
        (4, 128, 96, "engine.segment_tokens"),
        (4, 128, -64, "engine.segment_tokens"),
        (4, 128, 256, "engine.segment_tokens"),
        (0, 256, 128, "engine.lanes"),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_key(lanes: int, step_tokens: int, segment_tokens: int, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        check_sizes(lanes=lanes, step_tokens=step_tokens, segment_tokens=segment_tokens)


def test_sizes_that_work_are_accepted() -> None:
    check_sizes(lanes=1, step_tokens=64, segment_tokens=64)
    check_sizes(lanes=64, step_tokens=65_536, segment_tokens=8192)

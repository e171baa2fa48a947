"""The end of a run: the longest documents begin first, and what it costs where they do, or cannot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from longscan.pipeline.engine.feed import STEPS_AHEAD
from longscan.pipeline.plan.planner import make_plan
from longscan.pipeline.plan.tail import Giants, Pace, foresee, giants, longest_first, row_tokens
from longscan.pipeline.shards import Piece, RowGroup, Shard, SourceFile

FILE = SourceFile("/x", "x", 1, "v", ())


def shard(index: int, tokens: int, rows: int = 1) -> Shard:
    return Shard(index, 100, (Piece(FILE, index, 0, rows, 0),), tokens)


def test_a_giant_in_the_last_shard_begins_first() -> None:
    groups = [RowGroup(1000, 2_000_000)] * 8 + [RowGroup(1, 40_000_000)]
    plan = make_plan([SourceFile("/x", "x", 1, "v", tuple(groups))], shard_tokens=500_000)
    order = longest_first(plan.chains())
    assert [chain[0].index for chain in order] == [8, *range(8)]
    # Ten million tokens in one document, behind four in eight shards, or before them.
    late, early = (foresee(chains, 2, Pace(1000.0, 1000.0), at_once=1) for chains in (plan.chains(), order))
    assert (late.whole_seconds, late.seconds, late.lost_seconds) == (12_000, 10_000, 5_000)
    assert (early.whole_seconds, early.seconds, early.lost_seconds) == (10_000, 6_000, 3_000)
    with_others = foresee(order, 2, Pace(1000.0, 1000.0))
    assert with_others.whole_seconds == pytest.approx(11_500, abs=501), "three of the others, or one fewer or more, are its worker's"


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_sixteen_shards_a_worker_end_well(workers: int) -> None:
    """They end one after the other, so that hands fall free one at a time: as if each worker had one."""
    sizes = np.random.default_rng(workers).integers(900, 1100, 16 * workers)
    chains = [(shard(n, int(tokens)),) for n, tokens in enumerate(sizes)]
    four, one = (foresee(chains, workers, Pace(1000.0, 1000.0), at_once) for at_once in (4, 1))
    assert four.lost_seconds < 0.03 * four.whole_seconds
    assert four.lost_seconds < one.lost_seconds + 0.5


def test_older_chains_get_more_of_their_worker() -> None:
    chains = [(shard(0, 2000),), (shard(1, 6000),), (shard(2, 4000),)]
    tail = foresee(chains, 1, Pace(1000.0, 1000.0), at_once=2)
    assert (tail.whole_seconds, tail.seconds, tail.lost_seconds) == pytest.approx((12, 0, 0))
    # 6 and 5 seconds side by side, at 6 to 5, are both done at 11; the 5.4 of the other worker at 9.9, who then takes the last.
    late = [(shard(n, tokens),) for n, tokens in enumerate((6000, 5400, 5000, 7000, 100_000))]
    assert (STEPS_AHEAD[0], STEPS_AHEAD[1]) == (6, 5)
    tail = foresee(late, 2, Pace(1000.0, 1000.0), at_once=2)
    assert (tail.whole_seconds, tail.seconds) == pytest.approx((112.4, 101.4))


def test_giants_are_those_that_are_long_beside_all_that_a_worker_does() -> None:
    short = [RowGroup(100, 1000)] * 70
    file = SourceFile("/x", "x", 1, "v", (*short, RowGroup(0, 0), RowGroup(1, 10_000), RowGroup(2, 20_000)))
    assert giants([file], 1) == Giants(0, 0.0), "10,000 of 100,000"
    assert giants([file], 2) == Giants(2, 0.4), "three of 10,000, for workers of 50,000"
    assert giants([file, file], 2) == Giants(0, 0.0)
    assert giants([file], 2, limit=7002) == Giants(1, pytest.approx(10_000 / 45_000))
    assert giants([file], 2, limit=7000) == Giants(0, 0.0)
    assert giants([file], 100, limit=7001) == Giants(1, 1.0), "its worker does nothing else"
    assert giants([], 1) == Giants(0, 0.0)
    assert giants([SourceFile("/x", "x", 1, "v", (RowGroup(1, 0),))], 1) == Giants(0, 0.0)


def test_similar_lengths_keep_their_order() -> None:
    chains = [(shard(0, 1100, 10),), (shard(1, 1200, 10),), (shard(2, 900, 1),), (shard(3, 800, 1), shard(4, 10, 10)), (shard(5, 0, 10),)]
    assert [chain[0].index for chain in longest_first(chains)] == [2, 3, 0, 1, 5]
    assert row_tokens(chains[3]) == 800


def test_a_document_alone_is_as_slow_as_one_alone() -> None:
    tail = foresee([(shard(0, 8000),), (shard(1, 4000, 40),)], 2, Pace(1000.0, 500.0))
    assert (tail.whole_seconds, tail.seconds) == (16, 12)


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 1000)), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 6))
def test_an_end_adds_up(sizes: list[tuple[int, int]], workers: int, at_once: int) -> None:
    chains = longest_first([(shard(n, tokens, rows),) for n, (tokens, rows) in enumerate(sizes)])
    assert sorted(chain[0].index for chain in chains) == list(range(len(sizes)))
    tail = foresee(chains, workers, Pace(1e6, 1e6), at_once)
    even = sum(tokens for tokens, _ in sizes) / 1e6 / workers
    assert tail.whole_seconds == pytest.approx(even + tail.lost_seconds, abs=1e-6)
    assert -1e-6 <= tail.lost_seconds <= tail.seconds + 1e-6
    assert tail.whole_seconds <= even + at_once * max(tokens for tokens, _ in sizes) / 1e6 + 1e-6


@pytest.mark.parametrize(
    ("pace", "seconds"),
    [
        (Pace(100.0, 100.0), 10),
        (Pace(100.0, 100.0, scale=1.5), 15),
        (Pace(100.0, 100.0, padding_s=0.5), 20),
        (Pace(100.0, 100.0, token_s=0.001, document_s=0.1), 10 + 1 + 2),
        (Pace(100.0, 100.0, token_s=0.001, document_s=0.1, beside=True), 10),
        (Pace(100.0, 100.0, token_s=0.02, beside=True), 20),
    ],
)
def test_what_a_shard_takes(pace: Pace, seconds: float) -> None:
    assert pace.seconds(shard(0, 1000, 20)) == pytest.approx(seconds)

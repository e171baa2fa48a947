"""The end of a run: the longest documents begin first, and what it costs where they do, or cannot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from longscan.pipeline.plan.planner import make_plan
from longscan.pipeline.plan.tail import Pace, foresee, longest_first, row_tokens
from longscan.pipeline.shards import Piece, RowGroup, Shard, SourceFile

FILE = SourceFile("/x", "x", 1, "v", ())


def shard(index: int, tokens: int, rows: int = 1) -> Shard:
    return Shard(index, 100, (Piece(FILE, index, 0, rows, 0),), tokens)


def test_a_giant_in_the_last_shard_begins_first() -> None:
    groups = [RowGroup(1000, 2_000_000)] * 8 + [RowGroup(1, 40_000_000)]
    plan = make_plan([SourceFile("/x", "x", 1, "v", tuple(groups))], shard_tokens=500_000)
    order = longest_first(plan.chains())
    assert [chain[0].index for chain in order] == [8, *range(8)]
    late, early = (foresee(chains, 2, Pace(1000.0, 1000.0)) for chains in (plan.chains(), order))
    # Ten million tokens in one document beside four in eight shards.
    assert (late.whole_seconds, late.seconds, late.lost_seconds) == (12_000, 10_000, 5_000)
    assert (early.whole_seconds, early.seconds, early.lost_seconds) == (10_000, 6_000, 3_000)


def test_similar_lengths_keep_their_order() -> None:
    chains = [(shard(0, 1100, 10),), (shard(1, 1200, 10),), (shard(2, 900, 1),), (shard(3, 800, 1), shard(4, 10, 10)), (shard(5, 0, 10),)]
    assert [chain[0].index for chain in longest_first(chains)] == [2, 3, 0, 1, 5]
    assert row_tokens(chains[3]) == 800


def test_a_document_alone_is_as_slow_as_one_alone() -> None:
    tail = foresee([(shard(0, 8000),), (shard(1, 4000, 40),)], 2, Pace(1000.0, 500.0))
    assert (tail.whole_seconds, tail.seconds) == (16, 12)


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 1000)), min_size=1, max_size=40), st.integers(1, 9))
def test_an_end_adds_up(sizes: list[tuple[int, int]], workers: int) -> None:
    chains = longest_first([(shard(n, tokens, rows),) for n, (tokens, rows) in enumerate(sizes)])
    assert sorted(chain[0].index for chain in chains) == list(range(len(sizes)))
    tail = foresee(chains, workers, Pace(1e6, 1e6))
    even = sum(tokens for tokens, _ in sizes) / 1e6 / workers
    assert tail.whole_seconds == pytest.approx(even + tail.lost_seconds, abs=1e-6)
    assert -1e-6 <= tail.lost_seconds <= tail.seconds + 1e-6
    assert tail.whole_seconds <= even + max(tokens for tokens, _ in sizes) / 1e6 + 1e-6


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

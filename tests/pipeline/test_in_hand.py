"""How many shards a worker on Ray takes at once."""

from __future__ import annotations

import pytest
from longscan.pipeline.cluster.pool import in_hand
from longscan.pipeline.plan.nodes import Workers


@pytest.mark.parametrize(
    ("chains", "least", "taken"), [(1, 2, 1), (3, 2, 2), (4, 2, 2), (5, 2, 3), (8, 2, 4), (9, 2, 4), (1000, 2, 4), (3, 1, 3), (4, 8, 1)]
)
def test_a_worker_leaves_the_others_their_part_of_few_shards(chains: int, least: int, taken: int) -> None:
    assert in_hand(chains, Workers(least, 8, 1, 0.0)) == taken

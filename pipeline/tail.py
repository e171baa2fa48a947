"""The end of a run, when not all workers have work any more: what begins first, and what the end will cost. Pure.

What is known of lengths before anything is read is a shard's tokens and rows. A document of more than a shard has a shard of its
own where it has a row group of its own, so giants are seen; one among many short rows of a row group is not.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from longscan.pipeline.shards import Shard

Chain = tuple[Shard, ...]


def row_tokens(chain: Chain) -> int:
    """Mean tokens of a row, of the shard whose rows are the longest."""
    return max((shard.estimated_tokens // max(shard.num_rows, 1) for shard in chain), default=0)


def longest_first(chains: Sequence[Chain]) -> list[Chain]:
    """Those of the longest documents begin first; of lengths within a factor of two, in the order in which they come."""
    return sorted(chains, key=lambda chain: -row_tokens(chain).bit_length())


@dataclass(frozen=True, slots=True)
class Tail:
    """Of a run whose chains are taken one after the other, by whoever is free."""

    seconds: float
    """From when the first worker has nothing left to do until the last one is done."""
    whole_seconds: float
    """Of the whole run."""
    lost_seconds: float
    """By which it is longer than if all work were spread evenly."""
    longest_tokens: int
    """Of a document, as far as is known: the largest mean of a shard's rows."""
    longest_seconds: float
    """Of that document alone: a run is never shorter, however many workers it has."""


def foresee(chains: Sequence[Chain], workers: int, speed: float, alone: float) -> Tail:
    """What the end of a run over `chains`, in their order, will cost.

    speed: tokens a second of a worker that has many documents; alone: of one that has a single one.
    """
    free = [0.0] * workers
    for chain in chains:
        tokens = sum(shard.estimated_tokens for shard in chain)
        slowest = max((s.estimated_tokens / alone for s in chain if s.num_rows == 1), default=0.0)
        heapq.heappush(free, heapq.heappop(free) + max(tokens / speed, slowest))
    total = sum(shard.estimated_tokens for chain in chains for shard in chain)
    longest = max((row_tokens(chain) for chain in chains), default=0)
    whole = max(free)
    return Tail(whole - min(free), whole, whole - total / speed / workers, longest, longest / alone)

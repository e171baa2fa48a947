"""The end of a run, when not all workers have work any more: what begins first, and what the end will cost. Pure.

What is known of lengths before anything is read is a shard's tokens and rows. A document of more than a shard has a shard of its
own where it has a row group of its own, so giants are seen; one among many short rows of a row group is not (`sample` looks for those).
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
class Pace:
    """What tokens and documents take in a worker."""

    speed: float
    """Tokens a second through the model, of many documents side by side."""
    alone: float
    """Of a single one."""
    scale: float = 1.0
    """Tokens there are for each that the plan estimates."""
    padding_s: float = 0.0
    """Of the model, a document, for what its last tile holds beside its tokens."""
    token_s: float = 0.0
    document_s: float = 0.0
    """Of the host, a token and a document."""
    beside: bool = False
    """The host's work is done while the device computes; else it takes the same cores."""

    def tokens(self, shard: Shard) -> float:
        return shard.estimated_tokens * self.scale

    def seconds(self, shard: Shard) -> float:
        tokens = self.tokens(shard)
        device = tokens / self.speed + shard.num_rows * self.padding_s
        host = tokens * self.token_s + shard.num_rows * self.document_s
        return max(device, host) if self.beside else device + host


@dataclass(frozen=True, slots=True)
class Tail:
    """Of a run whose chains are taken one after the other, by whoever is free."""

    seconds: float
    """From when the first worker has nothing left to do until the last one is done."""
    whole_seconds: float
    """Of the whole run."""
    lost_seconds: float
    """By which it is longer than if all work were spread evenly."""


def foresee(chains: Sequence[Chain], workers: int, pace: Pace) -> Tail:
    """What the end of a run over `chains`, in their order, will cost."""
    free = [0.0] * workers
    total = 0.0
    for chain in chains:
        seconds = sum(map(pace.seconds, chain))
        slowest = max((pace.tokens(shard) / pace.alone for shard in chain if shard.num_rows == 1), default=0.0)
        heapq.heappush(free, heapq.heappop(free) + max(seconds, slowest))
        total += seconds
    whole = max(free)
    return Tail(whole - min(free), whole, whole - total / workers)

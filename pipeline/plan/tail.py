"""The end of a run, when not all workers have work any more: what begins first, who will be left, and what the end will cost. Pure.

What is known of lengths before anything is read is a shard's tokens and rows. A document of more than a shard has a shard of its
own where it has a row group of its own, so giants are seen; one among many short rows of a row group is not (`sample` looks for those).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from longscan.pipeline.engine.feed import STEPS_AHEAD
from longscan.pipeline.shards import SHARDS_AT_ONCE, Shard, SourceFile

Chain = tuple[Shard, ...]

GIANT_SHARE = 1 / 8
"""Of what a worker does: a document of more is no longer short beside all others together."""


def row_tokens(chain: Chain) -> int:
    """Mean tokens of a row, of the shard whose rows are the longest."""
    return max((shard.estimated_tokens // max(shard.num_rows, 1) for shard in chain), default=0)


def longest_first(chains: Sequence[Chain]) -> list[Chain]:
    """Those of the longest documents begin first; of lengths within a factor of two, in the order in which they come."""
    return sorted(chains, key=lambda chain: -row_tokens(chain).bit_length())


@dataclass(frozen=True, slots=True)
class Giants:
    """Documents each of which is a good part of all that one worker will do."""

    rows: int
    """Of them, one worker's."""
    share: float
    """What these are of all that it will do."""


def giants(files: Sequence[SourceFile], workers: int, limit: int | None = None) -> Giants:
    """Those of more than GIANT_SHARE of a worker's part of `files`, by the means of row groups. limit: only the first rows count."""
    groups: list[tuple[int, float]] = []
    left = limit
    for group in (group for file in files for group in file.row_groups if group.num_rows):
        rows = group.num_rows if left is None else min(group.num_rows, left)
        left = None if left is None else left - rows
        groups.append((rows, group.num_bytes * rows / group.num_rows))
    total = sum(num_bytes for _, num_bytes in groups)
    large = [(rows, num_bytes) for rows, num_bytes in groups if num_bytes * workers > rows * total * GIANT_SHARE]
    if not large:
        return Giants(0, 0.0)
    rows = sum(rows for rows, _ in large)
    mean, each = sum(num_bytes for _, num_bytes in large) / rows, -(-rows // workers)
    return Giants(each, min(1.0, each * mean * workers / total))


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
    """Of a run whose chains are taken in their order, by whoever has a hand free."""

    seconds: float
    """From when the first worker has nothing left to do until the last one is done."""
    whole_seconds: float
    """Of the whole run."""
    lost_seconds: float
    """By which it is longer than if all work were spread evenly."""


@dataclass(slots=True)
class _Hands:
    """What one worker is at: its engine takes more of the chains that it has longer."""

    now: float = 0.0
    left: list[float] = field(default_factory=list)
    """Seconds of the worker that each chain in hand takes yet, the oldest first."""

    def take(self, now: float, seconds: float) -> None:
        self._go_on(now)
        self.left.append(seconds)

    @property
    def next_end(self) -> float:
        return self.now + min(left / share for left, share in zip(self.left, self._shares, strict=True))

    def finish(self) -> None:
        """The chain that is done first is done."""
        first = min(range(len(self.left)), key=lambda n: self.left[n] / self._shares[n])
        self._go_on(self.next_end)
        del self.left[first]

    @property
    def _shares(self) -> list[float]:
        ahead = [STEPS_AHEAD[min(before, len(STEPS_AHEAD) - 1)] for before in range(len(self.left))]
        return [steps / sum(ahead) for steps in ahead]

    def _go_on(self, now: float) -> None:
        self.left = [left - (now - self.now) * share for left, share in zip(self.left, self._shares, strict=True)]
        self.now = now


def foresee(chains: Sequence[Chain], workers: int, pace: Pace, at_once: int = SHARDS_AT_ONCE) -> Tail:
    """What the end of a run over `chains`, in their order, will cost. at_once: chains that a worker has in hand."""
    seconds = [sum(map(pace.seconds, chain)) for chain in chains]
    alone = [max((pace.tokens(shard) / pace.alone for shard in chain if shard.num_rows == 1), default=0.0) for chain in chains]
    waiting = iter(map(max, seconds, alone))
    hands = [_Hands() for _ in range(workers)]
    for n in range(at_once * workers):
        if (next_one := next(waiting, None)) is not None:
            hands[n % workers].take(0.0, next_one)
    ends = [(of_one.next_end, n) for n, of_one in enumerate(hands) if of_one.left]
    heapq.heapify(ends)
    while ends:
        now, n = heapq.heappop(ends)
        hands[n].finish()
        if (next_one := next(waiting, None)) is not None:
            hands[n].take(now, next_one)
        if hands[n].left:
            heapq.heappush(ends, (hands[n].next_end, n))
    free = [of_one.now for of_one in hands]
    whole = max(free)
    return Tail(whole - min(free), whole, whole - sum(seconds) / workers)

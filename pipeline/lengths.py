"""Documents that are longer than what a model was trained on: its state may hold less, or blow up, beyond. So they are told of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from longscan.pipeline.duplicates import committed
from longscan.pipeline.plan import Plan
from longscan.pipeline.storage import Location


@dataclass(frozen=True, slots=True)
class Beyond:
    number: int
    """Documents longer than the trained length."""
    longest: int
    """Tokens of the longest document there is."""


def find_long(output: Location, plan: Plan, trained_tokens: int) -> Beyond:
    """Look through the lengths in a run whose shards are all committed."""
    return count_long(committed(output, plan, "num_tokens"), trained_tokens)


def count_long(lengths: Iterable[int], trained_tokens: int) -> Beyond:
    number = longest = 0
    for length in lengths:
        number += length > trained_tokens
        longest = max(longest, length)
    return Beyond(number, longest)

"""Documents that are longer than what a model was trained on: its state may hold less, or blow up, beyond. So they are told of."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from longscan.kernels.segments import TILE
from longscan.pipeline.output.duplicates import committed
from longscan.pipeline.plan.planner import Plan
from longscan.pipeline.storage.location import Location
from longscan.pipeline.wording import plural

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beyond:
    number: int
    """Documents longer than the trained length."""
    longest: int
    """Tokens of the longest document there is."""


def warn_of_length(output: Location, plan: Plan, trained: int | None, reset: int | None) -> None:
    """Say how many documents of a run whose shards are all committed pass the length that the model was trained on.

    trained: that length, in tokens, where the model declares one. reset: tokens after which states start afresh, or None.
    """
    if trained is None or (reset is not None and reset <= trained):
        return
    found = count_long(committed(output, plan, "num_tokens"), trained)
    if found.number:
        log.warning(
            "longer than the %d tokens that this model was trained on: %d of %s, the longest has %d; what it makes of their later "
            "parts may be poor. Compare bits_per_byte of windows along them, or set engine.reset_tokens=%d",
            *(trained, found.number, plural(plan.num_rows, "document"), found.longest, trained // TILE * TILE or TILE),
        )


def count_long(lengths: Iterable[int], trained_tokens: int) -> Beyond:
    number = longest = 0
    for length in lengths:
        number += length > trained_tokens
        longest = max(longest, length)
    return Beyond(number, longest)

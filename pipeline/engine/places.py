"""Places in a document that a task is asked for, such as the ends of sentences -> tokens of the entry that holds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from longscan.pipeline.engine.opened import Taken

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Picks:
    """The places whose last token an entry holds."""

    indices: Places
    """Which of the document's places."""
    rows: Places
    """Token of the entry, -1 for a place before the first token of all."""


def pick(places: Places, taken: Taken, position: int, *, ends: bool) -> Picks:
    """Places [P], ascending, are ends, half-open: in characters where `taken` has offsets, else in tokens.

    Each belongs to the last token that begins before it, and so to one entry, however a document is cut. What lies beyond the
    document's end is its end.
    """
    if taken.char_starts is None:
        starts: Places = np.arange(position, position + len(taken.ids), dtype=np.int64)
        following = position + len(taken.ids)
    else:
        starts, following = taken.char_starts, taken.next_start
    low = 0 if position == 0 else int(np.searchsorted(places, starts[0], side="right"))
    high = len(places) if ends else int(np.searchsorted(places, following, side="right"))
    indices = np.arange(low, max(low, high), dtype=np.int64)
    return Picks(indices, np.searchsorted(starts, places[indices], side="left").astype(np.int64) - 1)

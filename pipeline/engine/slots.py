"""The slots of the state tables: which are documents', which hold the states that documents begin from; and how they become fewer. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from longscan.kernels.segments import NO_LANE


def spare_slots(step_tokens: int, segment_tokens: int) -> int:
    """Slots of the state tables beside the lanes: for what the documents that go on leave behind them, at most so many in a step.

    A step writes no slot that it reads: one that fails, for want of memory, can be run again.
    """
    return step_tokens // segment_tokens


@dataclass(frozen=True, slots=True)
class Slots:
    """How the tables are divided: the lanes' slots, then those of the states before documents, then spare ones.

    A document that goes on writes to a spare slot, which is its lane's from then on, and leaves the one it had as a spare one. So
    lanes say how many documents may hold a slot, and any of the documents' slots may be held.
    """

    lanes: int
    contexts: int = 1
    """Of states before a document's first token: behind all of the context, and behind all but its last 1, 2, ... tokens."""
    spare: int = 0
    has_context: bool = True
    """Otherwise documents begin from the zero state, and nothing is in the contexts' slots."""

    @property
    def total(self) -> int:
        return self.lanes + self.contexts + self.spare

    def before(self, replaced: int = 0) -> int:
        """Slot of the state that a document begins from which replaces so many tokens at the context's end; NO_LANE: the zero state."""
        return self.lanes + replaced if self.has_context else NO_LANE

    @property
    def of_contexts(self) -> range:
        return range(self.lanes, self.lanes + self.contexts)

    @property
    def of_lanes(self) -> range:
        """Documents' slots that are free at first."""
        return range(self.lanes)

    @property
    def of_spare(self) -> range:
        """Documents' slots that are spare at first."""
        return range(self.lanes + self.contexts, self.total)


@dataclass(frozen=True, slots=True)
class Lowering:
    """Fewer lanes, and what becomes of what slots hold."""

    slots: Slots
    moved: dict[int, int]
    """Slot -> its new one, of those whose states are kept."""
    set_aside: list[int]
    """Documents' slots for whose states there is no room any more."""


def fewer_lanes(slots: Slots, held: Sequence[int], in_step: Set[int]) -> Lowering | None:
    """Half of the lanes, or as many as the next step needs. None where these are no fewer.

    held: documents' slots that documents hold, those that are to be kept first in front. in_step: documents' slots that the step
    reads or writes; all of them are kept.
    """
    going = [slot for slot in held if slot in in_step]
    waiting = [slot for slot in held if slot not in in_step]
    lanes = max(slots.lanes // 2, len(going), len(in_step) - slots.spare, 1)
    if lanes >= slots.lanes:
        return None
    fewer = replace(slots, lanes=lanes)
    room = min(lanes - len(going), lanes + slots.spare - len(in_step))
    kept = sorted(in_step | set(waiting[:room]))
    moved = dict(zip(kept, (*fewer.of_lanes, *fewer.of_spare), strict=False))
    if slots.has_context:
        moved |= zip(slots.of_contexts, fewer.of_contexts, strict=True)
    return Lowering(fewer, moved, waiting[room:])

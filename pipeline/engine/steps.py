"""A step as the engine passes it on: which documents' tokens are in it, from booking (`lanes`) through the device (`forward`) to rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from longscan.kernels.segments import NO_LANE, TILE, Entry
from longscan.pipeline.engine.opened import OpenDocument, Taken
from longscan.pipeline.records import BYTES_PER_TOKEN, Cut


@dataclass(slots=True)
class StepEntry:
    """An entry of a step with the document behind it and the tokens in it."""

    document: OpenDocument
    entry: Entry
    taken: Taken
    load: Mapping[str, torch.Tensor] | None = None
    """What its lane must hold before it, where it does not hold it yet."""
    at_risk: int = 0
    """What its lane holds after it is wanted as a carry, the first one for so many tokens; 0: it is not."""
    kept: Cut | None = None
    """What its lane holds before it is to be kept; this is the last safe cut before that. None: it is not."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is booked: its tokens are taken, and its documents are where they will be behind it."""

    entries: tuple[StepEntry, ...]
    num_tiles: int
    num_tokens: int

    @property
    def estimated_tokens(self) -> int:
        """What a plan, which knows only the size of their text, takes its tokens for."""
        return round(sum(e.entry.num_tokens * e.document.bytes_per_token for e in self.entries) / BYTES_PER_TOKEN)

    @property
    def repeatable(self) -> bool:
        """It writes nothing that it reads: where it ends halfway, it can be run again."""
        return all(e.entry.lane_in == NO_LANE or e.entry.lane_in != e.entry.lane_out or e.load is not None for e in self.entries)

    @property
    def slots(self) -> set[int]:
        """Of the state tables: those that it reads or writes."""
        return {slot for e in self.entries for slot in (e.entry.lane_in, e.entry.lane_out)} - {NO_LANE}

    def moved(self, slots: Mapping[int, int]) -> Step:
        """The same step where what is in its slots is in others: slot -> its new one."""
        new = {NO_LANE: NO_LANE, **slots}
        entries = [replace(e.entry, lane_in=new[e.entry.lane_in], lane_out=new[e.entry.lane_out]) for e in self.entries]
        return replace(self, entries=tuple(replace(e, entry=entry) for e, entry in zip(self.entries, entries, strict=True)))


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What all steps so far came to."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    used_rows: int = 0
    """Of tiles in which there are tokens."""

    @property
    def waste(self) -> float:
        """Share of the steps' rows that held no token."""
        return 1.0 - self.tokens / self.rows if self.rows else 0.0

    @property
    def alignment_waste(self) -> float:
        """The same of tiles in use: what the ends of documents cost, whether steps were full or not."""
        return 1.0 - self.tokens / self.used_rows if self.used_rows else 0.0

    def plus(self, other: StepTotals) -> StepTotals:
        return StepTotals(self.steps + other.steps, self.tokens + other.tokens, self.rows + other.rows, self.used_rows + other.used_rows)

    def minus(self, other: StepTotals) -> StepTotals:
        return StepTotals(self.steps - other.steps, self.tokens - other.tokens, self.rows - other.rows, self.used_rows - other.used_rows)


def moves(entry: Entry) -> bool:
    """Whether it leaves its document's state in another slot than it takes it from, of those that one document has to itself."""
    return bool(entry.position) and NO_LANE not in (entry.lane_in, entry.lane_out) and entry.lane_in != entry.lane_out


def starts_afresh(entry: Entry, reset_tokens: int, first_lane: int) -> Iterator[Entry]:
    """An entry cut at the multiples of `reset_tokens`: what begins there begins as a document of its own does.

    An entry that begins between two of them does not reach beyond the second (`plan_step`): so no part reads the lane that another writes.
    """
    done = 0
    while done < entry.num_tokens:
        position = (entry.position + done) % reset_tokens
        taken = min(reset_tokens - position, entry.num_tokens - done)
        last = done + taken == entry.num_tokens
        yield replace(
            entry,
            first_tile=entry.first_tile + done // TILE,
            num_tokens=taken,
            position=position,
            lane_in=first_lane if position == 0 < entry.position + done else entry.lane_in,
            lane_out=entry.lane_out if last else NO_LANE,
            ends=entry.ends and last,
        )
        done += taken

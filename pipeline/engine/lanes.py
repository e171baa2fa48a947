"""The engine's book of documents that are not finished: who has which lane, and what goes into the next step.

It is not locked: the engine holds its lock around every call. `next_step` books a step in full before it runs (tokens taken,
positions moved, lanes taken and freed), so the next step can be planned while this one is on the device; results are booked
later, in `HostCarry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from longscan.kernels.segments import NO_LANE, TILE, Entry
from longscan.pipeline.engine.opened import Caller, OpenDocument, TokenQueue
from longscan.pipeline.engine.schedule import Assignment, Candidate, plan_step, ready_tokens
from longscan.pipeline.engine.settings import EngineSettings
from longscan.pipeline.engine.slots import Slots, fewer_lanes
from longscan.pipeline.engine.steps import Step, StepEntry, StepTotals, moves
from longscan.pipeline.records import Document, Prefix, TokenBlock

NOWHERE = -1
"""Where the state of a document is kept that is too short, or that has no safe cut."""
ENTRIES_AHEAD = 3
"""Of a document, while its carry is being written: the one that made it, the one on the device, and the next."""


class Lanes:
    """Documents that are not finished, in order of arrival, and the free lanes."""

    def __init__(self, settings: EngineSettings, slots: Slots, *, most_kept: int = 2) -> None:
        """slots: of the tables. most_kept: states at a time that are copied for a caller to keep; documents wait for their turn."""
        self.step_tokens, self.segment_tokens = settings.step_tokens, settings.segment_tokens
        self.slots = slots
        self.most_kept = most_kept
        self.ready_rows = 0
        """Rows, in whole tiles, of what could go into a step, were there room for all."""
        self.totals = StepTotals()
        self._constant_shape, self._reset_tokens = settings.tiles is not None, settings.reset_tokens
        self._keep_lanes = settings.task.state_norm  # of the final state, which is in the document's lane after its last step
        self._documents: dict[int, OpenDocument] = {}
        self._free, self._spare = list(slots.of_lanes), list(slots.of_spare)
        """Documents' slots that none holds: as many as documents may begin to hold, and those to be written by who goes on."""
        self._arrivals = 0
        self._any_kept = False
        """There was a document whose state is to be kept."""

    def admit(
        self, caller: Caller, document: Document, num_bytes: int | None, prefix: Prefix | None = None, *, estimated_tokens: int = 0
    ) -> OpenDocument:
        """A document with a carry goes on where that was made. One with a prefix has its state kept, if its caller keeps anything.

        estimated_tokens: of the whole document.
        """
        self._arrivals += 1
        place, start = Candidate(self._arrivals, last_served=self.totals.steps), document.carry
        opened = OpenDocument(caller, document if start is None else replace(document, carry=None), num_bytes, place, estimated_tokens)
        opened.prefix = prefix if caller.keeper is not None else None
        self._any_kept |= opened.prefix is not None
        if start is not None:
            opened.tokens, opened.carry, opened.load = TokenQueue(start.cut), replace(start.host), start.tensors()
            opened.saved = place.position = start.position
        self._documents[opened.place.key] = opened
        caller.documents.add(opened)
        return opened

    def push(self, document: OpenDocument, blocks: Iterable[TokenBlock], *, complete: bool) -> None:
        """Give a document its next tokens; `complete` says that there are no more."""
        before = document.tokens.held
        for block in blocks:
            if len(block.ids) and not block.settled:
                self._decide_keep_at(document)
            if block.end is not None and block.end.byte and block.end.token:
                document.bytes_per_token = block.end.byte / block.end.token
            document.tokens.push(block)
        document.caller.held_tokens += document.tokens.held - before
        document.complete = complete
        if complete:
            self._decide_keep_at(document)
        self._refresh(document)

    def drop(self, document: OpenDocument) -> None:
        """Forget a document before its last result. Its lane is free for the next step."""
        document.gone = True
        document.caller.documents.discard(document)
        if self._documents.pop(document.place.key, None) is not None:
            document.caller.held_tokens -= document.tokens.held
            self.ready_rows -= document.place.ready_rows
            self._release(document)

    def at_risk(self) -> list[tuple[OpenDocument, int]]:
        """Documents with a state, in a lane or set aside, that are further than their last carry, and by how many tokens."""
        held = [d for d in self._documents.values() if d.place.lane != NO_LANE or d.load is not None]
        risks = [(d, d.place.position - d.saved) for d in held]
        return [(document, tokens) for document, tokens in risks if tokens]

    def next_step(self) -> Step | None:
        """Book the next step; None where no document can go."""
        plan = plan_step(
            self._candidates(),
            self._free,
            step_tokens=self.step_tokens,
            segment_tokens=self.segment_tokens,
            constant_shape=self._constant_shape,
            reset_tokens=self._reset_tokens,
            keep_lanes=self._keep_lanes,
        )
        if not plan.assignments:
            return None
        self.totals = self.totals.plus(StepTotals(1, plan.num_tokens, plan.num_tiles * TILE, plan.used_tiles * TILE))
        self._free = self._free[sum(self._takes_lane(a) for a in plan.assignments) :]
        entries = tuple(self._book(a) for a in plan.assignments)
        # Behind all entries: what one of them reads, none of this step writes.
        self._spare += [e.entry.lane_in for e in entries if moves(e.entry)]
        return Step(entries, plan.num_tiles, plan.num_tokens)

    def lower(self, step: Step, read: Callable[[int], Mapping[str, torch.Tensor]]) -> tuple[Step, dict[int, int]] | None:
        """Go on with half of the lanes, or with as many as `step` needs. Nothing runs, and `step` is booked and to be run next.

        read: what a slot holds; documents for whose state there is no room any more are set aside with it, to go on from it in a lane
        that falls free. Returns the step in its new slots, and the new slot of each that is kept; None where there are no fewer lanes.
        """
        held = {document.place.lane: document for document in self._documents.values() if document.place.lane != NO_LANE}
        lowering = fewer_lanes(self.slots, list(held), step.slots.difference(self.slots.of_contexts))
        if lowering is None:
            return None
        for slot in lowering.set_aside:
            document = held.pop(slot)
            document.load, document.place.lane = read(slot), NO_LANE
        for slot, document in held.items():
            document.place.lane = lowering.moved[slot]
        self.slots = lowering.slots
        taken = {document.place.lane for document in held.values()}
        left = [slot for slot in (*self.slots.of_lanes, *self.slots.of_spare) if slot not in taken]
        unheld = self.slots.lanes - len(held)
        self._free, self._spare = left[:unheld], left[unheld:]
        return step.moved(lowering.moved), lowering.moved

    def _decide_keep_at(self, document: OpenDocument) -> None:
        """No more tokens come that are settled: now it is known where the document's state is kept.

        It has not gone past that place: a segment goes only when the token behind it is at hand.
        """
        if document.prefix is None or document.keep_at is not None:
            return
        settled = document.place.position + document.tokens.held
        document.keep_at = max(settled - 1, 0) // self.segment_tokens * self.segment_tokens or NOWHERE

    def _candidates(self) -> Iterator[Candidate]:
        """Documents that may go; of those whose state is to be kept, as many as their callers have room for."""
        if not self._any_kept:
            yield from [document.place for document in self._documents.values()]
            return
        room: dict[int, int] = {}
        for document in self._documents.values():
            if document.keeps:
                left = room.setdefault(id(document.caller), self.most_kept - document.caller.keeping)
                if left <= 0:
                    continue
                room[id(document.caller)] = left - 1
            yield document.place

    def _takes_lane(self, a: Assignment) -> bool:
        return a.lane != NO_LANE and self._documents[a.key].place.lane == NO_LANE

    def _book(self, a: Assignment) -> StepEntry:
        """Take an entry's tokens, and put its document where it will be behind the step."""
        document = self._documents[a.key]
        place = document.place
        lane_out = NO_LANE if a.ends and not self._keep_lanes else a.lane
        if a.position and lane_out != NO_LANE and document.load is None and self._spare:
            lane_out = self._spare.pop()
        entry = Entry(
            a.first_tile,
            a.num_tokens,
            a.position,
            lane_in=a.lane if a.position else self.slots.before(document.carry.replaced),
            lane_out=lane_out,
            ends=a.ends,
        )
        kept = document.tokens.cut if document.keep_at == a.position else None
        document.caller.keeping += kept is not None
        taken = document.tokens.take(a.num_tokens)
        document.caller.held_tokens -= a.num_tokens
        place.lane = a.lane if lane_out == NO_LANE else lane_out
        place.position, place.last_served = a.position + a.num_tokens, self.totals.steps
        self._refresh(document)
        load, document.load = document.load, None
        at_risk = 0 if a.ends else self._book_carry(document, a.num_tokens)
        if a.ends:
            del self._documents[a.key]
            self._release(document)
        return StepEntry(document, entry, taken, load, at_risk, kept)

    def _book_carry(self, document: OpenDocument, taken: int) -> int:
        """Tokens since the last carry, if a new one is due where the document is now and there is room for it, else 0.

        It is due before the document is `checkpoint_tokens` on, by as many entries as go on until it is written; the last of these has
        `taken` tokens. One that finds no room is tried again after the document's next entry.
        """
        keeper, position, saved = document.caller.keeper, document.place.position, document.saved
        if keeper is None or position - saved + ENTRIES_AHEAD * taken <= keeper.checkpoint_tokens or not keeper.reserve():
            return 0
        document.saved = position
        return position - saved

    def _refresh(self, document: OpenDocument) -> None:
        place, before = document.place, document.place.ready_rows
        place.complete = document.complete
        place.ready = ready_tokens(document.tokens.held, place.complete, self.segment_tokens)
        left = document.tokens.held if place.complete else max(document.estimated_tokens - place.position, document.tokens.held)
        place.long = left > self.step_tokens
        if document.keep_at is not None and place.position < document.keep_at:
            place.ready, place.complete = min(place.ready, document.keep_at - place.position), False
        self.ready_rows += place.ready_rows - before

    def _release(self, document: OpenDocument) -> None:
        if document.place.lane != NO_LANE:
            self._free.append(document.place.lane)
            document.place.lane = NO_LANE

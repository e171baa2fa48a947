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
from longscan.pipeline.opened import Caller, OpenDocument, TokenQueue
from longscan.pipeline.records import Document, Prefix, TokenBlock
from longscan.pipeline.schedule import Assignment, Candidate, plan_step, ready_tokens
from longscan.pipeline.steps import Step, StepEntry, StepTotals, moves

NOWHERE = -1
"""Where the state of a document is kept that is too short, or that has no safe cut."""
ENTRIES_AHEAD = 3
"""Of a document, while its carry is being written: the one that made it, the one on the device, and the next."""


class Lanes:
    """Documents that are not finished, in order of arrival, and the free lanes."""

    def __init__(
        self,
        lanes: int,
        *,
        step_tokens: int,
        segment_tokens: int,
        first_lane: int,
        constant_shape: bool,
        spare: Iterable[int] = (),
        reset_tokens: int | None = None,
        keep_lanes: bool = False,
        most_kept: int = 2,
    ) -> None:
        """first_lane: slot that holds the state before a document's first token; NO_LANE where that is zero. The next ones hold it for
        documents that replace 1, 2, ... tokens at the prompt's end.

        spare: slots beside the lanes. Who goes on writes to one of them, and leaves its own as a spare one for the next step; where
        there is none left, it writes to its own.
        reset_tokens, keep_lanes: as `plan_step` takes them; a lane that is kept holds the document's final state after its last step.
        most_kept: states at a time that are copied for a caller to keep; documents wait for their turn.
        """
        self.step_tokens = step_tokens
        self.segment_tokens = segment_tokens
        self.lanes = lanes
        """How many documents may hold one."""
        self.first_lane = first_lane
        self.constant_shape = constant_shape
        self.reset_tokens = reset_tokens
        self.keep_lanes = keep_lanes
        self.most_kept = most_kept
        self.ready_tokens = 0
        """Tokens that could go into a step, were there room for all."""
        self.totals = StepTotals()
        self._documents: dict[int, OpenDocument] = {}
        self._free = list(range(lanes))
        self._spare = list(spare)
        self._arrivals = 0
        self._any_kept = False
        """There was a document whose state is to be kept."""

    def admit(self, caller: Caller, document: Document, num_bytes: int | None, prefix: Prefix | None = None) -> OpenDocument:
        """A document with a carry goes on where that was made. One with a prefix has its state kept, if its caller keeps anything."""
        self._arrivals += 1
        place, start = Candidate(self._arrivals, last_served=self.totals.steps), document.carry
        opened = OpenDocument(caller, document if start is None else replace(document, carry=None), num_bytes, place)
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
                self._settle(document)
            document.tokens.push(block)
        document.caller.held_tokens += document.tokens.held - before
        document.complete = complete
        if complete:
            self._settle(document)
        self._refresh(document)

    def drop(self, document: OpenDocument) -> None:
        """Forget a document before its last result. Its lane is free for the next step."""
        document.gone = True
        document.caller.documents.discard(document)
        if self._documents.pop(document.place.key, None) is not None:
            document.caller.held_tokens -= document.tokens.held
            self.ready_tokens -= document.place.ready
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
            constant_shape=self.constant_shape,
            reset_tokens=self.reset_tokens,
            keep_lanes=self.keep_lanes,
        )
        if not plan.assignments:
            return None
        self.totals = self.totals.plus(StepTotals(1, plan.num_tokens, plan.num_tiles * TILE, plan.used_tiles * TILE))
        self._free = self._free[sum(self._takes_lane(a) for a in plan.assignments) :]
        entries = tuple(self._book(a) for a in plan.assignments)
        # Behind all entries: what one of them reads, none of this step writes.
        self._spare += [e.entry.lane_in for e in entries if moves(e.entry)]
        return Step(entries, plan.num_tiles, plan.num_tokens)

    def lower(
        self, step: Step, *, contexts: int, spare: int, read: Callable[[int], Mapping[str, torch.Tensor]]
    ) -> tuple[Step, dict[int, int]] | None:
        """Go on with half of the lanes, or with as many as `step` needs. Nothing runs, and `step` is booked and to be run next.

        contexts: slots that hold states before documents, from `first_lane` on. spare: spare slots there are then. read: what a slot
        holds; documents for whose state there is no room any more are set aside with it, to go on from it in a lane that falls free.

        Returns the step in its new slots, and the new slot of each that is kept; the tables have `self.lanes + contexts + spare`.
        None where there are no fewer.
        """
        in_step = {slot for e in step.entries for slot in (e.entry.lane_in, e.entry.lane_out)}
        in_step -= {NO_LANE, *range(self.first_lane, self.first_lane + contexts)}
        holders = [document for document in self._documents.values() if document.place.lane != NO_LANE]
        kept = [document for document in holders if document.place.lane in in_step]
        lanes = max(self.lanes // 2, len(kept), len(in_step) - spare, 1)
        if lanes >= self.lanes:
            return None
        others = [document for document in holders if document.place.lane not in in_step]
        room = min(lanes - len(kept), lanes + spare - len(in_step))
        for document in others[room:]:
            document.load, document.place.lane = read(document.place.lane), NO_LANE
        kept += others[:room]
        slots = [slot for slot in range(lanes + contexts + spare) if not lanes <= slot < lanes + contexts]
        moved = dict(zip(sorted(in_step | {document.place.lane for document in kept}), slots, strict=False))
        for document in kept:
            document.place.lane = moved[document.place.lane]
        left = sorted(set(slots) - {document.place.lane for document in kept})
        self._free, self._spare = left[: lanes - len(kept)], left[lanes - len(kept) :]
        if self.first_lane != NO_LANE:
            moved |= {self.first_lane + n: lanes + n for n in range(contexts)}
            self.first_lane = lanes
        self.lanes = lanes
        places = {NO_LANE: NO_LANE, **moved}
        entries = [replace(e.entry, lane_in=places[e.entry.lane_in], lane_out=places[e.entry.lane_out]) for e in step.entries]
        return replace(step, entries=tuple(replace(e, entry=entry) for e, entry in zip(step.entries, entries, strict=True))), moved

    def _settle(self, document: OpenDocument) -> None:
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
        document = self._documents[a.key]
        place = document.place
        lane_out = NO_LANE if a.ends and not self.keep_lanes else a.lane
        if a.position and lane_out != NO_LANE and document.load is None and self._spare:
            lane_out = self._spare.pop()
        entry = Entry(
            a.first_tile,
            a.num_tokens,
            a.position,
            lane_in=a.lane if a.position else self._first_lane(document),
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

    def _first_lane(self, document: OpenDocument) -> int:
        return self.first_lane if self.first_lane == NO_LANE else self.first_lane + document.carry.replaced

    def _refresh(self, document: OpenDocument) -> None:
        place, before = document.place, document.place.ready
        place.complete = document.complete
        place.ready = ready_tokens(document.tokens.held, place.complete, self.segment_tokens)
        if document.keep_at is not None and place.position < document.keep_at:
            place.ready, place.complete = min(place.ready, document.keep_at - place.position), False
        self.ready_tokens += place.ready - before

    def _release(self, document: OpenDocument) -> None:
        if document.place.lane != NO_LANE:
            self._free.append(document.place.lane)
            document.place.lane = NO_LANE

"""One attempt at one shard, kept: its rows go through the journal, its carries to files, and what attempts before left comes first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from longscan.pipeline.errors import LongscanError
from longscan.pipeline.keep.backlog import Backlog
from longscan.pipeline.keep.carry import Layout, Owner, content_digest
from longscan.pipeline.keep.carryfiles import CarryFiles
from longscan.pipeline.keep.frames import pack
from longscan.pipeline.keep.journal import Journal, JournalWriter, Trail, read_journal
from longscan.pipeline.keep.rowcodec import ENDS, NONE, Counts, Run, after_row, pack_runs
from longscan.pipeline.keep.states import KeptState, KeptStates, state_row
from longscan.pipeline.records import Carry, Document, DocumentRow, ErrorRow, Kept, Outcome, Reached, StateRow
from longscan.pipeline.shards import Carried
from longscan.pipeline.storage.location import Location, children, remove_tree

MOST_UNDER_WAY = 2
"""Carries of one shard that are copied and not written yet. More would only fill the memory: the newest one counts."""

log = logging.getLogger(__name__)


class Rows(Protocol):
    """What takes rows that need not be made again: a shard's part in the making."""

    def add(self, outcome: Outcome) -> None: ...


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is the same for all shards of a worker."""

    folder: Location
    """Of all their folders."""
    fingerprint: str
    """Of the run."""
    layout: Layout
    """Of the engine's carries."""
    checkpoint_tokens: int
    """Of a document, that a stop may cost."""
    binding: str
    """What states that this run keeps are bound to."""
    states: KeptStates | None
    """Of an earlier run, to go on from."""
    backlog: Backlog


class ShardKeeper:
    """One attempt at one shard. As a context: left, it keeps what it has, for the next attempt."""

    def __init__(self, keeping: Keeping, shard: int, attempt: int, on_end: Callable[[ShardKeeper], None]) -> None:
        self._keeping, self._shard, self._on_end = keeping, shard, on_end
        self._folder = keeping.folder / f"{shard:05d}"
        head = {"fingerprint": keeping.fingerprint, "shard": shard}
        self._writer = JournalWriter(self._folder, attempt, head)
        self._left = Journal()
        self._carries = CarryFiles(self._folder, attempt, keeping.layout)
        self._digests: dict[int, str] = {}
        """Documents that are not finished."""
        self._counts: dict[int, Counts] = {}
        """What the rows of those count up to."""
        self._fresh = False
        """Nothing is left of attempts before, or of an earlier run: documents begin at their beginning."""
        self._under_way = 0
        self._lock = threading.Lock()
        self._broken = False
        self._written = 0
        self._seconds = 0.0
        self._carried = Carried()
        self._look(head)

    def __enter__(self) -> ShardKeeper:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()
        try:
            self._writer.close(wanted=not self._broken)
        except (LongscanError, OSError) as error:
            self._give_up(error)
        self._on_end(self)

    @property
    def checkpoint_tokens(self) -> int:
        return self._keeping.checkpoint_tokens

    @property
    def carried(self) -> Carried:
        """What this attempt and those before it came to."""
        return self._left.carried.plus(self._carried).plus(Carried(carries_written=self._written, carry_seconds=self._seconds))

    def resume(self, documents: Iterator[Document | ErrorRow], rows: Rows) -> Iterator[Document | ErrorRow]:
        """Documents that are left to do, from where they are. Rows that were made before go straight to `rows`."""
        for document in documents:
            if isinstance(document, ErrorRow):
                yield document
                continue
            digest = content_digest(document)
            trail = self._left.trails.pop(document.ordinal, None)
            if trail is not None and trail.digest != digest:
                log.warning("shard %d, row %d: its content has changed since the stop; it begins anew", self._shard, document.ordinal)
                trail = None
            if trail is not None and trail.finished:
                self._replay_finished(trail, document, rows)
                continue
            self._digests[document.ordinal] = digest
            if self._fresh:
                yield document
                continue
            carry = self._go_on(document, digest, trail or Trail(digest), rows)
            yield document if carry is None else replace(document, carry=carry)

    def position(self, document: Document | ErrorRow) -> int:
        """From where on `resume` would give it: 0, or behind its newest carry that is of use."""
        if isinstance(document, ErrorRow):
            return 0
        digest = content_digest(document)
        trail = self._left.trails.get(document.ordinal, Trail(digest))
        saved, _ = self._carries.newest(Owner(self._keeping.fingerprint, self._shard, document.ordinal, digest), trail)
        return 0 if saved is None else saved.host.position

    def keep(self, news: Sequence[Outcome | Carry | Kept | Reached]) -> list[Outcome]:
        """Take a caller's news; returns the rows among them. Rows are in the journal before they are anywhere else."""
        if not news:
            return []
        began = time.monotonic()
        made: list[Outcome] = []
        rows: dict[int, tuple[Counts, list[Outcome]]] = {}
        marks: dict[int, int] = {}
        carries: list[tuple[Carry, Counts]] = []
        finished: list[int] = []
        for item in news:
            if isinstance(item, Reached):
                marks[item.ordinal] = item.position
            elif isinstance(item, Carry):
                carries.append((item, self._counts.get(item.ordinal, NONE)))
            else:
                row = state_row(item, self._keeping.binding, self._counts.get(item.carry.ordinal, NONE)) if isinstance(item, Kept) else item
                made.append(row)
                if (ordinal := _ordinal(row)) in self._digests:
                    if ordinal not in rows:
                        rows[ordinal] = self._counts.get(ordinal, NONE), []
                    self._count(ordinal, row)
                    rows[ordinal][1].append(row)
                    if isinstance(row, ENDS):
                        finished.append(ordinal)
        runs = [Run(ordinal, self._digests[ordinal], before, self._counts[ordinal], of_one) for ordinal, (before, of_one) in rows.items()]
        self._record(pack_runs(runs) + ([pack({"at": list(marks.items())})] if marks else []))
        for carry, counts in carries:
            self._hand_over(carry, counts)
        for ordinal in finished:
            self._forget_document(ordinal)
        self._seconds += time.monotonic() - began
        for row in made:
            self._note(row)
        return made

    def reserve(self) -> bool:
        """Whether a carry may be made: not where it would wait for others, or could not be used."""
        with self._lock:
            if self._broken or self._under_way >= MOST_UNDER_WAY:
                return False
            self._under_way += 1
            return True

    def forget(self) -> None:
        with self._lock:
            self._under_way -= 1

    def clear(self) -> None:
        """The shard is committed: nothing of this is needed any more. Carries that wait to be written are not."""
        self._broken = True
        self._keeping.backlog.submit(0, lambda: remove_tree(self._folder))

    def _look(self, head: dict[str, object]) -> None:
        try:
            names = children(self._folder)
            self._left = read_journal(self._folder, names, head)
            self._fresh = not names and self._keeping.states is None
        except Exception as error:  # each file system has exceptions of its own
            log.warning("shard %d: what an attempt before has left cannot be read, and is left out: %s", self._shard, error)
            return
        self._carries.add(names)

    def _replay_finished(self, trail: Trail, document: Document, rows: Rows) -> None:
        for row in self._left.replay(trail, document.without_content()):
            rows.add(row)
            self._note(row)
            if isinstance(row, DocumentRow):
                self._carried = self._carried.plus(Carried(kept_tokens=row.num_tokens - row.continued_at))
        self._carries.remove(document.ordinal)

    def _note(self, row: Outcome) -> None:
        """Count what a row says of states, where it goes to the shard's part."""
        if isinstance(row, StateRow):
            self._carried = self._carried.plus(Carried(states_kept=1))
        elif isinstance(row, DocumentRow) and row.continued_at:
            self._carried = self._carried.plus(Carried(continued_documents=1, continued_tokens=row.continued_at))

    def _go_on(self, document: Document, digest: str, trail: Trail, rows: Rows) -> Carry | None:
        """The document's newest carry that is of use, with what is written before it in `rows`; or what an earlier run kept of it."""
        ordinal = document.ordinal
        saved, name = self._carries.newest(Owner(self._keeping.fingerprint, self._shard, ordinal, digest), trail)
        state = self._continue(document, digest, trail) if saved is None else None
        position = saved.host.position if saved is not None else 0 if state is None else state.position
        again = max(self._left.reached.get(ordinal, 0) - position, 0)
        if saved is None and not again:
            return state
        done = Carried(resumed_documents=int(saved is not None), recomputed_tokens=again, most_recomputed_tokens=again)
        kept = 0 if saved is None else position - saved.host.continued_at
        self._carried = self._carried.plus(done).plus(Carried(kept_tokens=kept))
        self._record([pack({"resumed": asdict(done)}), pack({"at": [[ordinal, position]]})])
        if saved is None or name is None:
            return state
        for row in self._left.replay(trail, document.without_content(), saved.counts):
            rows.add(row)
            self._note(row)
        self._counts[ordinal] = saved.counts
        return Carry(ordinal, saved.host, saved.cut, lambda: self._carries.tensors(name, saved.owner))

    def _continue(self, document: Document, digest: str, trail: Trail) -> Carry | None:
        """Where a document without a carry begins: at what an earlier run kept of it, or at its beginning."""
        states = self._keeping.states
        found = None if states is None else states.find(document)
        if isinstance(found, str):
            log.warning("%r: begins anew, as its kept state is of no use: %s", document.doc_id, found)
            done = Carried(states_left_out=1)
            self._carried = self._carried.plus(done)
            self._record([pack({"resumed": asdict(done)})])
        state = found if isinstance(found, KeptState) else None
        base = NONE if state is None else state.counts
        if base != trail.base:
            self._record([pack({"begins": [document.ordinal, digest, base]})])
        if state is None:
            return None
        self._counts[document.ordinal] = base
        return Carry(document.ordinal, state.host, state.cut, state.tensors)

    def _count(self, ordinal: int, row: Outcome) -> None:
        after = after_row(self._counts.get(ordinal, NONE), row)
        assert after is not None, "rows of a document come in order"
        self._counts[ordinal] = after

    def _record(self, frames: list[bytes]) -> None:
        if self._broken:
            return
        try:
            self._writer.write(frames)
        except LongscanError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A journal with a hole is none: what comes after this is not kept."""
        self._broken = True
        log.warning("shard %d: a stop would lose what it does from here on: %s", self._shard, error)

    def _hand_over(self, carry: Carry, counts: Counts) -> None:
        """Give a carry to the backlog's thread; the rows before it must be where they outlive this process."""
        digest = self._digests.get(carry.ordinal)
        if digest is None or self._broken:
            self.forget()
            return
        try:
            self._writer.put()
        except LongscanError as error:
            self._give_up(error)
        owner = Owner(self._keeping.fingerprint, self._shard, carry.ordinal, digest)
        self._keeping.backlog.submit(carry.at_risk, lambda: self._save(carry, owner, counts))

    def _save(self, carry: Carry, owner: Owner, counts: Counts) -> None:
        """In the backlog's thread: the carry's file, and then those before it are gone."""
        try:
            if self._broken or owner.ordinal not in self._digests or not self._carries.is_newest(carry):
                return
            self._writer.sync()
            name = self._carries.write(carry, owner, counts)
            self._written += 1
            self._carries.remove(carry.ordinal, name)
        finally:
            self.forget()

    def _forget_document(self, ordinal: int) -> None:
        self._digests.pop(ordinal, None)
        self._counts.pop(ordinal, None)
        if ordinal in self._carries:
            self._keeping.backlog.submit(0, lambda: self._carries.remove(ordinal))


def _ordinal(row: Outcome) -> int:
    return row.ordinal if isinstance(row, ErrorRow) else row.document.ordinal

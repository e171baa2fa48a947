"""What a worker keeps of its unfinished shards, so that a stop costs little: rows in journals, carries in files.

    caller's thread    ShardKeeper.resume: documents -> those that are left to do, each with its newest carry
                       ShardKeeper.keep: rows into the journal; a carry goes to the writer once the rows before it are there
    writer's thread    carries, those with the most tokens at risk first; the one before is removed when the newer is whole

    _run/carries/<shard>/     see `carry` and `journal`; removed once the shard is committed

Nothing here ends a shard: what cannot be kept is told of once, and would be done again.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from queue import PriorityQueue
from typing import Protocol

import torch
from longscan.pipeline.carry import Layout, Owner, SavedCarry, carry_name, content_digest, named, parse_carry, save_carry
from longscan.pipeline.errors import LongscanError, OutputError
from longscan.pipeline.frames import pack
from longscan.pipeline.journal import Journal, JournalWriter, Trail, read_journal
from longscan.pipeline.ledger import RUN
from longscan.pipeline.records import Carry, Document, DocumentRow, ErrorRow, Kept, Outcome, Reached, StateRow
from longscan.pipeline.rowcodec import ENDS, NONE, Counts, Run, after_row, pack_runs
from longscan.pipeline.shards import Carried, Shard
from longscan.pipeline.states import KeptState, KeptStates, state_row
from longscan.pipeline.storage import Location, atomic_write, children, read_bytes, remove, remove_tree

MOST_UNDER_WAY = 2
"""Carries of one shard that are copied and not written yet. More would only fill the memory: the newest one counts."""

log = logging.getLogger(__name__)


class Rows(Protocol):
    """What takes rows that need not be made again: a shard's part in the making."""

    def add(self, outcome: Outcome) -> None: ...


Task = tuple[int, int, Callable[[], None]]
"""Tokens at risk, negative; a number that grows; what the writer's thread does."""


class Keeper:
    """Keeps the shards of one worker. `close` it after the engine; what waits to be written is written first."""

    def __init__(
        self,
        output: Location,
        fingerprint: str,
        layout: Layout,
        *,
        checkpoint_tokens: int,
        binding: str = "",
        states: KeptStates | None = None,
    ) -> None:
        """layout: of the engine's carries. checkpoint_tokens: of a document, that a stop may cost.

        binding: what states that this run keeps are bound to (`states.binding`). states: those of an earlier run, to go on from.
        """
        self.binding, self.states = binding, states
        self.folder = output / RUN / "carries"
        self.fingerprint, self.layout, self.checkpoint_tokens = fingerprint, layout, checkpoint_tokens
        self._tasks: PriorityQueue[Task] = PriorityQueue()
        self._numbers = itertools.count()
        self._open: set[ShardKeeper] = set()
        self._news = threading.Condition()
        self._unwritten = 0
        self._closed = self._given_up = False
        self._thread = threading.Thread(target=self._write, name="longscan-keeper", daemon=True)
        self._thread.start()

    def open(self, shard: Shard, attempt: int) -> ShardKeeper:
        """Begin an attempt at a shard, with what those before have left."""
        opened = ShardKeeper(self, shard.index, attempt)
        with self._news:
            self._open.add(opened)
        return opened

    def flush(self, timeout_s: float) -> bool:
        """Wait until every shard has ended, for the engine was stopped, and its carries are written.

        What is not written after `timeout_s` is given up. Returns whether all came in time.
        """
        with self._news:
            done = self._news.wait_for(lambda: not self._open and not self._unwritten, timeout_s)
            self._given_up = not done
        return done

    def close(self) -> None:
        """End the writer's thread, once what waits is written."""
        with self._news:
            self._news.wait_for(lambda: not self._unwritten)
            self._closed = True
        self.submit(0, lambda: None)
        self._thread.join()

    def submit(self, at_risk: int, task: Callable[[], None]) -> None:
        """Have the writer's thread do something; what has more tokens at risk goes first."""
        with self._news:
            self._unwritten += 1
        self._tasks.put((-at_risk, next(self._numbers), task))

    def ended(self, shard: ShardKeeper) -> None:
        with self._news:
            self._open.discard(shard)
            self._news.notify_all()

    def _write(self) -> None:
        while True:
            _, _, task = self._tasks.get()
            if self._closed:
                return
            try:
                if not self._given_up:
                    task()
            except Exception as error:
                log.warning("%s: a carry cannot be written or removed: %s", self.folder, error)
            with self._news:
                self._unwritten -= 1
                self._news.notify_all()


class ShardKeeper:
    """One attempt at one shard. As a context: left, it keeps what it has, for the next attempt."""

    def __init__(self, keeper: Keeper, shard: int, attempt: int) -> None:
        self._keeper, self._shard, self._attempt = keeper, shard, attempt
        self._folder = keeper.folder / f"{shard:05d}"
        head = {"fingerprint": keeper.fingerprint, "shard": shard}
        self._writer = JournalWriter(self._folder, attempt, head)
        self._left = Journal()
        self._files: dict[int, list[str]] = {}
        """Ordinal -> its carries' files, the newest position last. Changed by the writer's thread once the document is open."""
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
        self._keeper.ended(self)

    @property
    def checkpoint_tokens(self) -> int:
        return self._keeper.checkpoint_tokens

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
        saved, _ = self._newest(Owner(self._keeper.fingerprint, self._shard, document.ordinal, digest), trail)
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
                row = state_row(item, self._keeper.binding, self._counts.get(item.carry.ordinal, NONE)) if isinstance(item, Kept) else item
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
        self._keeper.submit(0, lambda: remove_tree(self._folder))

    def _look(self, head: dict[str, object]) -> None:
        try:
            names = children(self._folder)
            self._left = read_journal(self._folder, names, head)
            self._fresh = not names and self._keeper.states is None
        except Exception as error:  # each file system has exceptions of its own
            log.warning("shard %d: what an attempt before has left cannot be read, and is left out: %s", self._shard, error)
            return
        for name in sorted(names):
            if (found := named(name)) is not None:
                self._files.setdefault(found[0], []).append(name)

    def _replay_finished(self, trail: Trail, document: Document, rows: Rows) -> None:
        for row in self._left.replay(trail, document.without_content()):
            rows.add(row)
            self._note(row)
            if isinstance(row, DocumentRow):
                self._carried = self._carried.plus(Carried(kept_tokens=row.num_tokens - row.continued_at))
        self._remove_files(document.ordinal)

    def _note(self, row: Outcome) -> None:
        """Count what a row says of states, where it goes to the shard's part."""
        if isinstance(row, StateRow):
            self._carried = self._carried.plus(Carried(states_kept=1))
        elif isinstance(row, DocumentRow) and row.continued_at:
            self._carried = self._carried.plus(Carried(continued_documents=1, continued_tokens=row.continued_at))

    def _go_on(self, document: Document, digest: str, trail: Trail, rows: Rows) -> Carry | None:
        """The document's newest carry that is of use, with what is written before it in `rows`; or what an earlier run kept of it."""
        ordinal = document.ordinal
        saved, name = self._newest(Owner(self._keeper.fingerprint, self._shard, ordinal, digest), trail)
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
        return Carry(ordinal, saved.host, saved.cut, lambda: self._tensors(name, saved.owner))

    def _continue(self, document: Document, digest: str, trail: Trail) -> Carry | None:
        """Where a document without a carry begins: at what an earlier run kept of it, or at its beginning."""
        states = self._keeper.states
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

    def _newest(self, owner: Owner, trail: Trail) -> tuple[SavedCarry | None, str | None]:
        for name in reversed(self._files.get(owner.ordinal, [])):
            parsed = parse_carry(self._read(name), owner, self._keeper.layout)
            if not isinstance(parsed, str) and not _between(trail.base, parsed[0].counts, trail.counts):
                parsed = "rows before it are missing"
            if not isinstance(parsed, str):
                return parsed[0], name
            log.warning("%s: this carry is left out: %s", self._folder / name, parsed)
        return None, None

    def _read(self, name: str) -> bytes | None:
        try:
            return read_bytes(self._folder / name)
        except Exception as error:
            log.warning("%s: cannot be read: %s", self._folder / name, error)
            return None

    def _tensors(self, name: str, owner: Owner) -> Mapping[str, torch.Tensor]:
        parsed = parse_carry(self._read(name), owner, self._keeper.layout)
        if isinstance(parsed, str):
            raise OutputError(f"{self._folder / name}: a carry that was whole cannot be used any more: {parsed}; the shard is tried again")
        return parsed[1]

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
        """Give a carry to the writer's thread; the rows before it must be where they outlive this process."""
        digest = self._digests.get(carry.ordinal)
        if digest is None or self._broken:
            self.forget()
            return
        try:
            self._writer.put()
        except LongscanError as error:
            self._give_up(error)
        owner = Owner(self._keeper.fingerprint, self._shard, carry.ordinal, digest)
        self._keeper.submit(carry.at_risk, lambda: self._save(carry, owner, counts))

    def _save(self, carry: Carry, owner: Owner, counts: Counts) -> None:
        """In the writer's thread: the carry's file, and then those before it are gone."""
        try:
            name = carry_name(carry.ordinal, carry.position, self._attempt)
            # One with more tokens at risk may have gone first, though it was made later: at a stop.
            if self._broken or owner.ordinal not in self._digests or max(self._files.get(carry.ordinal, []), default="") > name:
                return
            self._writer.sync()
            atomic_write(self._folder / name, save_carry(carry, owner, counts))
            self._written += 1
            self._remove_files(carry.ordinal, name)
        finally:
            self.forget()

    def _forget_document(self, ordinal: int) -> None:
        self._digests.pop(ordinal, None)
        self._counts.pop(ordinal, None)
        if ordinal in self._files:
            self._keeper.submit(0, lambda: self._remove_files(ordinal))

    def _remove_files(self, ordinal: int, newest: str | None = None) -> None:
        for name in self._files.pop(ordinal, []):
            if name != newest:
                remove(self._folder / name)
        if newest is not None:
            self._files[ordinal] = [newest]


def _between(least: Counts, counts: Counts, most: Counts) -> bool:
    return all(low <= count <= high for low, count, high in zip(least, counts, most, strict=True))


def _ordinal(row: Outcome) -> int:
    return row.ordinal if isinstance(row, ErrorRow) else row.document.ordinal

"""States that a run keeps of its documents, and how a later run goes on from them: documents that grow pay for what is new.

    OUT/states/part-….parquet     a row a document that is longer than a segment; `schemas.STATES_SCHEMA`
        doc_id, position              whose, and how many tokens lie before it
        prefix_length, prefix_sha256  the beginning of the document that it depends on (`tokenize.prefix`)
        state                         a frame, as a carry's file is one (`carry`), owned by the binding and the prefix

A state is bound to what decides its numbers (`fingerprint.binding`), not to a run or a row: who begins alike may go on from it.

It is written twice: to the shard's journal when it comes, and from memory to the shard's part. Not once, though it is large: a part
is nothing before its footer, and goes with its attempt, so that after a stop all that has finished in the shard would be computed
again for want of its states. Nor from the journal to the part, which would read it in between.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from longscan.pipeline.errors import OutputError
from longscan.pipeline.keep.carry import Layout, Owner, SavedCarry, parse_carry, save_carry
from longscan.pipeline.keep.rowcodec import Counts
from longscan.pipeline.records import Cut, Document, HostCarry, Kept, Prefix, StateRow
from longscan.pipeline.storage.location import Location, children
from longscan.pipeline.storage.redaction import redact
from longscan.pipeline.tokenize.prefix import begins_with
from longscan.pipeline.wording import plural

STATES = "states"
NO_ROW = -1
"""As the owner's shard and ordinal: a kept state is of no row."""
PARTS_AT_ONCE = 16
_PART = re.compile(r"part-\d+-of-(\d+)\.parquet")

log = logging.getLogger(__name__)


def state_row(kept: Kept, bound_to: str, counts: Counts) -> StateRow:
    """counts: what the document's rows before it count up to."""
    # As if the document had come so far in one go: of equal prefixes, all runs keep the same.
    carry = replace(kept.carry, host=replace(kept.carry.host, continued_at=0))
    frame = save_carry(carry, Owner(bound_to, NO_ROW, NO_ROW, kept.prefix.sha256), counts)
    state = np.frombuffer(frame, np.uint8)
    return StateRow(kept.document, kept.carry.position, kept.prefix.length, kept.prefix.sha256, state)


def missing_parts(folder: Location) -> str:
    """Which parts of a finished run's states are not there, in words; empty where all are."""
    there = [int(found[1]) for name in children(folder) if (found := _PART.fullmatch(name)) is not None]
    if not there:
        return f"{folder} holds no part"
    return "" if len(there) >= there[0] else f"{folder} holds {len(there)} of {plural(there[0], 'part')}"


@dataclass(frozen=True, slots=True)
class KeptState:
    """Where a document goes on. `tensors` reads them: they are large."""

    host: HostCarry
    cut: Cut
    counts: Counts
    """What the rows before it count up to, in the runs before."""
    tensors: Callable[[], Mapping[str, torch.Tensor]]


class Entry(NamedTuple):
    """A state that is there."""

    part: str
    row_group: int
    row: int
    """In the row group."""
    position: int
    prefix: Prefix


class KeptStates:
    """The states of an earlier run. Safe to use from several threads; the index is read when it is first asked for."""

    def __init__(self, output: Location, bound_to: str, layout: Layout) -> None:
        """bound_to: the `fingerprint.binding` of the run that goes on. layout: of its engine's carries."""
        self.folder = output / STATES
        self._bound_to, self._layout = bound_to, layout
        self._index: dict[str, list[Entry]] | None = None
        self._reading = threading.Lock()

    def find(self, document: Document) -> KeptState | str | None:
        """The furthest state that the document can go on from; None where none is kept of it; or, in words, why it is of no use."""
        found: str | None = None
        for entry in self._entries().get(document.doc_id, ()):
            if not begins_with(document, entry.prefix):
                found = "the document does not begin any more with what it was made of"
                continue
            parsed = self._read(entry)
            if isinstance(parsed, str):
                found = parsed
                continue
            saved = parsed[0]
            host = replace(saved.host, continued_at=saved.host.position)
            return KeptState(host, saved.cut, saved.counts, partial(self._tensors, entry))
        return found

    def _entries(self) -> Mapping[str, list[Entry]]:
        with self._reading:
            if self._index is None:
                self._index = read_index(self.folder)
        return self._index

    def _read(self, entry: Entry) -> tuple[SavedCarry, dict[str, torch.Tensor]] | str:
        try:
            with _opened(self.folder / entry.part) as part:
                state = part.read_row_group(entry.row_group, columns=["state"]).column(0)[entry.row].as_buffer()
        except Exception as error:  # each file system has exceptions of its own
            return f"{self.folder / entry.part}: cannot be read: {redact(str(error))}"
        return parse_carry(memoryview(state), Owner(self._bound_to, NO_ROW, NO_ROW, entry.prefix.sha256), self._layout)

    def _tensors(self, entry: Entry) -> Mapping[str, torch.Tensor]:
        parsed = self._read(entry)
        if isinstance(parsed, str):
            raise OutputError(
                f"{self.folder / entry.part}: a state that was whole cannot be used any more: {parsed}; the shard is tried again"
            )
        return parsed[1]


def read_index(folder: Location) -> dict[str, list[Entry]]:
    """The states in a folder by their documents' ids, without the states. Documents may share an id: all theirs, the furthest first."""
    if gone := missing_parts(folder):
        log.warning("states are gone, and documents begin anew for want of them: %s", gone)
    index: dict[str, list[Entry]] = {}
    with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
        parts = [folder / name for name in children(folder) if name.endswith(".parquet")]
        for entries in pool.map(_part_entries, parts):
            for doc_id, entry in entries:
                index.setdefault(doc_id, []).append(entry)
    for of_id in index.values():
        of_id.sort(key=lambda entry: -entry.position)
    return index


def _part_entries(place: Location) -> list[tuple[str, Entry]]:
    entries = []
    try:
        with _opened(place) as part:
            for group in range(part.metadata.num_row_groups):
                rows = part.read_row_group(group, columns=["doc_id", "position", "prefix_length", "prefix_sha256"]).to_pylist()
                for row, of in enumerate(rows):
                    prefix = Prefix(of["prefix_length"], of["prefix_sha256"])
                    entries.append((of["doc_id"], Entry(place.name, group, row, of["position"], prefix)))
    except Exception as error:  # each file system has exceptions of its own
        log.warning("%s: these states cannot be read; their documents begin anew: %s", place, redact(str(error)))
        return []
    return entries


@contextmanager
def _opened(place: Location) -> Iterator[pq.ParquetFile]:
    with place.fs.open(place.path, "rb") as file:
        yield pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=False)

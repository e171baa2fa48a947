"""States that a run keeps of its documents, and how a later run goes on from them: documents that grow pay for what is new.

    OUT/states/part-….parquet     a row a document that is longer than a segment; `schemas.STATES_SCHEMA`
        doc_id, position              whose, and how many tokens lie before it
        prefix_length, prefix_sha256  the beginning of the document that it depends on (`tokenize.prefix`)
        state                         a frame, as a carry's file is one (`carry`), owned by the binding and the prefix

A state is bound to what decides its numbers (`binding`), not to a run or to a row: whoever has the same beginning may go on from it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from longscan.pipeline.carry import Layout, Owner, SavedCarry, parse_carry, save_carry
from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import ConfigError, OutputError
from longscan.pipeline.find import spot
from longscan.pipeline.fingerprint import Facts, explain_difference, fingerprint
from longscan.pipeline.ledger import RUN
from longscan.pipeline.model import Mamba2Geometry
from longscan.pipeline.records import Cut, Document, HostCarry, Kept, Prefix, StateRow
from longscan.pipeline.redaction import redact
from longscan.pipeline.rowcodec import Counts
from longscan.pipeline.storage import Location, children, exists, locate, read_bytes
from longscan.pipeline.tokenize import TextTokenizer
from longscan.pipeline.tokenize.prefix import begins_with
from longscan.pipeline.wording import plural

STATES = "states"
SUCCESS = "_SUCCESS"
NO_ROW = -1
"""As the owner's shard and ordinal: a kept state is of no row."""
PARTS_AT_ONCE = 16
MOST_STATE_BYTES = 2_000_000_000
_PART = re.compile(r"part-\d+-of-(\d+)\.parquet")

log = logging.getLogger(__name__)


def state_facts(facts: Mapping[str, Any]) -> Facts:
    """Of a run's facts, or of a provenance, those that the numbers in its documents' states depend on, and which sums are in them."""
    model, task, engine = facts["model"], facts["task"], facts["engine"]
    tokenizer = model.get("tokenizer")
    settings: Facts = {"name": task["name"]}
    if "embedding" in task:
        settings["embedding"] = {name: task["embedding"][name] for name in ("pooling", "window_tokens", "prompt_text")}
    settings |= {name: task[name] for name in ("score", "classify") if name in task}
    return {
        "model": {name: model[name] for name in ("content", "dtype", "decay_scale", "context_id", "prompt_ids")},
        "tokenizer": None if tokenizer is None else {name: value for name, value in tokenizer.items() if name != "commit"},
        "task": settings,
        "engine": {name: engine[name] for name in ("backend", "segment_tokens", "reset_tokens", "span_tiles")},
        "versions": facts["versions"],
    }


def binding(facts: Mapping[str, Any]) -> str:
    """Hash of the `state_facts`: only a run of the same one goes on from a state."""
    return fingerprint(state_facts(facts))


def state_row(kept: Kept, bound_to: str, counts: Counts) -> StateRow:
    """counts: what the document's rows before it count up to."""
    # As if the document had come so far in one go: of equal prefixes, all runs keep the same.
    carry = replace(kept.carry, host=replace(kept.carry.host, continued_at=0))
    frame = save_carry(carry, Owner(bound_to, NO_ROW, NO_ROW, kept.prefix.sha256), counts)
    state = np.frombuffer(frame, np.uint8)
    return StateRow(kept.document, kept.carry.position, kept.prefix.length, kept.prefix.sha256, state)


def earlier_run(config: JobConfig) -> Facts | None:
    """The facts of the run at `input.state_path`, or None where none is named.

    Raises ConfigError where there is no finished run that kept states.
    """
    path = config.input.state_path
    if path is None:
        return None
    place = locate(path, ConfigError)
    expected = f"input.state_path: expected the output of a finished run with output.keep_state=true, found {place}"
    output = locate(config.output.path, OutputError)
    if spot(place) == spot(output):
        raise ConfigError(f"{expected}, which is output.path: a run that goes on from another's states writes to a folder of its own")
    try:
        data = read_bytes(place / RUN / "fingerprint.json")
        finished = exists(place / SUCCESS)
        facts: Facts | None = None if data is None else dict(json.loads(data)["facts"])
        gone = _missing_parts(place / STATES)
        begun = not config.output.overwrite and exists(output / RUN / "fingerprint.json")
    except Exception as error:  # each file system has exceptions of its own
        raise ConfigError(f"{expected}, which cannot be read: {redact(str(error))}") from error
    if facts is None:
        raise ConfigError(f"{expected}, which is no run of longscan")
    if not finished:
        raise ConfigError(f"{expected}, which is not finished: run its command again until it is")
    if not facts.get("output", {}).get("keep_state"):
        raise ConfigError(f"{expected}, which was made without it")
    try:
        state_facts(facts)
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{expected}, made by another version of longscan, as this one does not know its settings: {error!r}") from error
    if gone and not begun:
        raise ConfigError(
            f"{expected}, whose states are gone: {gone}. Leave input.state_path out to compute every document from its beginning"
        )
    return facts


def _missing_parts(folder: Location) -> str:
    """Which parts of a finished run's states are not there, in words; empty where all are."""
    there = [int(found[1]) for name in children(folder) if (found := _PART.fullmatch(name)) is not None]
    if not there:
        return f"{folder} holds no part"
    return "" if len(there) >= there[0] else f"{folder} holds {len(there)} of {plural(there[0], 'part')}"


def check_bound(earlier: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise ConfigError, and say what differs, where a run of these facts cannot go on from an earlier one's states."""
    changes = explain_difference(state_facts(earlier), state_facts(facts))
    if changes:
        lines = "\n".join(f"  {line}" for line in changes)
        raise ConfigError(
            "input.state_path: expected a run whose states this one can go on from. What changed from that run to this one:\n"
            f"{lines}\nSet these keys as they were, or leave input.state_path out to compute every document from its beginning"
        )


def check_keeps(tokenizer: TextTokenizer | None, geometry: Mamba2Geometry) -> None:
    """Raise ConfigError where no state could be kept. tokenizer: None where documents bring token ids."""
    if tokenizer is not None and tokenizer.cuts.reason is not None:
        raise ConfigError(
            "output.keep_state: expected a tokenizer whose texts can be shown to be safe to cut somewhere, so that a longer text has "
            f"the same tokens up to there; found one of which that cannot be said, because {tokenizer.cuts.reason}. "
            "Set output.keep_state=false, or give token ids in input.tokens_column"
        )
    if geometry.state_bytes(4) > MOST_STATE_BYTES:
        raise ConfigError(
            f"output.keep_state: expected a model whose state is at most {MOST_STATE_BYTES} bytes, which a value of a Parquet file can "
            f"hold, found one of {geometry.state_bytes(4)}; set output.keep_state=false"
        )


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
        """bound_to: the `binding` of the run that goes on. layout: of its engine's carries."""
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
                self._index = self._read_index()
        return self._index

    def _read_index(self) -> dict[str, list[Entry]]:
        """Documents may share an id: all their states, the furthest first."""
        if gone := _missing_parts(self.folder):
            log.warning("states are gone, and documents begin anew for want of them: %s", gone)
        index: dict[str, list[Entry]] = {}
        with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
            for entries in pool.map(self._part_entries, [name for name in children(self.folder) if name.endswith(".parquet")]):
                for doc_id, entry in entries:
                    index.setdefault(doc_id, []).append(entry)
        for of_id in index.values():
            of_id.sort(key=lambda entry: -entry.position)
        return index

    def _part_entries(self, name: str) -> list[tuple[str, Entry]]:
        entries = []
        try:
            with self._opened(name) as part:
                for group in range(part.metadata.num_row_groups):
                    rows = part.read_row_group(group, columns=["doc_id", "position", "prefix_length", "prefix_sha256"]).to_pylist()
                    for row, of in enumerate(rows):
                        prefix = Prefix(of["prefix_length"], of["prefix_sha256"])
                        entries.append((of["doc_id"], Entry(name, group, row, of["position"], prefix)))
        except Exception as error:  # each file system has exceptions of its own
            log.warning("%s: these states cannot be read; their documents begin anew: %s", self.folder / name, redact(str(error)))
            return []
        return entries

    def _read(self, entry: Entry) -> tuple[SavedCarry, dict[str, torch.Tensor]] | str:
        try:
            with self._opened(entry.part) as part:
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

    @contextmanager
    def _opened(self, name: str) -> Iterator[pq.ParquetFile]:
        place = self.folder / name
        with place.fs.open(place.path, "rb") as file:
            yield pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=False)

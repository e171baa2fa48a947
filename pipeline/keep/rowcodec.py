"""Rows of the output <-> frames of the journal: every number comes back with its bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from longscan.pipeline.keep.frames import Buffer, pack
from longscan.pipeline.records import Document, DocumentRow, ErrorRow, Outcome, PositionRow, StateRow, TokensRow, WindowRow

KINDS: Mapping[str, type[Outcome]] = {
    "window": WindowRow,
    "tokens": TokensRow,
    "position": PositionRow,
    "state": StateRow,
    "document": DocumentRow,
    "error": ErrorRow,
}

_KINDS = {of_kind: kind for kind, of_kind in KINDS.items()}
_FIELDS = {of_kind: [(field.name, field.default is None) for field in fields(of_kind) if field.name != "document"] for of_kind in _KINDS}
"""Of each kind of rows the fields, and whether None need not be said."""

_VALUES = {of_kind: attrgetter(*[name for name, _ in of_fields]) for of_kind, of_fields in _FIELDS.items()}
"""Their values, all at once: every document has a row, and all of this holds Python's lock."""

ENDS = (DocumentRow, ErrorRow)
"""Rows with which a document ends."""

PLAIN = (str, int, float)
"""Types that JSON takes, and those made of them, numpy's own float among them."""

FRAME_BYTES = 1 << 20
"""A frame takes no more rows once its arrays are so large: what is read back is a frame at a time."""

Counts = tuple[int, int, int, int]
"""Of a document: windows, tokens in tokens/, positions, states; of each the first ones, none left out."""
NONE: Counts = (0, 0, 0, 0)


def after_row(counts: Counts, row: Outcome) -> Counts | None:
    """The counts with this row, which ends no document; None where it is not the next of its kind."""
    if isinstance(row, ENDS):
        return counts
    windows, tokens, positions, states = counts
    if isinstance(row, WindowRow):
        return (windows + 1, tokens, positions, states) if row.window_index == windows else None
    if isinstance(row, TokensRow):
        return (windows, tokens + len(row.token_ids), positions, states) if row.token_start == tokens else None
    if isinstance(row, PositionRow):
        return (windows, tokens, positions + 1, states) if row.index == positions else None
    return (windows, tokens, positions, 1) if not states else None


class Run(NamedTuple):
    """Consecutive rows of one document."""

    ordinal: int
    digest: str
    """Of the document's content."""
    before: Counts
    """What its rows count up to without these, and with them."""
    after: Counts
    rows: Sequence[Outcome]


def pack_runs(runs: Iterable[Run]) -> list[bytes]:
    """Frames of rows, each of those of several documents, as long as they are small.

    header  docs: a list of {doc (ordinal), digest, before, after, ends (the document ends with them), at (where their arrays begin in
            the body), rows: [[kind, {field: value}], ...]}; an array stands as {"array": [dtype, length]}, a field that is None by
            default and is None is left out
    body    the arrays of the rows, in order
    """
    frames: list[bytes] = []
    docs: list[dict[str, Any]] = []
    body: list[Buffer] = []
    size = 0
    for ordinal, digest, before, after, rows in runs:
        if size >= FRAME_BYTES:
            frames.append(pack({"docs": docs}, body))
            docs, body, size = [], [], 0
        first = len(body)
        described = [[_KINDS[type(row)], _describe(row, body)] for row in rows]
        ends = isinstance(rows[-1], ENDS)
        docs.append({"doc": ordinal, "digest": digest, "before": before, "after": after, "ends": ends, "at": size, "rows": described})
        size += sum(map(len, body[first:]))
    # Small arrays as one: the checksum gives Python's lock away, and wants it back, at each piece.
    return [*frames, pack({"docs": docs}, [b"".join(body)] if size < FRAME_BYTES else body)] if docs else frames


def unpack_rows(run: Mapping[str, Any], body: memoryview, document: Document) -> Iterator[Outcome]:
    """The rows of one of a frame's `docs`; `document` stands in them, as in those that were packed."""
    arrays = _Arrays(body, run["at"])
    for kind, described in run["rows"]:
        values: dict[str, Any] = {name: arrays.restore(value) for name, value in described.items()}
        yield KINDS[kind](**values) if kind == "error" else KINDS[kind](**values | {"document": document})


def _describe(row: Outcome, body: list[Buffer]) -> dict[str, Any]:
    described = {}
    for (name, may_be_left_out), value in zip(_FIELDS[type(row)], _VALUES[type(row)](row), strict=True):
        if type(value) in PLAIN:
            described[name] = value
        elif value is not None or not may_be_left_out:
            described[name] = _value(value, body)
    return described


def _value(value: Any, body: list[Buffer]) -> Any:
    if isinstance(value, np.ndarray):
        body.append(np.ascontiguousarray(value).data.cast("B") if value.size else b"")
        return {"array": [value.dtype.str, len(value)]}
    if isinstance(value, dict):
        return {name: _value(part, body) for name, part in value.items()}
    return value.item() if isinstance(value, np.generic) and not isinstance(value, PLAIN) else value


class _Arrays:
    """The arrays of a body, taken one after the other."""

    def __init__(self, body: memoryview, at: int) -> None:
        self._body = body
        self._at = at

    def restore(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "array" in value:
            return self._take(*value["array"])
        return {name: self.restore(part) for name, part in value.items()}

    def _take(self, dtype: str, count: int) -> npt.NDArray[Any]:
        array = np.frombuffer(self._body, dtype, count, self._at).copy()  # else each keeps its whole frame in memory
        self._at += array.nbytes
        return array

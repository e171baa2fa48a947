"""Rows of the output <-> frames of the journal: every number comes back with its bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
from longscan.pipeline.frames import Buffer, pack
from longscan.pipeline.records import Document, DocumentRow, ErrorRow, Outcome, PositionRow, StateRow, TokensRow, WindowRow

KINDS: Mapping[str, type[Outcome]] = {
    "window": WindowRow,
    "tokens": TokensRow,
    "position": PositionRow,
    "state": StateRow,
    "document": DocumentRow,
    "error": ErrorRow,
}

Counts = tuple[int, int, int, int]
"""Of a document: windows, tokens in tokens/, positions, states; of each the first ones, none left out."""
NONE: Counts = (0, 0, 0, 0)


def after_row(counts: Counts, row: Outcome) -> Counts | None:
    """The counts with this row, which ends no document; None where it is not the next of its kind."""
    windows, tokens, positions, states = counts
    if isinstance(row, WindowRow):
        return (windows + 1, tokens, positions, states) if row.window_index == windows else None
    if isinstance(row, TokensRow):
        return (windows, tokens + len(row.token_ids), positions, states) if row.token_start == tokens else None
    if isinstance(row, PositionRow):
        return (windows, tokens, positions + 1, states) if row.index == positions else None
    if isinstance(row, StateRow):
        return (windows, tokens, positions, 1) if not states else None
    return counts


def pack_rows(ordinal: int, digest: str, rows: Sequence[Outcome], before: Counts, after: Counts) -> bytes:
    """A frame of consecutive rows of one document.

    digest: of its content. before, after: what the document's rows count up to, without and with these.

    header  doc (ordinal), digest, before, after, ends (the document ends with them), rows: [[kind, {field: value}], ...]; an array
            stands as {"array": [dtype, length]}
    body    the arrays of the rows, in order
    """
    body: list[Buffer] = []
    described = [[kind, _describe(row, body)] for row in rows for kind, of_kind in KINDS.items() if isinstance(row, of_kind)]
    ends = any(isinstance(row, DocumentRow | ErrorRow) for row in rows)
    return pack({"doc": ordinal, "digest": digest, "before": before, "after": after, "ends": ends, "rows": described}, body)


def unpack_rows(header: Mapping[str, Any], body: memoryview, document: Document) -> Iterator[Outcome]:
    """The rows of a frame; `document` stands in them, as in those that were packed."""
    arrays = _Arrays(body)
    for kind, described in header["rows"]:
        values: dict[str, Any] = {name: arrays.restore(value) for name, value in described.items()}
        yield KINDS[kind](**values) if kind == "error" else KINDS[kind](**values | {"document": document})


def _describe(row: Outcome, body: list[Buffer]) -> dict[str, Any]:
    return {field.name: _value(getattr(row, field.name), body) for field in fields(row) if field.name != "document"}


def _value(value: Any, body: list[Buffer]) -> Any:
    if isinstance(value, np.ndarray):
        body.append(np.ascontiguousarray(value).data.cast("B") if value.size else b"")
        return {"array": [value.dtype.str, len(value)]}
    if isinstance(value, Mapping):
        return {name: _value(part, body) for name, part in value.items()}
    return value.item() if isinstance(value, np.generic) else value


class _Arrays:
    """The arrays of a body, taken one after the other."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

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

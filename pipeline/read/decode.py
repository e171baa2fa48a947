"""A batch of an input file's columns -> the parts of its documents: their ids, texts or token ids, and what passes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from longscan.pipeline.arrays import strings, to_numpy
from longscan.pipeline.read.columns import STRING_OF, STRINGS, Columns
from longscan.pipeline.records import Ids

NO_COLUMNS = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
MAX_ID = np.iinfo(np.int32).max
MOST_ID = 1 << 16
"""Characters of a document's id: it is written with each of the document's windows, tokens and positions."""

_OFFSETS = {pa.string(): np.int32, pa.large_string(): np.int64}
"""Of strings in one buffer, the type of the offsets."""


class Bad(Exception):
    """A row that cannot become a document. kind: one word for errors/, to count by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Row(NamedTuple):
    """One decoded row; `doc_id` is None where the input names no id column."""

    doc_id: str | None
    text: memoryview | None
    token_ids: Ids | None
    passthrough: pa.RecordBatch
    positions: npt.NDArray[np.int64] | None = None


class BadRow(NamedTuple):
    doc_id: str | None
    bad: Bad


def decode(batch: pa.RecordBatch, columns: Columns, passthrough: pa.Schema) -> Iterator[Row | BadRow]:
    """Rows of a batch in order, each a document's parts or what is wrong with it. Texts are views of the batch's own memory."""
    ids = _ids(batch.column(columns.id)) if columns.id else None
    texts = _texts(batch.column(columns.text)) if columns.text else None
    token_ids = _token_ids(batch.column(columns.tokens)) if columns.tokens else None
    positions = _positions(batch.column(columns.positions)) if columns.positions else None
    passed = _passthrough(batch, passthrough)
    for i in range(batch.num_rows):
        doc_id = None
        try:
            doc_id = ids(i) if ids else None
            chosen = positions(i) if positions else None
            row = Row(doc_id, texts(i) if texts else None, token_ids(i) if token_ids else None, passed(i), chosen)
        except Bad as bad:
            yield BadRow(doc_id, bad)
        else:
            yield row


def _plain(column: pa.Array) -> pa.Array:
    column = column.storage if isinstance(column.type, pa.BaseExtensionType) else column
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _valid(array: pa.Array) -> bool:
    """Whether all of an array's strings are UTF-8, by Arrow's own check (4 GB/s, without a copy)."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _texts(column: pa.Array) -> Callable[[int], memoryview]:
    """A function from a row to its text's bytes, checked; raises Bad where the text is null or not UTF-8."""
    column = _as_strings(column)
    all_valid = column.type == pa.null() or _valid(column)
    if all_valid and not column.null_count and column.type in _OFFSETS:
        return _slices(column)

    def text(i: int) -> memoryview:
        value = column[i]
        if not value.is_valid:
            raise Bad("NullText", "expected a text, found null")
        buffer = value.as_buffer()
        if not all_valid and not _valid(column.slice(i, 1)):
            raise Bad("InvalidUtf8", f"expected UTF-8, found {_first_fault(buffer)}")
        return memoryview(buffer).cast("B")

    return text


def _slices(column: pa.Array) -> Callable[[int], memoryview]:
    """The same for strings that are all there and all valid, by their offsets: a tenth of the time for short ones."""
    _, offsets, data = column.buffers()
    kind = _OFFSETS[column.type]
    ends = np.frombuffer(offsets, kind)[column.offset : column.offset + len(column) + 1].tolist()
    view = memoryview(data).cast("B") if data is not None else memoryview(b"")
    return lambda i: view[ends[i] : ends[i + 1]]


def _as_strings(column: pa.Array) -> pa.Array:
    """Bytes as the strings that they may be, without a copy and unchecked."""
    column = _plain(column)
    return column.view(STRING_OF[column.type]) if column.type in STRING_OF else column


def _first_fault(buffer: pa.Buffer, window: int = 1 << 16) -> str:
    """Where the text stops being UTF-8: found in windows, so that a giant text is not decoded whole."""
    view = memoryview(buffer).cast("B")
    start = 0
    while start < len(view):
        piece = bytes(view[start : start + window])
        try:
            piece.decode()
        except UnicodeDecodeError as fault:
            if fault.start > 0 and fault.end == len(piece) and start + window < len(view):  # a character cut by the window
                start += fault.start
                continue
            return f"byte 0x{piece[fault.start]:02x} at {start + fault.start} of {len(view)} ({fault.reason})"
        start += window
    return "an invalid byte"


def _token_ids(column: pa.Array) -> Callable[[int], Ids]:
    """A function from a row to its token ids; raises Bad where they are null, or do not fit int32."""

    def token_ids(i: int) -> Ids:
        value = column[i]
        if not value.is_valid:
            raise Bad("NullTokenIds", "expected a list of token ids, found null")
        items = value.values
        if items.null_count:
            raise Bad("InvalidTokenIds", f"expected token ids, found {items.null_count} nulls among them")
        numbers = to_numpy(items)
        for extreme in (int(numbers.min()), int(numbers.max())) if len(numbers) else ():
            if not 0 <= extreme <= MAX_ID:
                raise Bad("InvalidTokenIds", f"expected token ids from 0 to {MAX_ID}, found {extreme}")
        return numbers.astype(np.int32, copy=False)

    return token_ids


def _positions(column: pa.Array) -> Callable[[int], npt.NDArray[np.int64]]:
    """A function from a row to its positions; raises Bad where they are null, negative or not ascending."""

    def positions(i: int) -> npt.NDArray[np.int64]:
        value = column[i]
        if not value.is_valid or value.values.null_count:
            raise Bad("NullPositions", "expected a list of positions, found null" + (" among them" if value.is_valid else ""))
        numbers = to_numpy(value.values).astype(np.int64)
        wrong = np.flatnonzero(np.diff(numbers, prepend=0) < 0)
        if len(wrong):
            raise Bad("InvalidPositions", f"expected positions from 0 up, ascending, found {numbers[wrong[0]]} at index {wrong[0]}")
        return numbers

    return positions


def _ids(column: pa.Array) -> Callable[[int], str]:
    """A function from a row to its id as a string; raises Bad where it is null, not UTF-8 or longer than any id."""
    column = _as_strings(column)
    if pa.types.is_fixed_size_binary(column.type):
        column = strings([_hex(value.as_py()) for value in column])
    elif column.type not in STRINGS:
        column = pc.cast(column, pa.string())
    all_valid = _valid(column)
    if all_valid and not column.null_count:
        known: list[str] = column.to_pylist()
        if all(len(name) <= MOST_ID for name in known):
            return known.__getitem__

    def doc_id(i: int) -> str:
        value = column[i]
        if not value.is_valid:
            raise Bad("NullId", "expected an id, found null")
        if not all_valid and not _valid(column.slice(i, 1)):
            raise Bad("InvalidUtf8", f"expected an id in UTF-8, found {_first_fault(value.as_buffer())}")
        name = str(value.as_py())
        if len(name) > MOST_ID:
            raise Bad("IdTooLong", f"expected an id of at most {MOST_ID} characters, found {len(name)}, which begins {name[:20]!r}")
        return name

    return doc_id


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def _passthrough(batch: pa.RecordBatch, schema: pa.Schema) -> Callable[[int], pa.RecordBatch]:
    """A function from a row to its passthrough columns, as one row of `schema`; raises Bad where they do not fit it."""
    if not schema.names:
        return lambda _: NO_COLUMNS
    whole = _fitted(batch, schema)

    def passed(i: int) -> pa.RecordBatch:
        if isinstance(whole, pa.RecordBatch):
            return whole.slice(i, 1)
        row = _fitted(batch.slice(i, 1), schema)
        if isinstance(row, Bad):
            raise row
        return row

    return passed


def _fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch | Bad:
    columns = []
    for field in schema:
        column = _plain(batch.column(field.name))
        try:
            column = column if column.type == field.type else column.cast(field.type)
            column.validate(full=True)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            return Bad("InvalidPassthrough", f"expected {field.name} as {field.type}, as in the first file: {error}")
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)

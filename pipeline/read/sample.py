"""A bounded look at the input's rows, for a dry run: how long the longest of them are, and how many bytes a token has.

Opens files, changes nothing. What a footer says is a row group's sum, and its mean says nothing of the longest row in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa
from longscan.pipeline.errors import InputError
from longscan.pipeline.read.columns import Columns
from longscan.pipeline.read.decode import BadRow, Row, decode
from longscan.pipeline.read.parquet import GroupRows, ParquetSource, Unreadable
from longscan.pipeline.read.scan import ID_BYTES
from longscan.pipeline.shards import SourceFile
from longscan.pipeline.tokenize import TextTokenizer

MOST_BYTES = 32 << 20
"""Of rows that are looked at; the last of them may go beyond it, by what `MOST_PAGE_BYTES` lets it."""
MOST_PAGE_BYTES = 256 << 20
"""That pages may take at once: a row that needs more is not looked at."""
PLACES, ROWS = 8, 4
"""Row groups, spread over the input, and their first rows, whose texts are tokenized."""
TEXT_BYTES = 1 << 15
"""Of such a text."""
ENOUGH_TOKENS = 1000
"""With fewer, what their time is made of is the call."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Sizes are in bytes, of a text in UTF-8, of token ids at 4 bytes each."""

    longest: int
    """The longest row that was looked at, or has a row group of its own."""
    rows: int
    """Rows of which that is known."""
    beyond: int
    """At most, a row can have of which it is not known; 0 where there is none."""
    bytes_per_token: float | None
    """Of the texts that were tokenized; None where none was."""
    tokenize_s: float = 0.0
    """CPU seconds of that, a token; 0 where there were too few to tell."""


@dataclass(frozen=True, slots=True)
class _Group:
    file: SourceFile
    index: int
    rows: int
    size: int


def look(
    files: Sequence[SourceFile],
    columns: Columns,
    tokenizer: TextTokenizer | None,
    *,
    limit: int | None = None,
    most_bytes: int = MOST_BYTES,
) -> Sample:
    """Look at the rows of the largest row groups, until `most_bytes` are read, and tokenize the beginnings of some texts.

    files: as `scan` returns them. limit: rows of the whole input. What cannot be read is passed over.
    """
    columns = Columns(columns.text, columns.tokens, None, ())
    groups = list(_groups(files, limit))
    longest = rows = beyond = 0
    for group in sorted(groups, key=lambda group: -group.size):
        lengths = [group.size] if group.rows == 1 else []
        if group.rows > 1 and most_bytes > 0:
            lengths = list(_lengths(group, columns, most_bytes))
            most_bytes -= sum(lengths)
        longest, rows = max(longest, *lengths, 0), rows + len(lengths)
        if len(lengths) < group.rows:
            beyond = max(beyond, group.size - sum(lengths))
    if columns.tokens:
        return Sample(longest, rows, beyond, float(ID_BYTES))
    return Sample(longest, rows, beyond, *_tokenized(groups, columns, tokenizer))


def _groups(files: Sequence[SourceFile], limit: int | None) -> Iterator[_Group]:
    left = limit
    for file in files:
        for index, group in enumerate(file.row_groups):
            rows = group.num_rows if left is None else min(group.num_rows, left)
            left = None if left is None else left - rows
            if rows:
                yield _Group(file, index, rows, group.num_bytes * rows // group.num_rows)


def _lengths(group: _Group, columns: Columns, most_bytes: int) -> Iterator[int]:
    """Of its first rows, until they are more than `most_bytes`."""
    for row in _rows(group, columns):
        length = 0
        if isinstance(row, Row):
            length = row.text.nbytes if row.text is not None else ID_BYTES * len(row.token_ids) if row.token_ids is not None else 0
        yield length
        most_bytes -= length
        if most_bytes <= 0:
            return


def _rows(group: _Group, columns: Columns) -> Iterator[Row | BadRow]:
    with suppress(Unreadable, InputError), closing(ParquetSource(group.file, most_bytes=MOST_PAGE_BYTES)) as source:
        if columns.complaint(source.schema) is None:
            reader = GroupRows(source, group.index, columns.names)
            while reader.row < group.rows:
                yield from decode(reader.take(group.rows - reader.row), columns, pa.schema([]))


def _tokenized(groups: Sequence[_Group], columns: Columns, tokenizer: TextTokenizer | None) -> tuple[float | None, float]:
    """Bytes a token, of the first rows of some groups, and the CPU seconds that a token took."""
    spread = groups[:: max(1, len(groups) // PLACES)][:PLACES]
    rows = [row for group in spread for row in islice(_rows(group, columns), ROWS)]
    begun = [bytes(row.text[:TEXT_BYTES]) for row in rows if isinstance(row, Row) and row.text]
    texts = [text.decode("utf-8", "ignore") for text in begun]
    if tokenizer is None or not texts:
        return None, 0.0
    tokenizer.encode(texts[:1])  # not its first use, which builds tables
    began = time.process_time()
    tokens = sum(len(found.ids) for found in tokenizer.encode(texts))
    seconds = time.process_time() - began
    return sum(map(len, begun)) / max(tokens, 1), seconds / tokens if tokens >= ENOUGH_TOKENS else 0.0

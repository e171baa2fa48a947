"""Bytes and values of one column, row group by row group, decoded from a Parquet footer (Thrift's compact protocol).

Arrow gives them too, but ends the whole process where a damaged footer contradicts itself; here it is a ValueError.
Field numbers are those of parquet.thrift: FileMetaData 4 row_groups; RowGroup 1 columns, 2 total_byte_size; ColumnChunk 3
meta_data; ColumnMetaData 3 path_in_schema, 5 num_values, 6 total_uncompressed_size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BOOLEANS, BYTE, DOUBLE, BINARY, LISTS, MAP, STRUCT = (1, 2), 3, 7, 8, (9, 10), 11, 12
"""Types of the compact protocol; 4, 5 and 6 are integers in zigzag varints."""


@dataclass(frozen=True, slots=True)
class ColumnSize:
    """Of a column in one row group, all its leaves together."""

    num_bytes: int
    """Uncompressed, as they are encoded."""
    num_values: int
    total_bytes: int
    """Of all columns of the row group."""


def column_sizes(footer: bytes, column: str, *, most_chunks: int) -> list[ColumnSize]:
    """Sizes of `column` in the first row groups, as many as have about `most_chunks` column chunks together, at least one.

    footer: the FileMetaData, without the length and the magic bytes behind it. Raises ValueError where it is damaged.
    """
    reader = Compact(footer)
    sizes: list[ColumnSize] = []
    chunks = 0
    try:
        for field, kind in reader.fields():
            if (field, kind) != (4, 9):
                reader.skip(kind)
                continue
            count, _ = reader.list_header()
            for _ in range(count):
                size, seen = _row_group(reader, column)
                sizes.append(size)
                chunks += seen
                if chunks >= most_chunks:
                    return sizes
            return sizes
    except (IndexError, RecursionError) as error:
        raise ValueError(f"a footer of {len(footer)} bytes that ends before what it holds does") from error
    return sizes


def _row_group(reader: Compact, column: str) -> tuple[ColumnSize, int]:
    num_bytes = num_values = total = count = 0
    for field, kind in reader.fields():
        if (field, kind) == (1, 9):
            count, _ = reader.list_header()
            for _ in range(count):
                path, values, size = _column_chunk(reader)
                if path == column or path.startswith(column + "."):
                    num_bytes += size
                    num_values += values
        elif (field, kind) == (2, 6):
            total = reader.integer()
        else:
            reader.skip(kind)
    return ColumnSize(num_bytes, num_values, total), count


def _column_chunk(reader: Compact) -> tuple[str, int, int]:
    """Path, values and uncompressed bytes of a column chunk."""
    path, values, size = "", 0, 0
    for field, kind in reader.fields():
        if (field, kind) != (3, STRUCT):
            reader.skip(kind)
            continue
        for inner, inner_kind in reader.fields():
            if (inner, inner_kind) == (3, 9):
                count, _ = reader.list_header()
                path = ".".join(reader.binary().decode("utf-8", "replace") for _ in range(count))
            elif (inner, inner_kind) == (5, 6):
                values = reader.integer()
            elif (inner, inner_kind) == (6, 6):
                size = reader.integer()
            else:
                reader.skip(inner_kind)
    return path, values, size


class Compact:
    """A place in a buffer of the compact protocol. IndexError where it ends too early."""

    def __init__(self, buffer: bytes, at: int = 0) -> None:
        self._buffer = buffer
        self.at = at

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._buffer[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def integer(self) -> int:
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def int32(self) -> int:
        """As Arrow's reader takes one: of a longer varint, what fits."""
        value = self.varint() & 0xFFFFFFFF
        return value >> 1 ^ -(value & 1)

    def binary(self) -> bytes:
        length = self.varint()
        start, self.at = self.at, self.at + length
        if self.at > len(self._buffer):
            raise IndexError
        return self._buffer[start : self.at]

    def list_header(self) -> tuple[int, int]:
        """Number of elements, and their type."""
        head = self._buffer[self.at]
        self.at += 1
        count = head >> 4
        return (self.varint() if count == 15 else count), head & 15

    def fields(self) -> Iterator[tuple[int, int]]:
        """Number and type of each field of a struct; whoever asks reads or skips it before the next."""
        field = 0
        while head := self._buffer[self.at]:
            self.at += 1
            delta = head >> 4
            field = field + delta if delta else self.integer()
            yield field, head & 15
        self.at += 1

    def skip(self, kind: int) -> None:
        if kind in (4, 5, 6):
            self.varint()
        elif kind == BINARY:
            self.binary()
        elif kind == STRUCT:
            for _, inner in self.fields():
                self.skip(inner)
        elif kind in LISTS:
            count, inner = self.list_header()
            for _ in range(count):
                self._skip_element(inner)
        elif kind in (BYTE, DOUBLE):
            self.at += 1 if kind == BYTE else 8
            if self.at > len(self._buffer):  # a list that claims 2^60 of them ends with the buffer
                raise IndexError
        elif kind == MAP:
            count = self.varint()
            kinds = self._buffer[self.at] if count else 0
            self.at += bool(count)
            for _ in range(count):
                self._skip_element(kinds >> 4)
                self._skip_element(kinds & 15)
        elif kind not in BOOLEANS:
            raise ValueError(f"a footer with a field of type {kind}, which there is none of")

    def _skip_element(self, kind: int) -> None:
        """A boolean in a list or map is a byte; as a field it is the field's type."""
        self.skip(BYTE if kind in BOOLEANS else kind)

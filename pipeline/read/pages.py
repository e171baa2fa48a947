"""An open Parquet file as Arrow reads it, whose page headers are read along: what a page will take in memory is known before it does.

A few bytes can stand for as many as one likes: zeros compress ten thousand times and more, a dictionary's value comes again and
again, and a page may claim any number of values. Arrow believes them, and takes the memory. Here every byte that it reads of a
row group passes by, once and in order a column, and what it is about to take is held against a limit.

Field numbers are those of parquet.thrift: PageHeader 1 type, 2 uncompressed_page_size, 3 compressed_page_size, 5 data_page_header,
7 dictionary_page_header, 8 data_page_header_v2; of these three 1 num_values, and encoding 2, or 4 in the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longscan.pipeline.read.footer import STRUCT, Compact

DICTIONARY_PAGE = 2
BY_DICTIONARY, BY_PREFIX = (2, 8), 7
"""Encodings in which a value may be as long as the dictionary, or the page, whatever the row takes in the file."""
VALUE_BYTES = 8
"""What a value counts for at least: a number, or its levels, an offset and a place in a builder."""
MOST_HEADER = 1 << 24
"""Bytes of a page header, as in Arrow."""
I32 = 5


class TooLarge(Exception):
    """What is asked for is not read: it would take more memory than is allowed."""


@dataclass(frozen=True, slots=True)
class Header:
    """Of a page. A field that is not there is 0."""

    num_bytes: int
    """Of the header itself."""
    kind: int
    size: int
    """Uncompressed bytes."""
    compressed: int
    num_values: int
    encoding: int


@dataclass(slots=True)
class _Stream:
    """One column chunk as it is read. Places are bytes of the file."""

    end: int
    """Of what has been read."""
    header: int
    """Of the next page header."""
    pending: bytes = b""
    """The beginning of a header that has not been read whole."""
    dictionary: int = 0
    page: int = 0
    """Bytes that these take uncompressed: the dictionary, and the newest page."""
    value: int = 0
    """Bytes that each value of the newest page may come to, beyond those of the page."""
    is_damaged: bool = False


class Pages:
    """A file for Arrow around `handle`, which is opened and closed by somebody else."""

    closed = False

    def __init__(self, handle: Any, limit: int) -> None:
        """limit: bytes that the pages of a row group may take at once, or the values of one row."""
        self._handle = handle
        self._limit = limit
        self._streams: list[_Stream] | None = None
        self._lists = False
        self._rows = 1
        self._spent = 0

    def watch(self, *, lists: bool) -> None:
        """What is read from now on are the columns of a row group, each from its start. lists: some hold lists, whose rows have no end."""
        self._streams, self._lists = [], lists
        self.begin(1)

    def begin(self, rows: int) -> None:
        """The next batch is of so many rows."""
        self._rows = rows
        self._spent = rows * self._value()

    def fitting(self, rows: int) -> int:
        """At most `rows`, as many as a batch can have."""
        value = self._value()
        return rows if rows * value <= self._limit else max(1, self._limit // value)

    def read(self, size: int = -1) -> bytes:
        """As of any file. Raises TooLarge."""
        at = self._handle.tell()
        if self._streams is not None and any(stream.is_damaged and stream.end == at for stream in self._streams):
            raise OSError(f"expected a page header at byte {at} or before, found none")
        data: bytes = self._handle.read(size)
        if self._streams is not None and data:
            self._pass(at, data)
        return data

    def seek(self, place: int, whence: int = 0) -> int:
        found: int = self._handle.seek(place, whence)
        return found

    def tell(self) -> int:
        found: int = self._handle.tell()
        return found

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def _value(self) -> int:
        return sum(stream.value for stream in self._streams or ())

    def _pass(self, at: int, data: bytes) -> None:
        assert self._streams is not None
        going_on = [stream for stream in self._streams if stream.end == at]
        if not going_on:
            going_on = [_Stream(at, at)]
            self._streams += going_on
        for stream in going_on:
            stream.end = at + len(data)
            self._headers(stream, stream.pending + data if stream.pending else data)

    def _headers(self, stream: _Stream, data: bytes) -> None:
        """Read the page headers in `data`, what has been read last of a stream, with what was pending before it."""
        start, stream.pending = stream.end - len(data), b""
        while stream.header < stream.end and not stream.is_damaged:
            try:
                header = read_header(data, stream.header - start)
            except IndexError:
                stream.pending = data[stream.header - start :]
                stream.is_damaged = len(stream.pending) > MOST_HEADER
                return
            except (ValueError, RecursionError):  # Arrow, if it comes to that, will not know what to do with it either
                stream.is_damaged = True
                return
            self._check(stream, header)
            stream.header += header.num_bytes + header.compressed

    def _check(self, stream: _Stream, header: Header) -> None:
        before = stream.value
        if header.kind == DICTIONARY_PAGE:
            stream.dictionary = header.size
        else:
            stream.page = header.size
            by_dictionary = stream.dictionary if header.encoding in BY_DICTIONARY else 0
            stream.value = header.size if header.encoding == BY_PREFIX else by_dictionary
        held = sum(each.dictionary + each.page for each in self._streams or ())
        if held > self._limit:
            raise TooLarge(
                f"pages that take {held} bytes once they are decompressed, {header.size} of them the one at byte {stream.header}"
            )
        values = header.num_values * VALUE_BYTES
        if values > self._limit:
            raise TooLarge(f"a page that claims {header.num_values} values at byte {stream.header}")
        self._spent += header.size + self._rows * max(0, stream.value - before) + (values if self._lists else 0)
        if self._spent > self._limit and (self._rows > 1 or self._lists):
            raise TooLarge(f"{self._rows} rows that may take {self._spent} bytes, up to the page at byte {stream.header}")


def read_header(data: bytes, at: int) -> Header:
    """The page header at `at`. Raises IndexError where `data` ends in it, ValueError where it is none."""
    reader = Compact(data, at)
    numbers = dict.fromkeys(("kind", "size", "compressed", "num_values", "encoding"), 0)
    plain = {1: "kind", 2: "size", 3: "compressed"}
    inner = {5: {1: "num_values", 2: "encoding"}, 7: {1: "num_values"}, 8: {1: "num_values", 4: "encoding"}}
    for field, kind in reader.fields():
        if kind == I32 and field in plain:
            numbers[plain[field]] = reader.int32()
        elif kind == STRUCT and field in inner:
            for below, inner_kind in reader.fields():
                if inner_kind == I32 and below in inner[field]:
                    numbers[inner[field][below]] = reader.int32()
                else:
                    reader.skip(inner_kind)
        else:
            reader.skip(kind)
    if min(numbers["size"], numbers["compressed"], numbers["num_values"]) < 0:
        raise ValueError(f"a page of negative size at byte {at}")
    return Header(reader.at - at, **numbers)

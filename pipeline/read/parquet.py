"""One input file, opened; one of its row groups, row by row, in memory bounded by a row (and by the page of values that a writer may
have put before them: Parquet's dictionary page, 1 MB by default).

Two kinds of failure are told apart. What the file holds is wrong (`Unreadable`): its rows become error rows, at every
attempt the same. The file cannot be got at (InputError): that may pass, so the shard fails and is tried again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from longscan.pipeline.errors import InputError
from longscan.pipeline.read.find import current_version
from longscan.pipeline.read.pages import Pages, TooLarge
from longscan.pipeline.shards import SourceFile
from longscan.pipeline.storage.location import locate
from longscan.pipeline.storage.redaction import redact
from longscan.pipeline.wording import file_version

BATCH_BYTES = 1 << 20
"""Batches grow until they hold about this much: short rows come by the hundred, a giant alone."""

BATCH_ROWS = 256
GIANT_GROUP_BYTES = 64 << 20
GIANT_GROUP_ROWS = 16
"""Rows of a batch at most, and at most in a row group so large that giants may follow on short rows: they share a batch."""

LOCAL_BUFFER, REMOTE_BUFFER = 1 << 20, 8 << 20
"""Bytes of a column read at a time. Without a buffer Arrow reads a whole column chunk."""


class Unreadable(Exception):
    """Rows that cannot be read, because of what the file holds. kind: one word for errors/, to count by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ParquetSource:
    """An open Parquet file.

    schema: its columns as they were written. Batches hold dictionaries as their values, and may differ in other types too.

    Raises Unreadable where its footer cannot be read or it is not the file that was planned with, InputError where it
    cannot be opened.
    """

    def __init__(self, file: SourceFile, *, most_bytes: int = 1 << 32) -> None:
        """most_bytes: that the pages of a row group may take in memory at once, or a row of lists (input.max_read_bytes)."""
        self.file = file
        self.most_bytes = most_bytes
        place = locate(file.path)
        try:
            self._check_unchanged(file)
            self._handle: Any = pa.OSFile(place.path) if place.is_local else place.fs.open(place.path, "rb", cache_type="none")
        except Unreadable:
            raise
        except Exception as error:  # each file system has exceptions of its own
            raise InputError(f"{file.name}: cannot be opened: {_spelled(error)}") from error
        try:
            self._open(LOCAL_BUFFER if place.is_local else REMOTE_BUFFER)
        except Exception as error:
            self.close()
            if is_corrupt(error):
                raise Unreadable("UnreadableFile", f"expected a Parquet file: {_spelled(error)}") from error
            raise InputError(f"{file.name}: its footer cannot be read: {_spelled(error)}") from error

    @property
    def metadata(self) -> pq.FileMetaData:
        return self._parquet.metadata

    def footer(self) -> bytes:
        """The footer as it lies in the file."""
        end = self._handle.seek(-8, 2)
        length = int.from_bytes(self._handle.read(4), "little")
        self._handle.seek(end - length)
        footer: bytes = self._handle.read(length)
        return footer

    def batches(self, row_group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Batches of a row group, of a single row until `set_batch_rows` says otherwise."""
        self.pages.watch(lists=any(pa.types.is_nested(self.schema.field(name).type) for name in columns))
        batches: Iterator[pa.RecordBatch] = self._parquet.iter_batches(1, [row_group], columns, use_threads=False)
        return batches

    def set_batch_rows(self, rows: int) -> None:
        """Rows of the batches from the next one on."""
        self._parquet.reader.set_batch_size(rows)

    def check_unchanged(self) -> None:
        """Raise InputError where the file has changed since it was planned with: the shard fails, and its next attempt finds out at once.

        A local file that was replaced by another is still read as it was; one that was written over is not.
        """
        try:
            if isinstance(self._handle, pa.OSFile):
                status = os.fstat(self._handle.fileno())
                size, version = status.st_size, f"mtime_ns:{status.st_mtime_ns}"
            else:
                size, version = current_version(locate(self.file.path))
        except Exception as error:  # each file system has exceptions of its own
            raise InputError(f"{self.file.name}: cannot be looked at again: {_spelled(error)}") from error
        if self._differs(size, version):
            raise InputError(f"{self.file.name}: changed while it was read")

    def close(self) -> None:
        self._handle.close()

    def _differs(self, size: int, version: str) -> bool:
        comparable = version.partition(":")[0] == self.file.version.partition(":")[0]
        return size != self.file.size or (comparable and version != self.file.version)

    def _open(self, buffer_size: int) -> None:
        options = {"pre_buffer": False, "buffer_size": buffer_size, "page_checksum_verification": True}
        self.pages = Pages(self._handle, self.most_bytes)
        self._parquet = pq.ParquetFile(self.pages, **options)
        self.schema: pa.Schema = self._parquet.schema_arrow
        if any(pa.types.is_dictionary(field.type) for field in self.schema):
            # As dictionaries, every batch would bring all values of the row group up to it: its texts would stay in memory,
            # and be copied again and again.
            self._parquet = pq.ParquetFile(self.pages, metadata=_without_arrow_schema(self.footer()), **options)
        counts = [self.metadata.row_group(g).num_rows for g in range(self.metadata.num_row_groups)]
        if sum(counts) != self.metadata.num_rows or min(counts, default=0) < 0:
            raise pa.ArrowInvalid(f"its footer contradicts itself: {self.metadata.num_rows} rows, and row groups of {counts[:10]}")

    def _check_unchanged(self, file: SourceFile) -> None:
        size, version = current_version(locate(file.path))
        if self._differs(size, version):
            planned, found = (file_version(of, exact=True) for of in (file.version, version))
            raise Unreadable(
                "FileChanged",
                f"expected the file that the run was planned with, of {file.size} bytes and version {planned}, "
                f"found {size} bytes and version {found}; run it again with a new output",
            )


class GroupRows:
    """The rows of one row group, in order, a batch at a time.

    row: the next row, counted from the group's first.
    """

    def __init__(self, source: ParquetSource, row_group: int, columns: list[str], *, careful: bool = False) -> None:
        """careful: batches of a single row, however short rows are."""
        self.source = source
        self.row_group = row_group
        self.num_rows: int = source.metadata.row_group(row_group).num_rows
        self.row = 0
        self._columns = columns
        giant = source.metadata.row_group(row_group).total_byte_size > GIANT_GROUP_BYTES
        self._most = GIANT_GROUP_ROWS if giant else BATCH_ROWS
        self._rest: pa.RecordBatch | None = None
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._batch_rows = 1
        self._careful = careful

    def take(self, most: int) -> pa.RecordBatch:
        """The next rows, at least 1 and at most `most`.

        Raises Unreadable where the next row cannot be read; nothing behind it can be then.
        """
        rest, self._rest = self._rest, None
        if rest is None:
            rest = self._load()
        if rest.num_rows > most:
            self._rest = rest.slice(most)
            rest = rest.slice(0, most)
        self.row += rest.num_rows
        return rest

    def skip(self, rows: int) -> None:
        """Go past rows without looking at them. Raises Unreadable as `take` does."""
        stop = self.row + rows
        while self.row < stop:
            self.take(stop - self.row)

    def _load(self) -> pa.RecordBatch:
        try:
            if self._batches is None:
                self._batches = self.source.batches(self.row_group, self._columns)
            self.source.pages.begin(self._batch_rows)
            batch = next(self._batches, None)
        except Exception as error:
            if not is_corrupt(error):
                raise InputError(f"{self.source.file.name}: row group {self.row_group} cannot be read: {_spelled(error)}") from error
            if self._batch_rows > 1 and not self._careful:
                return self._reload()
            raise self._complaint(error) from error
        if batch is None:
            raise Unreadable("UnreadableRows", f"row group {self.row_group}: expected {self.num_rows} rows, found {self.row}")
        self._adapt(batch)
        return batch

    def _complaint(self, error: Exception) -> Unreadable:
        where = f"row group {self.row_group}"
        if isinstance(error, TooLarge):
            return Unreadable(
                "TooLarge",
                f"{where}: expected at most {self.source.most_bytes} bytes in memory (input.max_read_bytes), found {error}; nothing of it "
                "is read from here on. Set input.max_read_bytes higher where this file is to be trusted",
            )
        if isinstance(error, MemoryError):
            return Unreadable("TooLarge", f"{where} takes more memory than there is, from here on: {_spelled(error)}")
        return Unreadable("UnreadableRows", f"{where} is damaged from here on: {_spelled(error)}")

    def _reload(self) -> pa.RecordBatch:
        """Read again up to the batch that failed, and then row by row: what lies before the damage is still good."""
        done, self.row = self.row, 0
        self._batches, self._careful, self._batch_rows = None, True, 1
        self.skip(done)
        return self._load()

    def _adapt(self, batch: pa.RecordBatch) -> None:
        if self._careful:
            return
        fitting = BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1)
        rows = self.source.pages.fitting(max(1, min(fitting, 2 * self._batch_rows, self._most)))
        if rows != self._batch_rows:
            self._batch_rows = rows
            self.source.set_batch_rows(rows)


def _without_arrow_schema(footer: bytes) -> pq.FileMetaData:
    """The footer as if Arrow's own schema were not in it, which alone asks for dictionaries: columns come as Parquet's plain types."""
    before, key, after = footer.rpartition(b"ARROW:schema")
    footer = before + b"ARROW:ignore"[: len(key)] + after
    return pq.read_metadata(pa.BufferReader(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"))


def is_corrupt(error: Exception) -> bool:
    """Whether Arrow says this of a file's content. What the system says of the file itself has a number or another type."""
    return isinstance(error, pa.ArrowException | TooLarge) or (type(error) is OSError and error.errno is None)


def _spelled(error: Exception) -> str:
    return redact(" ".join(str(error).split())) or type(error).__name__

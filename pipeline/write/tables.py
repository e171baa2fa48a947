"""Parquet files in the making: rows in, row groups of bounded size out.

A row group is written whenever about GROUP_BYTES of rows are at hand. Rows that must wait for others before them go to
a spool on the local disk, so that a document that takes hours does not keep the rows of all later ones in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from longscan.pipeline.schemas import STATES_SCHEMA
from longscan.pipeline.write.batches import Convert, row_bytes

GROUP_BYTES = 16 << 20


class PartFile:
    """One Parquet file on the local disk, whole only after `close`."""

    def __init__(self, path: str, schema: pa.Schema) -> None:
        self.path = path
        self.schema = schema
        self._sink = pa.OSFile(path, "wb")
        try:
            self._writer = pq.ParquetWriter(
                self._sink,
                schema,
                compression=_compression(schema),
                use_dictionary=_repetitive(schema),
                write_statistics=not _opaque(schema),
                write_page_checksum=True,
            )
        except BaseException:  # a full disk refuses the first bytes
            self._discard()
            raise

    def write(self, batches: list[pa.RecordBatch]) -> None:
        """Write batches as one row group."""
        table = pa.Table.from_batches(batches, self.schema)
        if table.num_rows:
            self._writer.write_table(table, row_group_size=table.num_rows)

    def close(self) -> None:
        self._writer.close()
        self._sink.close()

    def abort(self) -> None:
        """Close and remove the file, whatever state it is in."""
        with suppress(Exception):
            self._writer.close()
        self._writer.is_open = False  # else it tries again when it is collected
        self._discard()

    def _discard(self) -> None:
        with suppress(Exception):
            self._sink.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)


class ArrivalTable:
    """Rows in the order in which they come."""

    def __init__(self, path: str, schema: pa.Schema, convert: Convert) -> None:
        self.file = PartFile(path, schema)
        self._convert = convert
        self._rows: list[Any] = []
        self._bytes = 0

    def add(self, row: Any) -> None:
        size = row_bytes(row)
        if self._rows and self._bytes + size > GROUP_BYTES:
            self.flush()
        self._rows.append(row)
        self._bytes += size

    def flush(self) -> None:
        """Write what is at hand."""
        rows, self._rows, self._bytes = self._rows, [], 0
        if rows:
            self.file.write([self._convert(rows)])


class OrderedTable:
    """Rows in the order of their ordinals, whatever order they come in.

    Where a row group ends depends on the rows alone, not on when they came: equal rows make equal files.
    """

    def __init__(self, path: str, schema: pa.Schema, convert: Convert) -> None:
        self.file = PartFile(path, schema)
        self._convert = convert
        self._rows: dict[int, tuple[Any, int]] = {}
        """Ordinal -> a row that came since the last flush, and its size."""
        self._bytes = 0
        self._spooled: dict[int, _Place] = {}
        self._group: list[_Place] = []
        """The next row group, as far as it is known."""
        self._group_bytes = 0

    def add(self, ordinal: int, row: Any, frontier: int) -> None:
        """frontier: the first ordinal that had not come before this row, to this table or another."""
        size = row_bytes(row)
        if self._rows and self._bytes + size > GROUP_BYTES:
            self._settle(frontier)
        self._rows[ordinal] = (row, size)
        self._bytes += size

    def flush(self, frontier: int) -> None:
        """Write all rows; they are all below `frontier`."""
        self._settle(frontier)
        self._write_group()

    def _settle(self, frontier: int) -> None:
        """Rows below `frontier` go into row groups, those beyond it to the spool."""
        ordinals = sorted(self._rows)
        sizes = [self._rows[ordinal][1] for ordinal in ordinals]
        due = sum(ordinal < frontier for ordinal in ordinals)
        batch = self._convert([self._rows[ordinal][0] for ordinal in ordinals]) if ordinals else pa.Table.from_batches([], self.file.schema)
        self._rows, self._bytes = {}, 0
        places = {ordinal: _Place(batch, i, sizes[i]) for i, ordinal in enumerate(ordinals[:due])}
        for ordinal in [ordinal for ordinal in self._spooled if ordinal < frontier]:
            places[ordinal] = self._spooled.pop(ordinal)
        for ordinal in sorted(places):
            self._append(places[ordinal])
        if due < len(ordinals):
            spooled = self._spool(batch.slice(due))
            self._spooled.update((ordinal, _Place(spooled, i, sizes[due + i])) for i, ordinal in enumerate(ordinals[due:]))

    def _append(self, place: _Place) -> None:
        if self._group and self._group_bytes + place.size > GROUP_BYTES:
            self._write_group()
        self._group.append(place)
        self._group_bytes += place.size

    def _write_group(self) -> None:
        group, self._group, self._group_bytes = self._group, [], 0
        if group:
            self.file.write(list(_runs(group)))

    def _spool(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same batch, as a mapped file whose name is gone already: it goes when the last reader or the process does."""
        path = f"{self.file.path}.spool"
        try:
            with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
                writer.write_batch(batch)
            return pa.ipc.open_file(pa.memory_map(path)).get_batch(0)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)


class _Place(NamedTuple):
    """Where a row lies until it is written: a row of a batch in memory or in the spool."""

    batch: pa.RecordBatch
    row: int
    size: int


def _runs(places: list[_Place]) -> Iterator[pa.RecordBatch]:
    """Slices that hold the rows at `places`, in order; neighbours in one batch make one slice."""
    start = 0
    for i, place in enumerate(places):
        after = places[i + 1] if i + 1 < len(places) else None
        if after is None or after.batch is not place.batch or after.row != place.row + 1:
            yield place.batch.slice(places[start].row, i + 1 - start)
            start = i + 1


def _opaque(schema: pa.Schema) -> list[str]:
    """The column of states: megabytes of floats in a value, which neither shrink nor have a least and a largest worth knowing."""
    return ["state"] if schema.equals(STATES_SCHEMA) else []


def _compression(schema: pa.Schema) -> str | dict[str, str]:
    opaque = _opaque(schema)
    return {name: "none" if name in opaque else "zstd" for name in schema.names} if opaque else "zstd"


def _repetitive(schema: pa.Schema) -> list[str]:
    """Columns that are worth a dictionary: not the vectors, not the numbers, not what is nested."""
    return [field.name for field in schema if pa.types.is_string(field.type)] + ["token_ids.list.element"]

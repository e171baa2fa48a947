"""Footers of the input's files, read in parallel: how many rows there are, how large, and whether the columns are there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa
from longscan.pipeline.config import InputConfig
from longscan.pipeline.errors import InputError
from longscan.pipeline.read.columns import Columns
from longscan.pipeline.read.footer import column_sizes
from longscan.pipeline.read.parquet import ParquetSource, Unreadable
from longscan.pipeline.shards import RowGroup, SourceFile
from longscan.pipeline.wording import plural

THREADS = 16
ID_BYTES = 4
"""Bytes that a token id counts for in `RowGroup.num_bytes`, whatever integers it comes in."""

MOST_CHUNKS = 256
"""Column chunks of a file whose sizes are looked up one by one; in row groups behind them the column has the same share."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scan:
    """What the footers say."""

    files: tuple[SourceFile, ...]
    """All files that were given, in their order, with their row groups, or with their error."""
    passthrough: pa.Schema
    """Of the passthrough columns, as in the first file that has them."""


@dataclass(frozen=True)
class _Scanned:
    file: SourceFile
    passthrough: pa.Schema | None = None
    complaint: str | None = None


def scan(files: Sequence[SourceFile], config: InputConfig, *, threads: int = THREADS) -> Scan:
    """Read the footers of `files`.

    A file that cannot be read keeps its reason in `error`; one without the columns that are asked for gives error rows
    when it is read. Raises InputError where no file can be read, or no readable file has the columns.
    """
    columns = Columns.of(config)
    with ThreadPoolExecutor(threads) as pool:
        scanned = list(pool.map(lambda file: _scan(file, columns), files))
    unreadable = [_why(one.file) for one in scanned if one.file.error is not None]
    if scanned and len(unreadable) == len(scanned):
        raise InputError(
            unreadable[0] if len(scanned) == 1 else f"none of the {len(scanned)} input files can be read; the first: {unreadable[0]}"
        )
    for line in unreadable:
        log.warning("becomes an error row: %s", line)
    passthrough = next((one.passthrough for one in scanned if one.passthrough is not None), None)
    complaints = [(one.file.name, one.complaint) for one in scanned if one.complaint]
    if passthrough is None and complaints:
        name, complaint = complaints[0]
        others = f"; so does {plural(len(complaints) - 1, 'more file')}" if len(complaints) > 1 else ""
        raise InputError(f"{name}: {complaint}{others}")
    for name, complaint in complaints:
        log.warning("%s: its rows become error rows: %s", name, complaint)
    if passthrough is None:
        passthrough = pa.schema([pa.field(name, pa.null()) for name in columns.passthrough])
    return Scan(tuple(one.file for one in scanned), passthrough)


def _scan(file: SourceFile, columns: Columns) -> _Scanned:
    if file.error is not None:
        return _Scanned(file)
    try:
        source = ParquetSource(file)
    except (Unreadable, InputError) as error:
        return _Scanned(replace(file, error=str(error)))
    try:
        complaint = columns.complaint(source.schema)
        file = replace(file, row_groups=_row_groups(source, columns))
        return _Scanned(file, None if complaint else columns.passthrough_schema(source.schema), complaint)
    finally:
        source.close()


def _why(file: SourceFile) -> str:
    """What is wrong with a file, its name before it."""
    error = file.error or ""
    return error if error.startswith(f"{file.name}: ") else f"{file.name}: {error}"


def _row_groups(source: ParquetSource, columns: Columns) -> tuple[RowGroup, ...]:
    groups = [source.metadata.row_group(g) for g in range(source.metadata.num_row_groups)]
    try:
        known = column_sizes(source.footer(), columns.content, most_chunks=MOST_CHUNKS)[: len(groups)]
    except ValueError as error:  # Arrow reads what is needed of it, and these are estimates
        log.debug("%s: sizes of its columns: %s", source.file.name, error)
        known = []
    sizes = [ID_BYTES * size.num_values if columns.tokens else size.num_bytes for size in known]
    share = sum(sizes) / max(1, sum(size.total_bytes for size in known)) if known else 1.0
    sizes += [int(group.total_byte_size * share) for group in groups[len(known) :]]
    return tuple(RowGroup(group.num_rows, max(0, size)) for group, size in zip(groups, sizes, strict=True))

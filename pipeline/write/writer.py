"""Rows of a shard -> its files, all of them or none.

Everything is written to temporary files on a local disk. A commit moves them to their names, which the plan gave, one
after the other, and the shard's line of the manifest comes last: until it is there the shard counts as not begun, and
another attempt replaces the files by the same ones.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

import pyarrow as pa
from longscan.pipeline.commit.gate import gate
from longscan.pipeline.commit.ledger import RUN, begin_attempt, check_newest, write_report
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.errors import ConfigError, OutputError
from longscan.pipeline.records import DocumentRow, ErrorRow, Outcome, PositionRow, StateRow, TokensRow, WindowRow
from longscan.pipeline.schemas import (
    ERRORS_SCHEMA,
    STATES_SCHEMA,
    TOKENS_SCHEMA,
    HeadShape,
    documents_schema,
    has_windows,
    positions_schema,
    windows_schema,
)
from longscan.pipeline.shards import Carried, Shard, ShardReport
from longscan.pipeline.storage.location import Location, commit_file, locate, writing
from longscan.pipeline.write.batches import (
    Convert,
    documents_batch,
    errors_batch,
    positions_batch,
    states_batch,
    tokens_batch,
    windows_batch,
)
from longscan.pipeline.write.tables import ArrivalTable, OrderedTable

FOOTER_KEY = b"longscan"
"""Key of the provenance, JSON, in the footer of every file."""

TABLES = ("states", "windows", "tokens", "positions", "errors", "documents")
"""In the order of commit."""

NO_PASSTHROUGH = pa.schema([])
NOT_CARRIED = Carried()


def tables_of(task: TaskConfig, *, keep_state: bool = False) -> tuple[str, ...]:
    """The tables that a task writes, in the order of commit."""
    absent = {
        "states": not keep_state,
        "windows": not has_windows(task),
        "tokens": not (task.scores and task.score.per_token),
        "positions": task.classifies != "positions",
    }
    return tuple(name for name in TABLES if not absent.get(name))


def check_passthrough(task: TaskConfig, names: list[str], heads: Sequence[HeadShape] = (), *, continued: bool = False) -> None:
    """Raise ConfigError where passthrough columns would stand in documents/ under a name that is taken."""
    taken = documents_schema(task, 1, NO_PASSTHROUGH, heads, continued=continued).names
    wrong = sorted({name for name in names if name in taken or names.count(name) > 1})
    if wrong:
        raise ConfigError(
            f"input.passthrough: expected each column once and none of {', '.join(taken)}, which the output has already; "
            f"found {', '.join(wrong)}. Rename them in the input, or leave them out"
        )


class Writer:
    """Writes shards of one run, several at once."""

    def __init__(
        self,
        output: Location,
        task: TaskConfig,
        width: int,
        passthrough: pa.Schema = NO_PASSTHROUGH,
        provenance: Mapping[str, Any] | None = None,
        *,
        resets: bool = False,
        start: int = 0,
        heads: Sequence[HeadShape] = (),
        keep_state: bool = False,
        continued: bool = False,
    ) -> None:
        """
        width: of the model's hidden states. passthrough: the plan's schema of the passthrough columns.
        provenance: JSON values for the footers; nothing that differs between two equal runs.
        start: number of the run's start; nothing is committed any more once there is a newer one. 0 where none is known.
        resets: as `windows_schema` takes it. heads: of a task that classifies.
        keep_state: there are rows of states. continued: as `documents_schema` takes it.
        """
        check_passthrough(task, passthrough.names, heads, continued=continued)
        self.output = output
        self.start = start
        self.task = task
        self.heads = tuple(heads)
        footer = {FOOTER_KEY: json.dumps(provenance or {}, sort_keys=True, separators=(",", ":")).encode()}
        schemas = {
            "documents": documents_schema(task, width, passthrough, heads, continued=continued),
            "states": STATES_SCHEMA,
            "errors": ERRORS_SCHEMA,
            "windows": windows_schema(task, width, resets=resets),
            "tokens": TOKENS_SCHEMA,
            "positions": positions_schema(heads),
        }
        self.schemas: dict[str, pa.Schema] = {name: schemas[name].with_metadata(footer) for name in tables_of(task, keep_state=keep_state)}

    def open(self, shard: Shard, attempt: int | None = None) -> PartWriter:
        """Begin to write `shard`. attempt: its number, where the caller has begun it already (`ledger.begin_attempt`)."""
        return PartWriter(self, shard, begin_attempt(self.output, shard.index) if attempt is None else attempt)


class PartWriter:
    """The files of one shard. As a context: what is not committed when it is left is removed."""

    def __init__(self, writer: Writer, shard: Shard, attempt: int) -> None:
        self._shard = shard
        self.attempt = attempt
        self._output = writer.output
        self._start = writer.start
        self._began = time.monotonic()
        self._arrived = bytearray(shard.num_rows)
        self._frontier = 0
        self._counts = dict.fromkeys(("documents", "errors", "tokens", "windows"), 0)
        self._arrivals: dict[str, ArrivalTable] = {}
        self._ordered: dict[str, OrderedTable] = {}
        self._temporary = self._output / RUN / "tmp"
        try:
            if not self._output.is_local:
                self._temporary = locate(tempfile.mkdtemp(prefix="longscan-"), OutputError)
            with writing(self._temporary):
                self._open_tables(writer)
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()

    def add(self, outcome: Outcome) -> None:
        """Take a row. Documents and errors may come in any order and are written in the input's.

        Raises OutputError where it cannot be written.
        """
        try:
            self._take(outcome)
        except Exception:  # not a context around each row, which costs more than the row
            with writing(self._temporary):
                raise

    def _take(self, outcome: Outcome) -> None:
        match outcome:
            case DocumentRow():
                self._counts["documents"] += 1
                self._counts["tokens"] += outcome.num_tokens
                self._add_ordered("documents", outcome.document.ordinal, outcome)
            case ErrorRow():
                self._counts["errors"] += 1
                self._add_ordered("errors", outcome.ordinal, outcome)
            case WindowRow():
                self._counts["windows"] += 1
                self._arrivals["windows"].add(outcome)
            case PositionRow():
                self._arrivals["positions"].add(outcome)
            case TokensRow():
                self._arrivals["tokens"].add(outcome)
            case StateRow():
                self._arrivals["states"].add(outcome)

    def commit(self, carried: Carried = NOT_CARRIED) -> ShardReport:
        """Make the shard's files visible and the shard done; `carried` is for its report.

        Raises OutputError where rows are missing, Late where it is too late.
        """
        self._check_complete()
        files = {name: table.file for name, table in self._arrivals.items()} | {name: table.file for name, table in self._ordered.items()}
        with writing(self._temporary):
            for arrival in self._arrivals.values():
                arrival.flush()
            for ordered in self._ordered.values():
                ordered.flush(self._frontier)
            for file in files.values():
                file.close()
        with gate(self._output, shut=False):
            check_newest(self._output, self._shard.index, self.attempt, self._start)
            for name in TABLES:
                if name in files:
                    commit_file(files[name].path, self._output / name / self._shard.part_name)
            report = self._report(carried)
            write_report(self._output, report)
        return report

    def abort(self) -> None:
        """Remove what is not committed."""
        for file in [table.file for table in self._arrivals.values()] + [table.file for table in self._ordered.values()]:
            file.abort()
        if self._temporary.is_local and not self._output.is_local:
            shutil.rmtree(self._temporary.path, ignore_errors=True)

    def _report(self, carried: Carried) -> ShardReport:
        count = self._counts
        seconds = round(time.monotonic() - self._began, 3)
        return ShardReport(self._shard.index, count["documents"], count["errors"], count["tokens"], count["windows"], seconds, carried)

    def _open_tables(self, writer: Writer) -> None:
        """Temporary files lie on the disk of a local output, for a rename; else wherever this machine keeps such files."""
        os.makedirs(self._temporary.path, exist_ok=True)
        convert: dict[str, Convert] = {
            "documents": partial(documents_batch, task=writer.task, schema=writer.schemas["documents"], heads=writer.heads),
            "windows": partial(windows_batch, task=writer.task, schema=writer.schemas.get("windows")),
            "errors": errors_batch,
            "tokens": tokens_batch,
            "states": states_batch,
            "positions": partial(positions_batch, schema=writer.schemas.get("positions"), heads=writer.heads),
        }
        for name, schema in writer.schemas.items():
            path = os.path.join(self._temporary.path, f"{self._shard.index:05d}-{self.attempt:06d}-{name}.parquet")
            if name in ("documents", "errors"):
                self._ordered[name] = OrderedTable(path, schema, convert[name])
            else:
                self._arrivals[name] = ArrivalTable(path, schema, convert[name])

    def _add_ordered(self, table: str, ordinal: int, row: DocumentRow | ErrorRow) -> None:
        if not 0 <= ordinal < len(self._arrived) or self._arrived[ordinal]:
            what = "came twice" if 0 <= ordinal < len(self._arrived) else f"is not one of its {len(self._arrived)}"
            raise OutputError(f"{self._output}: shard {self._shard.index}: row {ordinal} {what}; nothing of it is committed")
        self._ordered[table].add(ordinal, row, self._frontier)
        self._arrived[ordinal] = 1
        with suppress(ValueError):  # all are there
            self._frontier = self._arrived.index(0, self._frontier)

    def _check_complete(self) -> None:
        missing = self._arrived.count(0)
        if missing:
            first = self._arrived.index(0)
            raise OutputError(
                f"{self._output}: shard {self._shard.index}: expected {len(self._arrived)} rows, {missing} did not come, "
                f"the first of them row {first}; nothing of it is committed"
            )
        self._frontier = len(self._arrived)

"""One shard -> documents, lazily, in memory bounded by one document.

Every planned row comes out once, in order: as a Document, or as an ErrorRow that says what is wrong with it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Iterator

import pyarrow as pa
from longscan.pipeline.config import InputConfig
from longscan.pipeline.meter import Meter
from longscan.pipeline.read.columns import Columns
from longscan.pipeline.read.decode import Bad, BadRow, Row, decode
from longscan.pipeline.read.parquet import GroupRows, ParquetSource, Unreadable
from longscan.pipeline.records import Document, ErrorRow
from longscan.pipeline.shards import Piece, Shard, SourceFile

NO_PASSTHROUGH = pa.schema([])


class Reader:
    """Reads shards, several at once from several threads."""

    def __init__(self, config: InputConfig, passthrough: pa.Schema = NO_PASSTHROUGH, *, meter: Meter | None = None) -> None:
        """passthrough: the plan's schema of the passthrough columns; other types of a file are cast to it.

        meter: charged with the stage read.
        """
        self._meter = meter or Meter()
        self._columns = Columns.of(config)
        self._most_bytes = config.max_document_bytes
        self._most_read = config.max_read_bytes
        self._passthrough = passthrough
        self._parked: tuple[tuple[str, int, int], GroupRows] | None = None
        self._lock = threading.Lock()

    def read(self, shard: Shard, *, careful: bool = False, unreadable: Collection[int] = ()) -> Generator[Document | ErrorRow, None, None]:
        """Rows of `shard`, their ordinals counted from 0.

        careful: row by row, however short they are. unreadable: ordinals of rows that end the process that reads them; such a row,
        and what lies behind it in its row group, becomes error rows.

        Raises InputError where a file cannot be got at (gone, no permission, network): the shard may be tried again.
        """
        opened = _Opened(self._most_read)
        ordinal = 0
        try:
            for piece in shard.pieces:
                fatal = min((row - ordinal for row in unreadable if 0 <= row - ordinal < piece.stop - piece.start), default=None)
                yield from self._piece(piece, ordinal, opened, careful, None if fatal is None else piece.start + fatal)
                ordinal += piece.stop - piece.start
            opened.check_unchanged()
        finally:
            opened.close()

    def close(self) -> None:
        """Close what is kept open between shards."""
        self._park(None)

    def _piece(self, piece: Piece, ordinal: int, opened: _Opened, careful: bool, fatal: int | None) -> Iterator[Document | ErrorRow]:
        if piece.row_group < 0:
            yield ErrorRow(ordinal, None, piece.file.name, None, "read", "UnreadableFile", piece.file.error or "cannot be read")
            return
        done = piece.start
        try:
            with self._meter("read"):
                rows = self._rows(piece, opened, careful)
            while done < piece.stop:
                if done == fatal:
                    raise Unreadable("WorkerKilled", f"row group {piece.row_group}: reading on from here ends the worker's process")
                with self._meter("read"):
                    batch = rows.take(piece.stop - done if fatal is None else fatal - done)
                    documents = self._documents(batch, piece, done, ordinal)
                    del batch
                done += len(documents)
                documents.reverse()
                while documents:  # whoever takes one has it alone: else they would be in memory beside the next ones
                    yield documents.pop()
        except Unreadable as error:
            for row in range(done, piece.stop):
                at, n = _place(piece, row, ordinal)
                yield ErrorRow(n, self._default_id(piece.file, at), piece.file.name, at, "read", error.kind, str(error))
            return
        if piece.stop < rows.num_rows:
            opened.check_unchanged()
            opened.give_up(rows.source)
            self._park(((piece.file.path, piece.row_group, piece.stop), rows))

    def _documents(self, batch: pa.RecordBatch, piece: Piece, first: int, ordinal: int) -> list[Document | ErrorRow]:
        documents: list[Document | ErrorRow] = []
        for i, row in enumerate(decode(batch, self._columns, self._passthrough)):
            at, n = _place(piece, first + i, ordinal)
            doc_id = self._default_id(piece.file, at) if row.doc_id is None else row.doc_id
            bad = row.bad if isinstance(row, BadRow) else self._too_long(row)
            if bad is not None:
                documents.append(ErrorRow(n, doc_id, piece.file.name, at, "read", bad.kind, str(bad)))
            elif not isinstance(row, BadRow):
                assert doc_id is not None
                documents.append(Document(n, doc_id, piece.file.name, at, row.text, row.token_ids, row.passthrough, row.positions))
        return documents

    def _too_long(self, row: Row) -> Bad | None:
        size = row.text.nbytes if row.text is not None else row.token_ids.nbytes if row.token_ids is not None else 0
        if self._most_bytes is None or size <= self._most_bytes:
            return None
        return Bad("TooLong", f"expected at most {self._most_bytes} bytes (input.max_document_bytes), found {size}")

    def _default_id(self, file: SourceFile, row: int) -> str | None:
        """`<name>#<row>`; None where the input has an id column, which alone gives ids."""
        return None if self._columns.id else f"{file.name}#{row}"

    def _rows(self, piece: Piece, opened: _Opened, careful: bool) -> GroupRows:
        """The row group of `piece`, at its first row: read on from where the shard before it stopped, where that is at hand."""
        if piece.start and not careful:
            with self._lock:
                if self._parked is not None and self._parked[0] == (piece.file.path, piece.row_group, piece.start):
                    rows, self._parked = self._parked[1], None
                    opened.take_over(rows.source)
                    return rows
        source = opened.source(piece.file)
        complaint = self._columns.complaint(source.schema)
        if complaint is not None:
            raise Unreadable("WrongColumns", complaint)
        rows = GroupRows(source, piece.row_group, self._columns.names, careful=careful)
        rows.skip(piece.start)
        return rows

    def _park(self, parked: tuple[tuple[str, int, int], GroupRows] | None) -> None:
        with self._lock:
            before, self._parked = self._parked, parked
        if before is not None:
            before[1].source.close()


class _Opened:
    """The file that a call of `read` has open: the pieces of a shard come file by file."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._source: ParquetSource | None = None

    def source(self, file: SourceFile) -> ParquetSource:
        if self._source is None or self._source.file.path != file.path:
            self.check_unchanged()
            self.close()
            self._source = ParquetSource(file, most_bytes=self._most_bytes)
        return self._source

    def check_unchanged(self) -> None:
        """Raise InputError where the file that is open has changed since the plan: what was read of it may be of two versions."""
        if self._source is not None:
            self._source.check_unchanged()

    def take_over(self, source: ParquetSource) -> None:
        self.check_unchanged()
        self.close()
        self._source = source

    def give_up(self, source: ParquetSource) -> None:
        """Leave the closing of `source` to somebody else."""
        if self._source is source:
            self._source = None

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None


def _place(piece: Piece, row: int, ordinal: int) -> tuple[int, int]:
    """Row in the file, and ordinal in the shard, of a row counted from the row group's first; `ordinal` is the piece's first."""
    return piece.first_row + row - piece.start, ordinal + row - piece.start

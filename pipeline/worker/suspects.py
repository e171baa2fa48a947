"""Which document kills its worker: a shard whose worker died again and again is run alone, document by document.

Each death is an attempt that did not end (`ledger.losses`). The first half of `cluster.max_attempts` is nobody's fault: spot
machines go. After that the shard has its worker to itself, and a note says at every moment which rows it is at; the rows of a
large shard are taken in groups first, and one by one where a group died. Who died alone as often as the other half, without having
come any further in between, becomes an error row: a document that is further after each death, by its carries, is not to blame.
Nor does a shard that is further after each death go alone before `cluster.max_attempts` of them, and it is never given up.

Before the first document a few tokens of nobody's go through the engine: a device that fails them fails everybody, and no document
is blamed for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import numpy as np
from longscan.kernels.segments import TILE
from longscan.pipeline.commit.ledger import Loss, note_rows
from longscan.pipeline.engine.engine import EngineFailed
from longscan.pipeline.engine.rows import error_row
from longscan.pipeline.errors import Stopped, WorkerKilled
from longscan.pipeline.journey import Tools
from longscan.pipeline.keep.shardkeeper import ShardKeeper
from longscan.pipeline.read.decode import NO_COLUMNS
from longscan.pipeline.records import Document, ErrorRow, Outcome, TokenBlock, TokenStream
from longscan.pipeline.shards import Shard, ShardReport
from longscan.pipeline.write.writer import PartWriter

SINGLY = 64
"""Rows of a shard up to which they are taken one by one at once."""

log = logging.getLogger(__name__)


class Unfit(Stopped):
    """A worker whose engine fails whatever goes through it: starting it anew is of no use."""


@dataclass(frozen=True, slots=True)
class History:
    """What a shard's losses say, before its next attempt."""

    losses: Sequence[Loss]
    max_attempts: int
    start: int

    @property
    def careful(self) -> bool:
        """It has died too often to go in company. Others may get on beside a document that kills, so all deaths count in the end."""
        return sum(loss.fruitless for loss in self.losses) >= self.max_attempts // 2 or len(self.losses) >= self.max_attempts

    @property
    def killers(self) -> dict[int, Loss]:
        """Rows that killed their worker often enough at one position, with the last time that they did."""
        alone = {loss.rows.start: loss for loss in self.losses if loss.rows is not None and len(loss.rows) == 1}
        return {row: loss for row, loss in alone.items() if len(self.deaths(row)) >= self.max_attempts - self.max_attempts // 2}

    def deaths(self, row: int) -> list[Loss]:
        """Losses of this row alone, while it was being read or from the position on that it has come to."""
        alone = [loss for loss in self.losses if loss.rows == range(row, row + 1)]
        furthest = max((loss.position for loss in alone), default=0)
        return [loss for loss in alone if loss.stage == "read" or loss.position == furthest]

    @property
    def hopeless(self) -> bool:
        """Its worker dies on and on in this start of the run, it comes no further, and no document of it is found to be the cause."""
        killers, fruitless = self.killers, [loss for loss in self.losses if loss.fruitless]
        unexplained = [loss for loss in fruitless if loss.rows is None or not any(row in loss.rows for row in killers)]
        return sum(loss.start == self.start for loss in unexplained) >= 2 * self.max_attempts

    def groups(self, num_rows: int) -> Iterator[range]:
        """The rows in order, in the groups that they are taken in: one by one where a death was."""
        suspects = {row for loss in self.losses if loss.rows is not None for row in loss.rows}
        most = 1 if num_rows <= SINGLY else math.isqrt(num_rows)
        first = 0
        for row in range(num_rows):
            alone = row in suspects
            if row > first and (alone or row - first == most):
                yield range(first, row)
                first = row
            if alone:
                yield range(row, row + 1)
                first = row + 1
        if first < num_rows:
            yield range(first, num_rows)


def process_carefully(shard: Shard, tools: Tools, history: History, attempt: int) -> ShardReport:
    """Send a shard on its journey one group of rows after the other, each noted before it begins.

    It must be the only shard in its worker. Raises Unfit where the engine fails before the first of them.
    """
    output, killers = tools.writer.output, history.killers
    log.warning(
        "shard %d: its worker died %d times; it runs alone, document by document, to find out by which", shard.index, len(history.losses)
    )
    lost = [row for row, loss in killers.items() if loss.stage == "read"]
    with (
        tools.writer.open(shard, attempt) as part,
        tools.keeper.open(shard, attempt) as kept,
        closing(tools.reader.read(shard, careful=True, unreadable=lost)) as documents,
    ):
        _try_engine(tools)
        for rows in history.groups(shard.num_rows):
            note_rows(output, shard.index, attempt, rows, "read")
            if len(rows) > 1:
                _process(islice(documents, len(rows)), tools, part, kept)
                continue
            document = next(documents)
            killer, position = killers.get(rows.start), kept.position(document)
            if killer is not None and isinstance(document, Document) and position <= killer.position:
                row = error_row(document, WorkerKilled("engine", _verdict(history, rows.start)))
                log.error("%s: becomes an error row: %s", _name(row), row.message)
                part.add(row)
                continue
            note_rows(output, shard.index, attempt, rows, "engine", position)
            _process(iter([document]), tools, part, kept)
        note_rows(output, shard.index, attempt, range(shard.num_rows, shard.num_rows), "commit")  # the last row is not to blame any more
        report = part.commit(kept.carried)
        kept.clear()
        return report


def _process(documents: Iterator[Document | ErrorRow], tools: Tools, part: PartWriter, kept: ShardKeeper) -> None:
    streams = tools.tokenizer.tokenize(kept.resume(documents, part))
    with closing(tools.engine.process(streams, kept)) as outcomes:
        for outcome in outcomes:
            part.add(outcome)


def _try_engine(tools: Tools) -> None:
    """Send a tile of nobody's tokens through the engine."""
    document = Document(0, "", "", 0, None, None, NO_COLUMNS)
    blocks = iter([TokenBlock(np.zeros(TILE, np.int32))])
    outcomes: list[Outcome] = []
    try:
        outcomes += tools.engine.process([TokenStream(document, blocks, None, TILE)])
    except EngineFailed as error:
        if error.__cause__ is None:
            raise
        raise Unfit(f"a worker's engine fails before the first document: {error}") from error


def _verdict(history: History, row: int) -> str:
    fatal = [loss.attempt for loss in history.deaths(row)]
    return (
        f"the worker's process ended {len(fatal)} times while it worked on this document and no other (attempts "
        f"{', '.join(map(str, fatal))} at its shard)"
    )


def _name(row: ErrorRow) -> str:
    return f"{row.file!r}, row {row.row}"

"""A run's unit of work: rows of the input as the planner found them, a shard of them, and what a committed shard holds."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace

SHARDS_AT_ONCE = 4
"""In hand of one worker: while one shard is committed, others keep the engine busy."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    num_rows: int
    num_bytes: int
    """Uncompressed bytes of the column that is read: an estimate of its text."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file as the planner found it."""

    path: str
    """What opens it: an absolute path or a URI. May hold credentials: never logged, never written to provenance."""
    name: str
    """Its path under the input's root, with forward slashes: part of document ids and of messages."""
    size: int
    version: str
    """Modification time in nanoseconds, or the store's etag."""
    row_groups: tuple[RowGroup, ...]
    error: str | None = None
    """Why the file cannot be read at all; it then has no row groups and becomes one row of errors/."""

    @property
    def num_rows(self) -> int:
        return sum(group.num_rows for group in self.row_groups)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of rows inside one row group of one file. A file that cannot be read at all is one row, of row group -1."""

    file: SourceFile
    row_group: int
    start: int
    """First row, counted from the row group's first."""
    stop: int
    first_row: int
    """Row of `start` counted from the file's first."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A planned set of input rows: what a worker takes, commits and retries."""

    index: int
    total: int
    pieces: tuple[Piece, ...]
    estimated_tokens: int

    @property
    def num_rows(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def reads_on(self) -> bool:
        """It begins inside a row group, where the shard before it stops: the worker of that one need not read up to it again."""
        return bool(self.pieces) and self.pieces[0].start > 0

    @property
    def part_name(self) -> str:
        return f"part-{self.index:05d}-of-{self.total:05d}.parquet"


@dataclass(frozen=True, slots=True)
class Carried:
    """What stops cost a shard, over all attempts at it, and what it cost the one that committed to be ready for them."""

    resumed_documents: int = 0
    """Documents that went on from a carry."""
    recomputed_tokens: int = 0
    """Tokens that had been computed by an attempt that was stopped, and were computed again."""
    most_recomputed_tokens: int = 0
    """The most of them that were one document's, at one stop."""
    kept_tokens: int = 0
    """By the last attempt, as are the next: tokens that it did not compute, but found in carries and in finished documents."""
    carries_written: int = 0
    carry_seconds: float = 0.0
    """That its thread spent on keeping rows and handing over carries; writing carries waits for nobody."""
    continued_documents: int = 0
    """Documents that went on from a state of an earlier run, and the tokens before these."""
    continued_tokens: int = 0
    states_kept: int = 0
    states_left_out: int = 0
    """States of documents that could not go on from them; by all attempts."""

    def plus(self, other: Carried) -> Carried:
        total = Carried(*(mine + others for mine, others in zip(astuple(self), astuple(other), strict=True)))
        return replace(total, most_recomputed_tokens=max(self.most_recomputed_tokens, other.most_recomputed_tokens))


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a committed shard holds: a line of the run's manifest."""

    index: int
    num_documents: int
    num_errors: int
    num_tokens: int
    num_windows: int
    seconds: float
    carried: Carried = field(default_factory=Carried)

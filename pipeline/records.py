"""The nouns: what passes between the verbs of a document's journey, and the Arrow schemas of what is written.

    Shard -> read -> Document -> tokenize -> TokenStream -> engine -> WindowRow, TokensRow, StateRow, DocumentRow -> write -> ShardReport
                  \\-> ErrorRow, from any verb, goes straight to write

A row of the input is named by (shard, ordinal): the ordinal counts the shard's rows from 0, in input order.

Nobody changes one that somebody else may hold. Those that each document makes several of are not frozen all the same, here and
elsewhere: to set a field of a frozen one takes Python 0.1 µs more, and all of it holds Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from longscan.pipeline.config import TaskConfig

if TYPE_CHECKING:
    import torch

Ids = npt.NDArray[np.int32]
Vector = npt.NDArray[np.float32] | npt.NDArray[np.float16]
"""As it is written: task.embedding.dtype says which."""


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
class Cut:
    """A place in a document from where its tokens can be cut on, as if all before had been cut in the same go."""

    byte: int = 0
    """Of the text's UTF-8. 0, as `char`, where token ids came in."""
    char: int = 0
    """The same place in code points."""
    token: int = 0
    """Tokens before it."""


BEGINNING = Cut()


@dataclass(slots=True)
class HostCarry:
    """The host's part of a document's carry, a few numbers whatever its length; the device's part lies in its lane's slots."""

    position: int = 0
    """Tokens whose results are in; a multiple of the segment until the document ends."""
    next_logprob: float = float("nan")
    """Of the token at `position`: it comes from the row before it."""
    log_likelihood: float = 0.0
    window_log_likelihood: float = 0.0
    """Of the open window, as is the next."""
    window_char_start: int | None = None
    replaced: int = 0
    """Tokens at the end of the prompt that the document's own stand for."""
    continued_at: int = 0
    """Tokens that this run has not computed: it went on from a state that an earlier run kept. No row of theirs is made."""


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """All that a document takes along where it is stopped and goes on later: as if it had never been stopped."""

    ordinal: int
    host: HostCarry
    cut: Cut
    """The last safe cut at or before the position: from there on the text is tokenized again, up to the position in vain."""
    tensors: Callable[[], Mapping[str, torch.Tensor]]
    """The device's part by the names of its tables, on the host or not: it is large, so whoever needs it asks for it then."""
    at_risk: int = 0
    """Tokens since the carry before it: what would be computed again without this one."""

    @property
    def position(self) -> int:
        return self.host.position


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a document that decides all that is kept of it: whatever follows there, its tokens stay these."""

    length: int
    """Bytes of the text: one character beyond its last safe cut. Where token ids came in, their number."""
    sha256: str
    """Of these bytes, in hex; of ids as little-endian int32."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The carry that a longer document of the same beginning will go on from, in another run."""

    document: Document
    carry: Carry
    prefix: Prefix


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a document has come: no result, but what tells after a crash how much is computed again."""

    ordinal: int
    position: int


@dataclass(slots=True)
class Document:
    """One row of the input. Exactly one of `text` and `token_ids` is set; in rows that leave the engine neither is, so
    that nothing keeps a text in memory whose tokens are cut."""

    ordinal: int
    doc_id: str
    file: str
    row: int
    text: memoryview | None
    """The text's UTF-8 bytes as they lie in the Arrow buffer, checked to be valid UTF-8."""
    token_ids: Ids | None
    passthrough: pa.RecordBatch
    """One row: the passthrough columns, possibly none."""
    positions: npt.NDArray[np.int64] | None = None
    """Places that the task is asked for, ascending."""
    carry: Carry | None = None
    """Where it goes on, if an attempt before has come so far."""

    def without_content(self) -> Document:
        """The same without its text or token ids."""
        return Document(self.ordinal, self.doc_id, self.file, self.row, None, None, self.passthrough, self.positions, self.carry)


@dataclass(slots=True)
class TokenBlock:
    """Consecutive tokens of a document, as the tokenizer gives them."""

    ids: Ids
    char_starts: npt.NDArray[np.int64] | None = None
    """Per token, in code points from the document's start; None unless windows ask for them."""
    char_ends: npt.NDArray[np.int64] | None = None
    end: Cut | None = None
    """Where the next block begins. None for a part of a block, and behind an EOS token that is not the text's."""
    replaced: int = 0
    """Of a document's first block: tokens at the end of the prompt that its own stand for."""
    settled: bool = True
    """Whatever follows the text, these stay its tokens. Known only where a stream has a prefix."""

    def part(self, start: int, stop: int) -> TokenBlock:
        """The tokens from `start` to `stop`."""
        starts = None if self.char_starts is None else self.char_starts[start:stop]
        ends = None if self.char_ends is None else self.char_ends[start:stop]
        return TokenBlock(self.ids[start:stop], starts, ends, self.end if stop == len(self.ids) else None, settled=self.settled)


@dataclass(slots=True)
class TokenStream:
    """A document on its way into the engine. `blocks` is lazy and read once; it may raise DocumentError."""

    document: Document
    blocks: Iterator[TokenBlock]
    num_bytes: int | None
    """UTF-8 bytes of the text; None where token ids came in."""
    estimated_tokens: int
    prefix: Prefix | None = None
    """What the document's blocks that are settled depend on, where its state is to be kept."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What is known of a classifier's head without its weights."""

    name: str
    """Empty for the only one."""
    size: int
    labels: tuple[str, ...] | None

    @property
    def columns(self) -> tuple[str, str]:
        """Of its logits, and of its label."""
        return (f"logits_{self.name}", f"label_{self.name}") if self.name else ("logits", "label")


@dataclass(slots=True)
class DocumentRow:
    """A finished document. `vectors` maps a pooling to its vector, None for a document of no tokens."""

    document: Document
    num_tokens: int
    vectors: Mapping[str, Vector | None] = field(default_factory=dict)
    log_likelihood: float | None = None
    num_scored_tokens: int | None = None
    num_bytes: int | None = None
    bits_per_byte: float | None = None
    state_norm_max: float | None = None
    """Of the layers' final SSM states, the largest Frobenius norm and their mean."""
    state_norm_mean: float | None = None
    logits: Mapping[str, npt.NDArray[np.float32]] | None = None
    """Head -> [labels]; None for a document of no tokens."""
    continued_at: int = 0
    """As the carry has it."""


@dataclass(frozen=True, slots=True)
class WindowRow:
    document: Document
    window_index: int
    token_start: int
    token_end: int
    char_start: int | None
    char_end: int | None
    vectors: Mapping[str, Vector] = field(default_factory=dict)
    log_likelihood: float | None = None
    context_start: int | None = None
    """Token from which on the window's first token has seen all, where documents start afresh every so often; else None."""


@dataclass(frozen=True, slots=True)
class PositionRow:
    document: Document
    index: int
    """Of the position in its document's list."""
    token: int | None
    """The last token that begins before it; None where there is none."""
    logits: Mapping[str, npt.NDArray[np.float32]] | None


@dataclass(frozen=True, slots=True)
class TokensRow:
    document: Document
    token_start: int
    token_ids: Ids
    logprobs: npt.NDArray[np.float32]
    """NaN, written as null, where a token has no score (the first one under first_token=skip)."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """A row, or a whole file (`row` None), that could not be processed."""

    ordinal: int
    doc_id: str | None
    file: str
    row: int | None
    stage: str
    error: str
    message: str


@dataclass(frozen=True, slots=True)
class StateRow:
    """What a longer document of the same beginning goes on from."""

    document: Document
    position: int
    """Tokens before it."""
    prefix_length: int
    prefix_sha256: str
    """As the Prefix has them."""
    state: npt.NDArray[np.uint8]
    """A carry, in the form of its file (`carry.save_carry`)."""


Outcome = DocumentRow | WindowRow | PositionRow | TokensRow | StateRow | ErrorRow


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


def vector_type(task: TaskConfig, width: int) -> pa.DataType:
    """fixed_size_list of the vectors written: `truncate_dim` or the model's `width`, of float32 or float16."""
    value = pa.float16() if task.embedding.dtype == "float16" else pa.float32()
    return pa.list_(value, task.embedding.truncate_dim or width)


def embedding_columns(task: TaskConfig) -> dict[str, str]:
    """Pooling -> column: `embedding` for a single pooling, `embedding_<pooling>` where several are asked for."""
    if not task.embeds:
        return {}
    poolings = task.embedding.poolings
    return {p: "embedding" if len(poolings) == 1 else f"embedding_{p}" for p in poolings}


def head_fields(heads: Sequence[HeadShape]) -> list[pa.Field]:
    """Of each head the logits, and for several labels the one with the largest, by its name or its number."""
    fields = []
    for head in heads:
        logits, label = head.columns
        fields.append(pa.field(logits, pa.list_(pa.float32(), head.size)))
        if head.size > 1:
            fields.append(pa.field(label, pa.string()))
    return fields


def positions_schema(heads: Sequence[HeadShape]) -> pa.Schema:
    fields = [pa.field("doc_id", pa.string(), nullable=False), pa.field("position_index", pa.int64(), nullable=False)]
    return pa.schema([*fields, pa.field("position", pa.int64(), nullable=False), pa.field("token", pa.int64()), *head_fields(heads)])


def documents_schema(
    task: TaskConfig, width: int, passthrough: pa.Schema, heads: Sequence[HeadShape] = (), *, continued: bool = False
) -> pa.Schema:
    """continued: documents may go on from states of an earlier run, and each says where."""
    fields = [pa.field("doc_id", pa.string(), nullable=False), pa.field("num_tokens", pa.int64(), nullable=False)]
    fields += [pa.field(f.name, f.type, f.nullable, f.metadata) for f in passthrough]
    fields += [pa.field(column, vector_type(task, width)) for column in embedding_columns(task).values()]
    if task.classifies == "document":
        fields += head_fields(heads)
    if task.scores:
        fields += [
            pa.field("log_likelihood", pa.float64()),
            pa.field("num_scored_tokens", pa.int64()),
            pa.field("num_bytes", pa.int64()),
            pa.field("bits_per_byte", pa.float64()),
        ]
    if task.state_norm:
        fields += [pa.field("state_norm_max", pa.float64()), pa.field("state_norm_mean", pa.float64())]
    if continued:
        fields.append(pa.field("continued_at", pa.int64(), nullable=False))
    return pa.schema(fields)


def has_windows(task: TaskConfig) -> bool:
    return window_tokens(task) is not None


def window_tokens(task: TaskConfig) -> int | None:
    """Size of the windows in tokens. Where both tasks ask for windows they ask for one size (`config.validate`)."""
    sizes = [task.embedding.window_tokens] * task.embeds + [task.score.window_tokens] * task.scores
    return next((size for size in sizes if size is not None), None)


def windows_schema(task: TaskConfig, width: int, *, resets: bool = False) -> pa.Schema:
    """resets: documents start afresh every so often, and a window says since when it has seen all."""
    fields = [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("window_index", pa.int64(), nullable=False),
        pa.field("token_start", pa.int64(), nullable=False),
        pa.field("token_end", pa.int64(), nullable=False),
        pa.field("char_start", pa.int64()),
        pa.field("char_end", pa.int64()),
    ]
    if resets:
        fields.append(pa.field("context_start", pa.int64(), nullable=False))
    if task.embeds and task.embedding.window_tokens is not None:
        fields += [pa.field(column, vector_type(task, width)) for column in embedding_columns(task).values()]
    if task.scores and task.score.window_tokens is not None:
        fields += [pa.field("log_likelihood", pa.float64())]
    return pa.schema(fields)


TOKENS_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("token_start", pa.int64(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
    ]
)

STATES_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("prefix_length", pa.int64(), nullable=False),
        pa.field("prefix_sha256", pa.string(), nullable=False),
        pa.field("state", pa.large_binary(), nullable=False),
    ]
)

ERRORS_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string()),
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64()),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("error", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
    ]
)

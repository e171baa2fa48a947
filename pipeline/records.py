"""The nouns: what passes between the verbs of a document's journey. `shards` has what it is part of, `schemas` what is written of it.

    Shard -> read -> Document -> tokenize -> TokenStream -> engine -> WindowRow, TokensRow, StateRow, DocumentRow -> write -> ShardReport
                  \\-> ErrorRow, from any verb, goes straight to write

A row of the input is named by (shard, ordinal): the ordinal counts the shard's rows from 0, in input order.

Nobody changes one that somebody else may hold. Those that each document makes several of are not frozen all the same, here and
elsewhere: to set a field of a frozen one takes Python 0.1 µs more, and all of it holds Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    import torch

Ids = npt.NDArray[np.int32]
Vector = npt.NDArray[np.float32] | npt.NDArray[np.float16]
"""As it is written: task.embedding.dtype says which."""


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

BYTES_PER_TOKEN = 4
"""Of text that no token is known of yet: for estimates only."""


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

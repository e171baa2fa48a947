"""Blocks of documents that need no cutting: short texts, tokenized many at a time, and token ids; and what follows the last."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
from longscan.pipeline.errors import DocumentError
from longscan.pipeline.records import BEGINNING, Cut, Ids, TokenBlock
from longscan.pipeline.tokenize.prompt import Prompt
from longscan.pipeline.tokenize.texts import block_of, encode_all
from longscan.pipeline.tokenize.tokenizer import TextTokenizer, Tokens

ID_BLOCK = 1 << 16
"""Tokens a block, where token ids came in."""

Encoded = tuple[Tokens, int] | DocumentError
"""A short text's tokens and its length in code points, or what became of it."""


def encode_batch(texts: list[memoryview], tokenizer: TextTokenizer, with_offsets: bool, prompt: Prompt | None = None) -> list[Encoded]:
    """Whole short texts in one call. One that the tokenizer fails on does not take the others with it."""
    strings = [str(text, "utf-8") for text in texts]
    try:
        tokens = encode_all(strings, tokenizer, after_cut=False, with_offsets=with_offsets, prompt=prompt)
    except DocumentError as error:
        if len(texts) == 1:
            return [error]
        return [encode_batch([text], tokenizer, with_offsets, prompt)[0] for text in texts]
    return list(zip(tokens, map(len, strings), strict=True))


class BatchBlocks(Iterator[TokenBlock]):
    """The one block of a short text, or none if it has no tokens. Raises DocumentError where the tokenizer failed on it."""

    __slots__ = ("_batch", "_index", "_num_bytes")

    def __init__(self, batch: Future[list[Encoded]], index: int, num_bytes: int) -> None:
        self._batch: Future[list[Encoded]] | None = batch
        self._index, self._num_bytes = index, num_bytes

    def __next__(self) -> TokenBlock:
        if self._batch is None:
            raise StopIteration
        encoded = self._batch.result()[self._index]
        self._batch = None
        if isinstance(encoded, DocumentError):
            raise encoded
        tokens, chars = encoded
        if not len(tokens.ids):
            raise StopIteration
        return block_of(tokens, BEGINNING, Cut(self._num_bytes, chars, len(tokens.ids)))

    def close(self) -> None:
        self._batch = None


def checked_ids(ids: Ids, vocab_size: int) -> Ids:
    """Raises DocumentError for ids that the model's vocabulary does not have."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DocumentError("tokenize", f"expected a list of integer token ids, found {ids.ndim}-dimensional {ids.dtype}")
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        position = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise DocumentError(
            "tokenize",
            f"token {position}: expected an id from 0 to {vocab_size - 1}, the model's vocabulary, found {int(ids[position])}; "
            "were these ids made by another tokenizer?",
        )
    return ids


def id_blocks(ids: Ids, start: int) -> Iterator[TokenBlock]:
    for low in range(start, len(ids), ID_BLOCK):
        block = ids[low : low + ID_BLOCK].astype(np.int32, copy=False)
        yield TokenBlock(block, end=Cut(token=low + len(block)))


class EosBlocks(Iterator[TokenBlock]):
    """A document's blocks and then one of the EOS token, unless the document has no tokens at all."""

    def __init__(self, blocks: Iterator[TokenBlock], eos_id: int, *, start: Cut, with_offsets: bool) -> None:
        self._blocks = blocks
        self._eos_id, self._with_offsets = eos_id, with_offsets
        self._end = start
        self._done = False

    def __next__(self) -> TokenBlock:
        if self._done:
            raise StopIteration
        block = next(self._blocks, None)
        if block is not None:
            self._end = block.end or self._end
            return block
        self._done = True
        if not self._end.token:
            raise StopIteration
        chars = np.array([self._end.char], dtype=np.int64) if self._with_offsets else None
        return TokenBlock(np.array([self._eos_id], dtype=np.int32), chars, chars, settled=False)

    def close(self) -> None:
        self._done = True
        close_iterator(self._blocks)


class LaterBlocks(Iterator[TokenBlock]):
    """Blocks without their first `count` tokens."""

    def __init__(self, blocks: Iterator[TokenBlock], count: int) -> None:
        self._blocks = blocks
        self._left = count

    def __next__(self) -> TokenBlock:
        block = next(self._blocks)
        while self._left and self._left >= len(block.ids):
            self._left -= len(block.ids)
            block = next(self._blocks)
        skipped, self._left = self._left, 0
        return block.part(skipped, len(block.ids)) if skipped else block

    def close(self) -> None:
        close_iterator(self._blocks)


def close_iterator(iterator: Iterator[object]) -> None:
    """Tell an iterator that nothing more will be asked for, if it can be told."""
    close = getattr(iterator, "close", None)
    if close is not None:
        close()

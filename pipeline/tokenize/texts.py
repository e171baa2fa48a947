"""One text of any length -> blocks of its tokens, in pieces cut where it is safe, tokenized ahead of who reads them.

Memory is bounded by the pieces under way, and so by the longest stretch of the text that has no safe cut: a piece grows
until it ends at one. The text itself is only looked at where it lies; a piece is a str for as long as it is tokenized.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace

import numpy as np
from longscan.pipeline.errors import DocumentError
from longscan.pipeline.records import BEGINNING, Cut, TokenBlock
from longscan.pipeline.tokenize.cuts import Cuts
from longscan.pipeline.tokenize.prompt import Prompt
from longscan.pipeline.tokenize.tokenizer import TextTokenizer, Tokens

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 16
"""Some 20,000 tokens, 20 ms of a core: a device that waits for its first step waits for these. The library takes some 170 bytes a byte
for as long as it works on a piece: 11 MB for one of this size."""

LONG_STRETCH = 1 << 24
"""A stretch of the text without a safe cut that is worth a line in the log, in bytes."""

BACKWARD_WINDOWS = (1 << 8, 1 << 13)
FORWARD_WINDOW = 1 << 16
"""Bytes that are searched at once for a cut, before and after the place where one is wanted."""

CONTINUATION = 0b1000_0000
CONTINUATION_MASK = 0b1100_0000


def find_cut(text: memoryview, start: int, cuts: Cuts, piece_bytes: int) -> int:
    """Where the piece that begins at byte `start` ends: `piece_bytes` on or a little before, else wherever the next cut is."""
    if cuts.reason is not None or len(text) - start <= piece_bytes:
        return len(text)
    wanted = _character_start(text, start + piece_bytes)
    for window in (*BACKWARD_WINDOWS, piece_bytes):
        low = _character_start(text, max(start, wanted - window))
        found = cuts.last(seen := str(text[low:wanted], "utf-8"))
        if found is not None:
            return low + len(seen[:found].encode())
        if low == start:
            break
    return _find_forward(text, max(start, _character_start(text, wanted - 1)), cuts)


def _find_forward(text: memoryview, low: int, cuts: Cuts) -> int:
    while True:
        high = low + FORWARD_WINDOW
        high = len(text) if high >= len(text) else _character_start(text, high)
        found = cuts.first(seen := str(text[low:high], "utf-8"))
        if found is not None:
            return low + len(seen[:found].encode())
        if high == len(text):
            return high
        low = _character_start(text, high - 1)  # the next window begins with the last character of this one


def last_cut(text: memoryview, cuts: Cuts) -> int:
    """The last place in the text, in bytes, where it may be cut whatever follows the text; 0 where there is none."""
    high, window = len(text), BACKWARD_WINDOWS[0]
    while high and cuts.reason is None:
        low = _character_start(text, max(0, high - window))
        found = cuts.last(seen := str(text[low:high], "utf-8"))
        if found is not None:
            return low + len(seen[:found].encode())
        if low == 0:
            break
        high = low + len(seen[0].encode())  # the next window ends with the first character of this one
        window = min(2 * window, FORWARD_WINDOW)
    return 0


def _character_start(text: memoryview, at: int) -> int:
    """The start of the character that the byte belongs to."""
    while at > 0 and text[at] & CONTINUATION_MASK == CONTINUATION:
        at -= 1
    return at


class TextBlocks(Iterator[TokenBlock]):
    """Blocks of one text. Up to `ahead` pieces are tokenized on `executor` before they are asked for, from the beginning.

    Raises DocumentError where the tokenizer fails on the text.
    """

    def __init__(
        self,
        text: memoryview,
        tokenizer: TextTokenizer,
        executor: Executor,
        *,
        ahead: int,
        start: Cut = BEGINNING,
        piece_bytes: int = PIECE_BYTES,
        with_offsets: bool = False,
        prompt: Prompt | None = None,
        settled: int | None = None,
    ) -> None:
        """settled: the last safe cut, as `last_cut` gives it, where blocks are to say what lies before it."""
        self._prompt = prompt
        self._settled = settled
        self._text = text.cast("B")
        self._tokenizer, self._executor = tokenizer, executor
        self._ahead, self._piece_bytes, self._with_offsets = ahead, piece_bytes, with_offsets
        self._at = start
        self._next_byte = start.byte
        self._pieces: deque[tuple[int, Future[tuple[Tokens, int]]]] = deque()
        self._submit()

    def __next__(self) -> TokenBlock:
        self._submit()
        if not self._pieces:
            raise StopIteration
        end, piece = self._pieces.popleft()
        tokens, chars = piece.result()
        start, self._at = self._at, Cut(end, self._at.char + chars, self._at.token + len(tokens.ids))
        block = block_of(tokens, start, self._at)
        return block if self._settled is None or end <= self._settled else replace(block, settled=False)

    def close(self) -> None:
        """Nothing more will be asked for."""
        for _, piece in self._pieces:
            piece.cancel()
        self._pieces.clear()
        self._end()

    def _submit(self) -> None:
        while len(self._pieces) < self._ahead and self._next_byte < len(self._text):
            start = self._next_byte
            end = self._piece_end(start)
            if end - start > LONG_STRETCH:
                logger.warning(
                    "%d MiB of a text are tokenized at once and take some %d MiB of memory: there is no place from byte %d to %d "
                    "where this tokenizer's ids would not change",
                    (end - start) >> 20,
                    170 * (end - start) >> 20,
                    start,
                    end,
                )
            prompt = None if start else self._prompt
            piece = self._executor.submit(encode_piece, self._text[start:end], self._tokenizer, start > 0, self._with_offsets, prompt)
            self._pieces.append((end, piece))
            self._next_byte = end
        if self._next_byte >= len(self._text):
            self._end()

    def _piece_end(self, start: int) -> int:
        if self._settled and start >= self._settled:
            return len(self._text)
        return find_cut(self._text[: self._settled or None], start, self._tokenizer.cuts, self._piece_bytes)

    def _end(self) -> None:
        """Let go of the text; pieces under way hold their own part."""
        self._text, self._next_byte = memoryview(b""), 0


def encode_piece(
    piece: memoryview, tokenizer: TextTokenizer, after_cut: bool, with_offsets: bool, prompt: Prompt | None = None
) -> tuple[Tokens, int]:
    """A piece's tokens and its length in code points. prompt: before a text's first piece."""
    text = str(piece, "utf-8")
    return encode_all([text], tokenizer, after_cut=after_cut, with_offsets=with_offsets, prompt=prompt)[0], len(text)


def encode_all(
    texts: list[str], tokenizer: TextTokenizer, *, after_cut: bool, with_offsets: bool, prompt: Prompt | None = None
) -> list[Tokens]:
    """Tokens of each text; raises DocumentError where the tokenizer fails."""
    try:
        if prompt is not None:
            return prompt.before(texts, tokenizer, with_offsets=with_offsets)
        return tokenizer.encode(texts, after_cut=after_cut, with_offsets=with_offsets)
    except (KeyboardInterrupt, SystemExit, DocumentError):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise DocumentError(
            "tokenize", f"expected a text that the tokenizer can encode, it failed with {type(error).__name__}: {error}"
        ) from error


def block_of(tokens: Tokens, start: Cut, end: Cut) -> TokenBlock:
    if tokens.char_starts is None or tokens.char_ends is None:
        return TokenBlock(tokens.ids, end=end, replaced=tokens.replaced)
    return TokenBlock(tokens.ids, tokens.char_starts + np.int64(start.char), tokens.char_ends + np.int64(start.char), end, tokens.replaced)

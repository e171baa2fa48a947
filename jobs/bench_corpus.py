"""Corpora of given lengths for benchmarks: the demo's novels, one behind the other again and again, cut at their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from longscan.pipeline.tokenize.tokenizer import TextTokenizer

NOVELS = Path(__file__).parent / "demo" / "austen.parquet"
GROUP_BYTES = 4 << 20
MIN_GROUPS = 64
"""Text of a row group at most, and how many there are at least, as far as there are so many documents: a shard is whole row groups."""
SIGMA = 1.0
"""Of log-normal lengths."""
LENGTHS = ("constant", "lognormal", "giant", "mixed")


@dataclass(frozen=True, slots=True)
class Corpus:
    path: Path
    documents: int
    tokens: int
    """As planned; a document that is cut inside a word may have one or two more."""
    longest: int


def lengths_of(kind: str, size: int, tokens: int, seed: int = 0) -> list[int]:
    """Lengths of documents that come to `tokens`.

    kind: constant (all of `size`), lognormal (of median `size`), giant (one of all tokens), mixed (a quarter of the tokens in one
    giant, half log-normal, a quarter in documents of 500; in an order that is drawn).
    """
    random = np.random.default_rng(seed)
    if kind == "giant":
        return [tokens]
    if kind == "constant":
        return [size] * max(1, tokens // size)
    if kind == "mixed":
        parts = [tokens // 4, *lengths_of("lognormal", size, tokens // 2, seed), *([500] * (tokens // 2000))]
        return [int(n) for n in random.permutation(parts)]
    drawn: list[int] = []
    while sum(drawn) < tokens:
        drawn.append(max(1, round(float(random.lognormal(np.log(size), SIGMA)))))
    return drawn


def make_corpus(path: Path, lengths: Sequence[int], tokenizer: TextTokenizer) -> Corpus:
    """Write documents of these lengths, in the tokens of `tokenizer`, as a Parquet file with the columns id and text."""
    pieces = _Pieces(tokenizer)
    schema = pa.schema([pa.field("id", pa.string()), pa.field("text", pa.large_string())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in _groups(lengths):
            texts = [pieces.take(lengths[n]) for n in group]
            writer.write_table(pa.table({"id": [f"d{n}" for n in group], "text": texts}, schema), row_group_size=len(texts))
    return Corpus(path, len(lengths), sum(lengths), max(lengths))


def _groups(lengths: Sequence[int]) -> Iterator[range]:
    """Rows in order, a giant in one of its own, as the README asks for."""
    most = min(GROUP_BYTES, 4 * sum(lengths) // MIN_GROUPS)
    start = tokens = 0
    for n, length in enumerate(lengths):
        if 4 * length >= most and start < n:
            yield range(start, n)
            start, tokens = n, 0
        tokens += length
        if 4 * tokens >= most or n + 1 == len(lengths):
            yield range(start, n + 1)
            start, tokens = n + 1, 0


class _Pieces:
    """The novels as an endless text, taken by numbers of tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._text = "\n\n".join(pq.read_table(NOVELS, columns=["text"])["text"].to_pylist())
        (tokens,) = tokenizer.encode([self._text], with_offsets=True)
        assert tokens.char_starts is not None
        self._starts: npt.NDArray[np.int64] = np.append(tokens.char_starts, len(self._text))
        self._at = 0

    def take(self, tokens: int) -> str:
        parts = []
        while tokens:
            stop = min(self._at + tokens, len(self._starts) - 1)
            parts.append(self._text[self._starts[self._at] : self._starts[stop]])
            tokens -= stop - self._at
            self._at = stop % (len(self._starts) - 1)
        return "".join(parts)

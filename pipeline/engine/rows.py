"""From an entry's results to rows: windows that close in it, a row of tokens a segment, and the document at its end.

Sums run over tiles of 64 in the order of positions, so rows do not depend on how a document was cut into entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from longscan.kernels.segments import TILE
from longscan.pipeline.engine.opened import Taken
from longscan.pipeline.engine.places import Picks
from longscan.pipeline.engine.pool import check_range
from longscan.pipeline.engine.results import EntryResult
from longscan.pipeline.engine.score import Logprobs, bits_per_byte, scores_first_token, tile_sums
from longscan.pipeline.engine.settings import EngineSettings
from longscan.pipeline.errors import DocumentError
from longscan.pipeline.model.classify import apply
from longscan.pipeline.records import Document, DocumentRow, ErrorRow, HostCarry, Outcome, PositionRow, TokensRow, WindowRow


def error_row(document: Document, error: DocumentError) -> ErrorRow:
    """The row of errors/ that a document becomes."""
    return ErrorRow(document.ordinal, document.doc_id, document.file, document.row, error.stage, type(error).__name__, str(error))


class RowMaker:
    """Turns results into rows for one task."""

    def __init__(self, settings: EngineSettings) -> None:
        task = self.task = settings.task
        self.reset_tokens = settings.reset_tokens
        self.heads = settings.heads
        self.segment_tokens = settings.segment_tokens
        self.score_windows = task.scores and task.score.window_tokens is not None
        self.first_is_scored = scores_first_token(task, settings.context_id)
        self._narrow = task.embedding.dtype == "float16"
        self._poolings = task.embedding.poolings if task.embeds else []
        self._classifies, self._scores_tokens = task.classifies == "document", task.scores

    def empty(self, document: Document, num_bytes: int | None) -> DocumentRow:
        """The row of a document of no tokens."""
        return self._document_row(document, HostCarry(), EntryResult(), num_bytes)

    def advance(
        self, document: Document, carry: HostCarry, taken: Taken, result: EntryResult, *, ends: bool, num_bytes: int | None
    ) -> list[Outcome]:
        """Rows of an entry that holds the tokens `taken` at `carry.position`; moves `carry` on past it.

        Raises DocumentError where a vector cannot be written as asked.
        """
        if self._narrow:
            for vectors in (*result.vectors.values(), *result.window_vectors.values()):
                check_range(vectors)
        rows: list[Outcome] = []
        scores = self._scores(carry, result)
        sums = self._sums(carry.position, scores)
        if result.windows:
            rows += self._window_rows(document, carry, taken, result, sums)
        if scores is not None and self.task.score.per_token:
            rows += self._tokens_rows(document, carry.position, taken, scores)
        if result.picks is not None and result.picked is not None:
            rows += self._position_rows(document, carry.position, result.picks, result.picked)
        for tile_sum in sums:
            carry.log_likelihood += tile_sum
        if result.logprobs is not None:
            carry.next_logprob = float(result.logprobs[-1])
        carry.position += len(taken.ids)
        if ends:
            rows.append(self._document_row(document, carry, result, num_bytes))
        return rows

    def _scores(self, carry: HostCarry, result: EntryResult) -> Logprobs | None:
        """Log-probabilities of the entry's own tokens, [n]: the rows' results, moved on by one."""
        if result.logprobs is None:
            return None
        scores = np.empty_like(result.logprobs)
        scores[0] = carry.next_logprob if carry.position else result.first_logprob
        scores[1:] = result.logprobs[:-1]
        return scores

    def _sums(self, position: int, scores: Logprobs | None) -> list[float]:
        if scores is None:
            return []
        if not self.first_is_scored:
            scores = scores.copy()
            if self.reset_tokens is not None:
                scores[-position % self.reset_tokens :: self.reset_tokens] = 0
            elif position == 0:
                scores[0] = 0
        return tile_sums(scores)

    def _window_rows(
        self, document: Document, carry: HostCarry, taken: Taken, result: EntryResult, sums: list[float]
    ) -> Iterator[WindowRow]:
        closed = 0
        done = 0
        for run in result.windows:
            if taken.char_starts is not None and run.offset == 0:
                carry.window_char_start = int(taken.char_starts[done])
            for tile_sum in sums[done // TILE : done // TILE + run.num_tiles]:
                carry.window_log_likelihood += tile_sum
            done += run.num_tokens
            if not run.closes:
                continue
            yield WindowRow(
                document,
                window_index=run.window,
                token_start=(token_start := carry.position + done - run.num_tokens - run.offset),
                token_end=carry.position + done,
                char_start=carry.window_char_start,
                char_end=None if taken.char_ends is None else int(taken.char_ends[done - 1]),
                vectors={pooling: vectors[closed] for pooling, vectors in result.window_vectors.items()},
                log_likelihood=carry.window_log_likelihood if self.score_windows else None,
                context_start=None if self.reset_tokens is None else token_start - token_start % self.reset_tokens,
            )
            closed += 1
            carry.window_log_likelihood, carry.window_char_start = 0.0, None

    def _tokens_rows(self, document: Document, position: int, taken: Taken, scores: Logprobs) -> Iterator[TokensRow]:
        for start in range(0, len(taken.ids), self.segment_tokens):
            stop = start + self.segment_tokens
            yield TokensRow(document, position + start, taken.ids[start:stop], scores[start:stop])

    def _position_rows(self, document: Document, position: int, picks: Picks, picked: npt.NDArray[np.float32]) -> Iterator[PositionRow]:
        logits = apply(self.heads, picked)
        there = 0
        for index, row in zip(picks.indices.tolist(), picks.rows.tolist(), strict=True):
            if row < 0:
                yield PositionRow(document, index, None, None)
                continue
            yield PositionRow(document, index, position + row, {name: values[there] for name, values in logits.items()})
            there += 1

    def _document_row(self, document: Document, carry: HostCarry, result: EntryResult, num_bytes: int | None) -> DocumentRow:
        vectors = {pooling: result.vectors.get(pooling) for pooling in self._poolings}
        row = DocumentRow(document, carry.position, vectors, continued_at=carry.continued_at)
        if result.state_norms is not None:
            norms = np.sqrt(np.square(result.state_norms).reshape(len(result.state_norms), -1).sum(axis=1))
            row = replace(row, state_norm_max=float(norms.max()), state_norm_mean=float(norms.mean()))
        if self._classifies and result.vectors:
            (pooled,) = result.vectors.values()
            found = apply(self.heads, pooled[None].astype(np.float32))
            row = replace(row, logits={name: values[0] for name, values in found.items()})
        if not self._scores_tokens:
            return row
        scored = carry.position if self.first_is_scored else carry.position - self._fresh_starts(carry.position)
        return replace(
            row,
            log_likelihood=carry.log_likelihood,
            num_scored_tokens=scored,
            num_bytes=num_bytes,
            bits_per_byte=bits_per_byte(carry.log_likelihood, scored, num_bytes),
        )

    def _fresh_starts(self, num_tokens: int) -> int:
        """How often a document of so many tokens begins, the resets counted in."""
        return -(-num_tokens // self.reset_tokens) if self.reset_tokens is not None else min(num_tokens, 1)

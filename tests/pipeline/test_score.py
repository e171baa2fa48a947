"""Sums that do not depend on the cut, rows that hold each token once, and what the first token's score comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from fake_model import document, settings_of
from hypothesis import given
from hypothesis import strategies as st
from longscan.kernels.pool import Run
from longscan.kernels.segments import TILE
from longscan.pipeline.config import EmbeddingConfig, ScoreConfig, TaskConfig
from longscan.pipeline.engine.opened import Taken
from longscan.pipeline.engine.results import EntryResult
from longscan.pipeline.engine.rows import RowMaker
from longscan.pipeline.engine.score import bits_per_byte, context_token, scores_first_token, tile_sums
from longscan.pipeline.errors import ConfigError, DocumentError
from longscan.pipeline.records import DocumentRow, HostCarry, Outcome, TokensRow, WindowRow

LENGTHS = [1, 2, 63, 64, 65, 128, 200, 640, 1000]


def logprobs(count: int) -> np.ndarray:
    return -np.random.default_rng(count).exponential(3.0, count).astype(np.float32)


@pytest.mark.parametrize("length", LENGTHS)
def test_tile_sums_add_up(length: int) -> None:
    scores = logprobs(length)
    sums = tile_sums(scores)
    assert len(sums) == -(-length // TILE)
    assert math.isclose(math.fsum(sums), math.fsum(scores.tolist()), rel_tol=1e-14)
    for t, total in enumerate(sums):
        tile = scores[t * TILE : (t + 1) * TILE].astype(np.float64)
        assert math.isclose(total, float(tile.sum()), rel_tol=1e-14)


@given(st.integers(1, 1500), st.data())
def test_a_tile_has_one_sum_whatever_is_summed_with_it(length: int, data: st.DataObject) -> None:
    scores = logprobs(length)
    start = TILE * data.draw(st.integers(0, (length - 1) // TILE))
    stop = start + TILE * data.draw(st.integers(1, 30))
    assert tile_sums(scores[start:stop]) == tile_sums(scores)[start // TILE : stop // TILE]


def test_the_sum_of_no_tokens() -> None:
    assert tile_sums(np.zeros(0, dtype=np.float32)) == []


def test_what_is_not_a_number_stays_so() -> None:
    scores = logprobs(100)
    scores[70] = np.nan
    first, second = tile_sums(scores)
    assert math.isfinite(first)
    assert math.isnan(second)


def test_bits_per_byte() -> None:
    assert bits_per_byte(-8 * math.log(2.0), 4, 4) == pytest.approx(2.0)
    assert bits_per_byte(-1.0, 4, None) is None
    assert bits_per_byte(0.0, 0, 0) is None
    assert bits_per_byte(0.0, 0, 5) is None


def score_task(**keys: object) -> TaskConfig:
    return TaskConfig("score", score=ScoreConfig(**keys))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "add_bos", "bos", "eos", "expected"),
    [
        (score_task(), False, 1, 2, 1),
        (score_task(), False, None, 2, 2),
        (score_task(), True, 1, 2, 1),
        (score_task(first_token="skip"), False, 1, 2, None),
        (score_task(first_token="skip"), True, 1, 2, 1),
        (score_task(first_token="skip"), False, None, None, None),
        (TaskConfig("embed"), False, 1, 2, None),
        (TaskConfig("embed"), True, 1, 2, 1),
        (TaskConfig("embed_score"), False, 0, 0, 0),
    ],
)
def test_the_context_token(task: TaskConfig, add_bos: bool, bos: int | None, eos: int | None, expected: int | None) -> None:
    assert context_token(task, add_bos=add_bos, bos_id=bos, eos_id=eos) == expected


def test_a_context_that_the_tokenizer_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"first_token=skip"):
        context_token(score_task(), add_bos=False, bos_id=None, eos_id=None)
    with pytest.raises(ConfigError, match=r"model\.add_bos"):
        context_token(TaskConfig("embed"), add_bos=True, bos_id=None, eos_id=2)


def test_the_first_token_has_a_score_only_from_a_context() -> None:
    assert scores_first_token(score_task(), 1)
    assert not scores_first_token(score_task(first_token="skip"), 1)
    assert not scores_first_token(TaskConfig("embed"), 1)
    assert not scores_first_token(score_task(), None)


def runs(position: int, length: int, ends: bool, size: int | None) -> Iterator[Run]:
    """The windows of one entry, written out token by token."""
    if size is None:
        return
    windows: dict[int, list[int]] = {}
    for token in range(position, position + length):
        windows.setdefault(token // size, []).append(token)
    for window, tokens in windows.items():
        closes = tokens[-1] % size == size - 1 or (ends and tokens[-1] == position + length - 1)
        yield Run(0, window, 0, tokens[0] - window * size, len(tokens), closes)


def rows_of(
    ids: np.ndarray, scores: np.ndarray, cuts: Sequence[int], task: TaskConfig, *, context_id: int | None = 0, chars: bool = False
) -> list[Outcome]:
    """The rows of one document that goes through in entries of the lengths `cuts`. scores: [n], of each token."""
    maker = RowMaker(settings_of(task, lanes=1, step_tokens=128, segment_tokens=128, context_id=context_id))
    carry = HostCarry()
    places = np.arange(len(ids), dtype=np.int64)
    made: list[Outcome] = []
    for cut in cuts:
        start, stop = carry.position, carry.position + cut
        ends = stop == len(ids)
        offsets = (3 * places[start:stop], 3 * places[start:stop] + 2) if chars else (None, None)
        taken = Taken(ids[start:stop], -1 if ends else int(ids[stop]), *offsets)
        result = EntryResult(
            logprobs=np.append(scores[start + 1 : stop + 1], np.nan if ends else []).astype(np.float32)[:cut],
            first_logprob=float(scores[0]) if start == 0 and maker.first_is_scored else math.nan,
            windows=list(runs(start, cut, ends, task.score.window_tokens)),
        )
        made += maker.advance(document(0), carry, taken, result, ends=ends, num_bytes=3 * len(ids))
    return made


def whole(length: int) -> list[int]:
    return [length]


def by_segments(length: int, segments: int = 1) -> list[int]:
    size = 128 * segments
    return [min(size, length - start) for start in range(0, length, size)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", [64, 192, 512])
def test_rows_have_the_same_bits_however_the_document_is_cut(length: int, window: int) -> None:
    ids, scores = np.arange(length, dtype=np.int32), logprobs(length)
    task = score_task(per_token=True, window_tokens=window)
    expected = rows_of(ids, scores, whole(length), task, chars=True)
    for cuts in (by_segments(length), by_segments(length, 2), by_segments(length, 3)):
        got = rows_of(ids, scores, cuts, task, chars=True)
        for kind in (DocumentRow, WindowRow, TokensRow):
            assert [printed(row) for row in got if isinstance(row, kind)] == [printed(row) for row in expected if isinstance(row, kind)]


def printed(row: Outcome) -> list[object]:
    """A row's fields, arrays as bytes."""
    fields = [getattr(row, name) for name in row.__slots__ if name != "document"]
    return [value.tobytes() if isinstance(value, np.ndarray) else value for value in fields]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_document_holds_the_scores_of_all_its_tokens(length: int) -> None:
    ids, scores = np.arange(length, dtype=np.int32), logprobs(length)
    rows = rows_of(ids, scores, by_segments(length), score_task(per_token=True))
    (row,) = [row for row in rows if isinstance(row, DocumentRow)]
    assert rows[-1] is row
    assert (row.num_tokens, row.num_scored_tokens, row.num_bytes) == (length, length, 3 * length)
    assert row.log_likelihood == pytest.approx(math.fsum(scores.tolist()), rel=1e-13)
    assert row.bits_per_byte == pytest.approx(-math.fsum(scores.tolist()) / math.log(2) / (3 * length), rel=1e-13)
    tokens = [row for row in rows if isinstance(row, TokensRow)]
    assert [row.token_start for row in tokens] == list(range(0, length, 128)), "a row a segment"
    assert np.array_equal(np.concatenate([row.token_ids for row in tokens]), ids)
    assert np.array_equal(np.concatenate([row.logprobs for row in tokens]), scores)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_skipped_first_token_has_no_score_and_is_in_no_sum(length: int) -> None:
    ids, scores = np.arange(length, dtype=np.int32), logprobs(length)
    rows = rows_of(ids, scores, by_segments(length), score_task(per_token=True, first_token="skip"), context_id=None)
    row, first = rows[-1], next(row for row in rows if isinstance(row, TokensRow))
    assert isinstance(row, DocumentRow)
    assert row.num_scored_tokens == length - 1
    assert row.log_likelihood == pytest.approx(math.fsum(scores[1:].tolist()), rel=1e-13)
    assert (row.bits_per_byte is None) == (length == 1)
    assert np.isnan(first.logprobs).tolist() == [True] + [False] * (len(first.logprobs) - 1)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", [64, 192])
def test_a_window_holds_the_scores_and_characters_of_its_tokens(length: int, window: int) -> None:
    ids, scores = np.arange(length, dtype=np.int32), logprobs(length)
    rows = rows_of(ids, scores, by_segments(length), score_task(window_tokens=window), chars=True)
    windows = [row for row in rows if isinstance(row, WindowRow)]
    assert len(windows) == -(-length // window)
    for index, row in enumerate(windows):
        start, stop = index * window, min((index + 1) * window, length)
        assert (row.window_index, row.token_start, row.token_end) == (index, start, stop)
        assert (row.char_start, row.char_end) == (3 * start, 3 * (stop - 1) + 2)
        assert row.log_likelihood == pytest.approx(math.fsum(scores[start:stop].tolist()), rel=1e-13)
        assert row.vectors == {}


def test_windows_of_token_ids_have_no_characters() -> None:
    rows = rows_of(np.arange(130, dtype=np.int32), logprobs(130), whole(130), score_task(window_tokens=64))
    assert [(row.char_start, row.char_end) for row in rows if isinstance(row, WindowRow)] == [(None, None)] * 3


def test_a_document_of_no_tokens() -> None:
    both = TaskConfig("embed_score", EmbeddingConfig(pooling=["mean", "last"]))
    row = RowMaker(settings_of(both, lanes=1, step_tokens=128, segment_tokens=128, context_id=0)).empty(document(3), 0)
    assert row.document.ordinal == 3
    assert (row.num_tokens, row.vectors) == (0, {"mean": None, "last": None})
    assert (row.log_likelihood, row.num_scored_tokens, row.num_bytes, row.bits_per_byte) == (0.0, 0, 0, None)
    row = RowMaker(settings_of(TaskConfig("embed"), lanes=1, step_tokens=128, segment_tokens=128)).empty(document(3), 0)
    assert (row.vectors, row.log_likelihood, row.num_scored_tokens, row.num_bytes) == ({"mean": None}, None, None, None)


def test_a_vector_out_of_range_is_the_documents_error() -> None:
    maker = RowMaker(settings_of(TaskConfig("embed", EmbeddingConfig(dtype="float16")), lanes=1, step_tokens=128, segment_tokens=128))
    result = EntryResult(vectors={"mean": np.array([1.0, np.inf], dtype=np.float16)})
    taken = Taken(np.zeros(1, dtype=np.int32), -1)
    with pytest.raises(DocumentError, match="float16"):
        maker.advance(document(0), HostCarry(), taken, result, ends=True, num_bytes=None)

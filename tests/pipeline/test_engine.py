"""Documents through the engine: the right numbers, the same bits in any company, and nobody hangs when something breaks."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import CountingModel, document, engine_of, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from longscan.kernels.segments import NO_LANE, Segments
from longscan.pipeline.config import EmbeddingConfig, ScoreConfig, TaskConfig
from longscan.pipeline.engine.engine import Engine, EngineFailed
from longscan.pipeline.errors import ConfigError, DocumentError
from longscan.pipeline.records import Cut, DocumentRow, ErrorRow, Outcome, TokenBlock, TokensRow, TokenStream, WindowRow
from waiting import HANG_S

CONTEXT = 3
POOLINGS = ["mean", "last", "max", "weighted_mean"]
EVERYTHING = TaskConfig(
    "embed_score",
    EmbeddingConfig(pooling=POOLINGS, normalize=False, window_tokens=128),
    ScoreConfig(per_token=True, window_tokens=128),
)
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 200, 256, 257, 1000, 0, 640, 3, 2000]

Results = dict[int, list[Outcome]]


def engine(task: TaskConfig = EVERYTHING, model: Any = None, device: str = "cpu", **sizes: Any) -> Engine:
    sizes = {"lanes": 3, "step_tokens": 512, "segment_tokens": 128, "context_id": CONTEXT} | sizes
    return engine_of(model or CountingModel(device=device), task, device=device, **sizes)


def ids_of(ordinal: int, length: int) -> np.ndarray:
    return np.random.default_rng(ordinal).integers(0, 11, length).astype(np.int32)


def streams(lengths: Iterable[int] = LENGTHS, *, block: int = 100, first: int = 0) -> Iterator[TokenStream]:
    for ordinal, length in enumerate(lengths, first):
        yield stream(ordinal, ids_of(ordinal, length), block=block, offsets=True, num_bytes=3 * length)


def collect(outcomes: Iterable[Outcome]) -> Results:
    rows: Results = defaultdict(list)
    for outcome in outcomes:
        rows[outcome.ordinal if isinstance(outcome, ErrorRow) else outcome.document.ordinal].append(outcome)
    return rows


def printed(row: Outcome) -> list[Any]:
    """All of a row but its document, numbers as their bits."""

    def bits(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.dtype, value.shape, value.tobytes()
        if isinstance(value, dict):
            return {key: bits(part) for key, part in value.items()}
        return value.hex() if isinstance(value, float) else value

    return [type(row), *(bits(getattr(row, name)) for name in row.__slots__ if name != "document")]


def same(got: Results, expected: Results) -> None:
    assert got.keys() == expected.keys()
    for ordinal, rows in expected.items():
        for kind in (WindowRow, TokensRow, DocumentRow, ErrorRow):
            of_kind = [printed(row) for row in got[ordinal] if isinstance(row, kind)]
            assert of_kind == [printed(row) for row in rows if isinstance(row, kind)], f"document {ordinal}"


@pytest.fixture(scope="module")
def alone() -> Results:
    """Every document alone in an engine of its own, in steps that hold it whole."""
    rows: Results = {}
    for ordinal, length in enumerate(LENGTHS):
        with engine(lanes=1, step_tokens=4096) as one:
            rows |= collect(one.process(streams([length], block=10_000, first=ordinal)))
    return rows


class Truth:
    """A document by the model's definition, whole and in float64."""

    def __init__(self, ordinal: int, length: int, context: bool = True) -> None:
        self.ids = ids_of(ordinal, length)
        seen = np.concatenate([[CONTEXT] if context else [], self.ids]).astype(int)
        counts = np.cumsum(np.eye(11)[seen], axis=0)
        shares = counts / counts.sum(axis=1, keepdims=True)
        self.hidden = shares[1:] if context else shares
        before = shares[:-1]
        scored = self.ids if context else self.ids[1:]
        self.scores = np.log((before[np.arange(len(before)), scored] + 1 / 11) / 2)

    def vectors(self, start: int, stop: int) -> dict[str, np.ndarray]:
        hidden = self.hidden[start:stop]
        weights = np.arange(1, len(hidden) + 1)[:, None]
        return {
            "mean": hidden.mean(axis=0),
            "last": hidden[-1],
            "max": hidden.max(axis=0),
            "weighted_mean": (weights * hidden).sum(axis=0) / weights.sum(),
        }


def close(got: Any, expected: dict[str, np.ndarray]) -> None:
    assert list(got) == list(expected)
    for pooling, vector in expected.items():
        assert got[pooling].dtype == np.float32
        assert np.allclose(got[pooling], vector, atol=1e-6), pooling


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_row_is_what_the_whole_document_says(device: str) -> None:
    with engine(device=device) as one:
        rows = collect(one.process(streams()))
    assert sorted(rows) == list(range(len(LENGTHS)))
    for ordinal, length in enumerate(LENGTHS):
        truth = Truth(ordinal, length)
        *parts, last = rows[ordinal]
        assert isinstance(last, DocumentRow), "the document's row comes last"
        windows = [row for row in parts if isinstance(row, WindowRow)]
        tokens = [row for row in parts if isinstance(row, TokensRow)]
        assert (last.num_tokens, last.num_scored_tokens, last.num_bytes) == (length, length, 3 * length)
        assert last.log_likelihood == pytest.approx(truth.scores.sum(), abs=1e-4)
        assert [(w.token_start, w.token_end) for w in windows] == [(s, min(s + 128, length)) for s in range(0, length, 128)]
        if not length:
            assert last.vectors == dict.fromkeys(POOLINGS)
            continue
        close(last.vectors, truth.vectors(0, length))
        for window in windows:
            close(window.vectors, truth.vectors(window.token_start, window.token_end))
            assert window.log_likelihood == pytest.approx(truth.scores[window.token_start : window.token_end].sum(), abs=1e-4)
            assert (window.char_start, window.char_end) == (3 * window.token_start, 3 * window.token_end - 1)
        assert np.array_equal(np.concatenate([row.token_ids for row in tokens]), truth.ids)
        assert np.allclose(np.concatenate([row.logprobs for row in tokens]), truth.scores, atol=1e-6)


@pytest.mark.parametrize(
    "sizes",
    [
        {"lanes": 1, "step_tokens": 128},
        {"lanes": 2, "step_tokens": 192},
        {"lanes": 8, "step_tokens": 1024},
        {"lanes": 3, "step_tokens": 512, "constant_shape": True},
    ],
    ids=lambda sizes: "-".join(str(size) for size in sizes.values()),
)
@pytest.mark.parametrize("block", [1, 1000])
def test_a_document_has_the_same_bits_alone_and_in_company(sizes: dict[str, Any], block: int, alone: Results) -> None:
    with engine(**sizes) as one:
        same(collect(one.process(streams(block=block))), alone)


@pytest.mark.gpu
def test_the_same_bits_in_any_company_with_a_step_in_flight() -> None:
    """Steps have one shape on a GPU; documents share them with others or do not."""
    alone: Results = {}
    for ordinal, length in enumerate(LENGTHS):
        with engine(device="cuda") as one:
            alone |= collect(one.process(streams([length], first=ordinal)))
    with engine(device="cuda") as one, ThreadPoolExecutor(4) as pool:
        for call in [pool.submit(lambda: collect(one.process(streams()))) for _ in range(4)]:
            same(call.result(), alone)


def test_the_same_bits_for_several_callers_at_once(alone: Results) -> None:
    with engine(lanes=2) as one, ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(lambda: collect(one.process(streams()))) for _ in range(4)]
        for call in calls:
            same(call.result(), alone)


@given(
    lengths=st.lists(st.integers(0, 700), max_size=12),
    lanes=st.integers(1, 4),
    step=st.integers(2, 8),
    block=st.integers(1, 300),
    constant_shape=st.booleans(),
)
@settings(deadline=None, max_examples=25)
def test_any_documents_in_any_engine(lengths: list[int], lanes: int, step: int, block: int, constant_shape: bool) -> None:
    model, done = CountingModel(), []
    sizes = {"lanes": lanes, "step_tokens": 64 * step, "constant_shape": constant_shape}
    with engine(model=model, on_tokens=lambda tokens, _: done.append(tokens), **sizes) as one:
        rows = collect(one.process(streams(lengths, block=block)))
        totals = one.totals
    assert {ordinal: made[-1].num_tokens for ordinal, made in rows.items() if isinstance(made[-1], DocumentRow)} == dict(enumerate(lengths))
    assert sum(done) == sum(lengths), "progress counts every token once"
    for ordinal, length in enumerate(lengths):
        if length:
            close(rows[ordinal][-1].vectors, Truth(ordinal, length).vectors(0, length))  # type: ignore[union-attr]
    steps = model.steps[1:]  # after the context's own
    assert (totals.steps, totals.tokens, totals.rows) == (len(steps), sum(lengths), sum(segments.num_rows for segments in steps))
    assert 0 <= totals.waste < 1
    shapes = {segments.num_tiles for segments in model.steps}
    assert not constant_shape or shapes == {step}
    assert max(shapes, default=0) <= step


def vectors_of(rows: Results) -> dict[int, Any]:
    return {ordinal: printed(made[-1])[2] for ordinal, made in rows.items()}


def test_a_skipped_first_token_leaves_the_vectors_of_embed() -> None:
    embedding = EmbeddingConfig(pooling=POOLINGS)
    with engine(TaskConfig("embed", embedding), context_id=None) as one:
        embedded = collect(one.process(streams()))
    with engine(TaskConfig("embed_score", embedding, ScoreConfig(per_token=True, first_token="skip")), context_id=None) as one:
        scored = collect(one.process(streams()))
    assert vectors_of(scored) == vectors_of(embedded)
    for ordinal, length in enumerate(LENGTHS):
        row = scored[ordinal][-1]
        assert isinstance(row, DocumentRow)
        assert row.num_scored_tokens == max(length - 1, 0)
        if length:
            assert row.log_likelihood == pytest.approx(Truth(ordinal, length, context=False).scores.sum(), abs=1e-4)
            first = scored[ordinal][0]
            assert isinstance(first, TokensRow)
            assert math.isnan(first.logprobs[0])


def test_context_is_seen_and_in_no_count_pool_or_window() -> None:
    with engine(TaskConfig("embed", EmbeddingConfig(pooling=POOLINGS, normalize=False))) as one:
        rows = collect(one.process(streams()))
    for ordinal, length in enumerate(LENGTHS):
        row = rows[ordinal][-1]
        assert isinstance(row, DocumentRow)
        assert row.num_tokens == length
        if length:
            close(row.vectors, Truth(ordinal, length).vectors(0, length))


def test_score_alone_makes_no_vectors() -> None:
    with engine(TaskConfig("score", score=ScoreConfig(window_tokens=64))) as one:
        rows = collect(one.process(streams([130])))[0]
    assert [type(row) for row in rows] == [WindowRow, WindowRow, WindowRow, DocumentRow]
    assert all(row.vectors == {} for row in rows)  # type: ignore[union-attr]


def test_score_windows_beside_vectors_without_windows() -> None:
    with engine(TaskConfig("embed_score", score=ScoreConfig(window_tokens=64))) as one:
        *windows, last = collect(one.process(streams([130])))[0]
    assert [list(window.vectors) for window in windows] == [[], [], []]  # type: ignore[union-attr]
    assert list(last.vectors) == ["mean"]  # type: ignore[union-attr]


def test_an_empty_document_runs_no_step() -> None:
    model = CountingModel()
    with engine(model=model, context_id=None) as one:
        (row,) = one.process(streams([0]))
    assert isinstance(row, DocumentRow)
    assert (row.num_tokens, row.log_likelihood, row.num_scored_tokens, row.bits_per_byte) == (0, 0.0, 0, None)
    assert model.steps == []


def test_no_documents() -> None:
    with engine() as one:
        assert list(one.process([])) == []


def test_rows_do_not_keep_the_text() -> None:
    text = memoryview(b"a b c")
    given_stream = TokenStream(document(0, bytes(text)), stream(0, [1, 2, 3]).blocks, 5, 3)
    with engine() as one:
        assert all(row.document.text is None for row in one.process([given_stream]))  # type: ignore[union-attr]


def test_a_document_that_breaks_midway_is_an_error_row_and_frees_its_lane(alone: Results) -> None:
    broken = [stream(100 + at, ids_of(0, 3000), fails_at=at) for at in (0, 1, 700, 2900)]
    mixed = [item for pair in zip(streams(LENGTHS[:4]), broken, strict=True) for item in pair]
    with engine(lanes=1, step_tokens=256) as one:
        rows = collect(one.process([*mixed, *streams(LENGTHS[4:], first=4)]))
    errors = {ordinal: made for ordinal, made in rows.items() if ordinal >= 100}
    for at in (0, 1, 700, 2900):
        *before, error = errors[100 + at]
        assert isinstance(error, ErrorRow), "the last row of a broken document"
        assert (error.doc_id, error.stage, error.error) == (f"corpus#{100 + at}", "tokenize", "DocumentError")
        assert error.message == f"cannot cut token {at}"
        assert not any(isinstance(row, DocumentRow | ErrorRow) for row in before)
    same({ordinal: made for ordinal, made in rows.items() if ordinal < 100}, alone)


class Waiting(CountingModel):
    """Says when it is in a step that holds a document's start, and goes on when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def step(self, ids_T: torch.Tensor, segments: Segments, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if segments.entries[0].lane_in != NO_LANE:  # not the context's own step
            self.entered.set()
            assert self.go_on.wait(HANG_S)
        return super().step(ids_T, segments, state)


def test_what_was_on_the_device_when_a_document_broke_is_dropped() -> None:
    model = Waiting()
    whole = stream(0, ids_of(0, 5000))

    def blocks() -> Iterator[Any]:
        yield next(whole.blocks)
        assert model.entered.wait(HANG_S)
        raise DocumentError("tokenize", "broken while it runs")

    with engine(model=model) as one:
        outcomes = one.process([TokenStream(whole.document, blocks(), None, 5000), *streams([300], first=1)])
        error = next(outcomes)
        model.go_on.set()
        rows = collect(outcomes)
    assert isinstance(error, ErrorRow)
    assert list(rows) == [1], "rows of a document after its error"
    assert isinstance(rows[1][-1], DocumentRow)


def test_error_rows_of_earlier_verbs_pass_through(alone: Results) -> None:
    error = ErrorRow(50, None, "corpus.parquet", 50, "read", "InputError", "null text")
    with engine() as one:
        rows = collect(one.process([error, *streams()]))
    assert rows.pop(50) == [error]
    same(rows, alone)


@pytest.mark.parametrize("wrong", [-1, 11, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_an_error_row(wrong: int) -> None:
    ids = [1] * 300 + [wrong] + [1] * 300
    with engine(vocab_size=11) as one:
        rows = collect(one.process([stream(0, ids, block=100), *streams([5], first=1)]))
    error = rows[0][-1]
    assert isinstance(error, ErrorRow)
    assert error.stage == "engine"
    assert error.message.startswith(f"token 300: expected an id from 0 to 10, the model's vocabulary, found {wrong}")
    assert isinstance(rows[1][-1], DocumentRow)


def test_a_vector_that_float16_cannot_hold_is_an_error_row() -> None:
    class Loud(CountingModel):
        def step(self, ids_T: torch.Tensor, segments: Segments, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden_TD, state = super().step(ids_T, segments, state)
            return hidden_TD * torch.where(ids_T == 5, 1e6, 1.0)[:, None], state

    task = TaskConfig("embed", EmbeddingConfig(pooling=["last"], normalize=False, dtype="float16", window_tokens=64))
    with engine(task, Loud(), context_id=None) as one:
        rows = collect(one.process([stream(0, [1] * 63 + [5] + [1] * 900), stream(1, [1] * 40)]))
    assert [type(row) for row in rows[0]] == [ErrorRow]
    assert [row.vectors["last"].dtype for row in rows[1]] == [np.float16] * 2  # type: ignore[union-attr]


class Breaking(CountingModel):
    """Works until the event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = threading.Event()

    def step(self, ids_T: torch.Tensor, segments: Segments, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.broken.is_set():
            raise FloatingPointError("device lost")
        return super().step(ids_T, segments, state)


def test_a_failing_step_reaches_every_caller() -> None:
    model = Breaking()
    with engine(model=model, lanes=8) as one, ThreadPoolExecutor(3) as pool:
        endless = [iter(one.process(streams([10_000] * 50, first=100 * k))) for k in range(3)]
        for rows in endless:
            next(rows)
        model.broken.set()
        for call in [pool.submit(list, rows) for rows in endless]:
            with pytest.raises(EngineFailed, match="FloatingPointError: device lost") as caught:
                call.result(timeout=HANG_S)
            assert isinstance(caught.value.__cause__, FloatingPointError)
        with pytest.raises(EngineFailed, match="device lost"):
            list(one.process(streams([1])))


def test_what_streams_raise_ends_their_call_alone(alone: Results) -> None:
    def unreadable() -> Iterator[TokenStream]:
        yield from streams([5000, 10])
        raise OSError("the disk is gone")

    with engine(lanes=1) as one:
        with pytest.raises(OSError, match="the disk is gone"):
            list(one.process(unreadable()))
        same(collect(one.process(streams())), alone)


def test_a_caller_that_leaves_frees_its_lanes_and_closes_what_it_read(alone: Results) -> None:
    closed = []

    def endless() -> Iterator[TokenStream]:
        try:
            yield from streams([100_000] * 100)
        finally:
            closed.append("streams")

    with engine(lanes=2) as one:
        rows = one.process(endless())
        next(rows)
        rows.close()
        assert closed == ["streams"]
        same(collect(one.process(streams())), alone)


def test_a_caller_that_does_not_read_holds_up_nobody(alone: Results) -> None:
    with engine(lanes=3) as one:
        unread = one.process(streams([100_000], first=7))
        next(unread)
        same(collect(one.process(streams())), alone)
        assert collect(unread)[7][-1].num_tokens == 100_000  # type: ignore[union-attr]


def test_rows_wait_for_a_slow_reader_of_a_few_steps_alone() -> None:
    """As where a disk is slow: who does not read does not feed, and rows come of what was fed."""
    most = 0
    with engine(lanes=2, step_tokens=512) as one:
        for _ in one.process(streams([5000] * 8)):
            time.sleep(0.001)
            most = max([most, *(len(caller.news) for caller in one._callers)])
    assert 0 < most <= 2 * 8 * 512 // 128, "a window and a row of tokens for every 128 of six steps at hand and two on the device"


def test_a_closed_engine_says_so_and_has_no_thread() -> None:
    with engine() as one:
        rows = one.process(streams([100_000]))
        next(rows)
        names = [thread.name for thread in threading.enumerate()]
        assert "longscan-engine" in names
    one.close()
    assert "longscan-engine" not in [thread.name for thread in threading.enumerate()]
    for call in (rows, one.process(streams([1]))):
        with pytest.raises(EngineFailed, match="closed"):
            list(call)


def test_what_a_plan_takes_tokens_for_is_told_by_the_bytes_of_their_text() -> None:
    told: list[tuple[int, int]] = []

    def cut(ordinal: int, tokens: int, bytes_per_token: float) -> TokenStream:
        plain = stream(ordinal, ids_of(ordinal, tokens), block=300)
        position = 0

        def blocks() -> Iterator[TokenBlock]:
            nonlocal position
            for block in plain.blocks:
                position += len(block.ids)
                yield replace(block, end=Cut(round(bytes_per_token * position), 0, position))

        return TokenStream(plain.document, blocks(), None, tokens)

    with engine(lanes=3, step_tokens=512, on_tokens=lambda *given: told.append(given)) as one:
        rows = collect(one.process([cut(0, 3000, 2.5), cut(1, 600, 8), cut(2, 500, 0), stream(3, ids_of(3, 100))]))
    assert len(rows) == 4
    assert sum(tokens for tokens, _ in told) == 4200
    expected = 3000 * 2.5 / 4 + 600 * 8 / 4 + 500 + 100  # of token ids there are no bytes, and of the last no cut is known
    assert sum(estimated for _, estimated in told) == pytest.approx(expected, abs=len(told)), "each step's is a whole number"


def test_a_long_document_is_cut_only_a_few_steps_ahead() -> None:
    cut = done = ahead = 0

    def count(tokens: int, _: int) -> None:
        nonlocal done
        done += tokens

    def watched(blocks: Iterator[Any]) -> Iterator[Any]:
        nonlocal cut, ahead
        for block in blocks:
            cut += len(block.ids)
            ahead = max(ahead, cut - done)
            yield block

    long = stream(0, ids_of(0, 200_000), block=64)
    with engine(lanes=2, step_tokens=1024, on_tokens=count) as one:
        rows = list(one.process([TokenStream(long.document, watched(long.blocks), None, 200_000)]))
    assert rows[-1].num_tokens == done == cut == 200_000  # type: ignore[union-attr]
    assert ahead <= 4 * 1024, "two steps at hand, one or two on their way"


def test_documents_of_a_token_are_opened_only_a_few_steps_ahead() -> None:
    """Each takes a tile of a step: by their tokens a caller would hold 64 times as many as go into the steps that it is ahead."""
    given = done = ahead = 0

    def count(tokens: int, _: int) -> None:
        nonlocal done
        done += tokens

    def watched() -> Iterator[TokenStream]:
        nonlocal given, ahead
        for one in streams([1] * 2000):
            given += 1
            ahead = max(ahead, given - done)
            yield one

    with engine(lanes=2, step_tokens=512, on_tokens=count) as one:
        rows = collect(one.process(watched()))
    assert len(rows) == done == 2000
    assert ahead <= 8 * 8 + 8, "six steps at hand, two on their way, and a few that are opened together"


def test_a_wrong_estimate_does_not_fill_the_memory() -> None:
    cut = done = ahead = 0

    def count(tokens: int, _: int) -> None:
        nonlocal done
        done += tokens

    def underestimated(ordinal: int) -> TokenStream:
        long = stream(ordinal, ids_of(ordinal, 5000), block=64)

        def blocks() -> Iterator[Any]:
            nonlocal cut, ahead
            for block in long.blocks:
                cut += len(block.ids)
                ahead = max(ahead, cut - done)
                yield block

        return TokenStream(long.document, blocks(), None, 1)

    with engine(lanes=2, step_tokens=512, on_tokens=count) as one:
        rows = collect(one.process(underestimated(ordinal) for ordinal in range(30)))
    assert len(rows) == 30
    assert done == cut == 30 * 5000
    assert ahead <= 10 * 512, "six steps at hand, two on their way, and what keeps documents with lanes going"


def test_a_giant_is_opened_when_all_but_one_are_nearly_cut() -> None:
    uncut: dict[int, int] = {}
    at_opening = []

    def counted(ordinal: int) -> TokenStream:
        giant = stream(ordinal, ids_of(ordinal, 20_000), block=64)

        def blocks() -> Iterator[Any]:
            for block in giant.blocks:
                uncut[ordinal] -= len(block.ids)
                yield block

        return TokenStream(giant.document, blocks(), None, 20_000)

    def giants() -> Iterator[TokenStream]:
        for ordinal in range(5):
            at_opening.append(sum(uncut.values()))
            uncut[ordinal] = 20_000
            yield counted(ordinal)

    with engine(lanes=8, step_tokens=512) as one:
        list(one.process(giants()))
    assert at_opening[0] == 0
    assert at_opening[1] > 10_000, "the second beside the first"
    assert all(left <= 20_000 for left in at_opening[2:])


def test_a_giant_does_not_starve_the_many() -> None:
    with engine(lanes=2, step_tokens=512) as one:
        order = [row.document.ordinal for row in one.process(streams([60_000, *[50] * 40])) if isinstance(row, DocumentRow)]
    assert order[-1] == 0, "forty short documents are through before the giant"
    assert sorted(order) == list(range(41))


def test_a_document_within_a_step_takes_no_lane() -> None:
    model = CountingModel()
    with engine(model=model, context_id=None) as one:
        list(one.process(streams([50, 100, 100])))
    assert {entry.lane_out for segments in model.steps for entry in segments.entries} == {NO_LANE}


@pytest.mark.parametrize(
    ("task", "sizes", "key"),
    [
        (EVERYTHING, {"segment_tokens": 1024}, r"engine\.segment_tokens"),
        (EVERYTHING, {"step_tokens": 100}, r"engine\.step_tokens"),
        (TaskConfig("embed", EmbeddingConfig(truncate_dim=12)), {}, r"task\.embedding\.truncate_dim"),
    ],
)
def test_sizes_that_cannot_work_are_refused(task: TaskConfig, sizes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        engine(task, **sizes)

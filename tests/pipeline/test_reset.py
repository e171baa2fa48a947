"""engine.reset_tokens: what begins at a reset begins as a document of its own does, to the bit, in any company; the rest goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import CountingModel, engine_of, stream
from fakes import tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments
from longscan.pipeline.config import EmbeddingConfig, ScoreConfig, TaskConfig
from longscan.pipeline.engine.schedule import Candidate, plan_step
from longscan.pipeline.engine.steps import starts_afresh
from longscan.pipeline.model import load_model
from longscan.pipeline.records import DocumentRow, Outcome, TokensRow, WindowRow

POOLINGS = ["mean", "last", "max"]
RESET = 128


def task(first_token: str = "auto", window: int = RESET) -> TaskConfig:
    embedding = EmbeddingConfig(pooling=POOLINGS, normalize=False, window_tokens=window)
    return TaskConfig("embed_score", embedding, ScoreConfig(per_token=True, window_tokens=window, first_token=first_token))


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), num_layers=2)
    return load_model(folder, dtype=torch.float32, device="cpu", backend="torch")


def run(model: Any, documents: dict[int, np.ndarray], asked: TaskConfig, **sizes: Any) -> dict[int, list[Outcome]]:
    sizes = {"lanes": 3, "step_tokens": 1024, "segment_tokens": 64, "context_id": 3} | sizes
    rows: dict[int, list[Outcome]] = {ordinal: [] for ordinal in documents}
    with engine_of(model, asked, **sizes) as engine:
        for row in engine.process(stream(ordinal, ids, block=100, num_bytes=len(ids)) for ordinal, ids in documents.items()):
            rows[row.document.ordinal].append(row)  # type: ignore[union-attr]
    return rows


def of(rows: list[Outcome], kind: type) -> list[Any]:
    return [row for row in rows if isinstance(row, kind)]


def ids_of(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 11, length).astype(np.int32)


@pytest.mark.parametrize("context", [3, None], ids=["context", "no_context"])
@pytest.mark.parametrize("segment", [64, 128, 256, 512])
@pytest.mark.parametrize("name", ["counting", "mamba2"])
def test_each_part_has_the_bits_of_a_document_of_its_own(name: str, segment: int, context: int | None, mamba2: Any) -> None:
    model = CountingModel() if name == "counting" else mamba2
    asked = task("auto" if context is not None else "skip")
    lengths = [1, 127, 128, 129, 256, 700, 1024, 2000]
    whole = {n: ids_of(n, length) for n, length in enumerate(lengths)}
    parts = {100 * n + k: ids[k * RESET : (k + 1) * RESET] for n, ids in whole.items() for k in range(-(-len(ids) // RESET))}
    got = run(model, whole, asked, segment_tokens=segment, context_id=context, reset_tokens=RESET)
    expected = run(model, parts, asked, context_id=context)
    for n, ids in whole.items():
        windows, (row,) = of(got[n], WindowRow), of(got[n], DocumentRow)
        logprobs = np.concatenate([tokens.logprobs for tokens in of(got[n], TokensRow)])
        assert len(windows) == -(-len(ids) // RESET)
        fresh = [expected[100 * n + k] for k in range(len(windows))]
        assert np.array_equal(logprobs, np.concatenate([t.logprobs for rows in fresh for t in of(rows, TokensRow)]), equal_nan=True)
        for k, (window, rows) in enumerate(zip(windows, fresh, strict=True)):
            (alone,) = of(rows, DocumentRow)
            assert (window.token_start, window.context_start) == (k * RESET, k * RESET)
            assert window.log_likelihood == alone.log_likelihood
            assert all(np.array_equal(window.vectors[pooling], alone.vectors[pooling]) for pooling in POOLINGS)
        assert row.num_scored_tokens == len(ids) - (len(windows) if context is None else 0)
        assert row.log_likelihood == pytest.approx(sum(window.log_likelihood for window in windows))
        assert np.count_nonzero(np.isnan(logprobs)) == (len(windows) if context is None else 0)
        mean = sum(of(rows, DocumentRow)[0].vectors["mean"].astype(np.float64) * of(rows, DocumentRow)[0].num_tokens for rows in fresh)
        assert np.allclose(row.vectors["mean"], mean / len(ids), atol=1e-6)
        assert np.array_equal(row.vectors["last"], of(fresh[-1], DocumentRow)[0].vectors["last"])
        assert np.array_equal(row.vectors["max"], np.max([of(rows, DocumentRow)[0].vectors["max"] for rows in fresh], axis=0))


def printed(rows: list[Outcome]) -> list[Any]:
    return [
        (type(row).__name__, getattr(row, "log_likelihood", None), [v.tobytes() for v in getattr(row, "vectors", {}).values()])
        for row in rows
    ]


@given(st.lists(st.integers(1, 900), max_size=8), st.sampled_from([64, 128, 256]), st.sampled_from([64, 128, 256]))
@settings(max_examples=25, deadline=None)
def test_company_changes_no_bit(lengths: list[int], segment: int, reset: int) -> None:
    chosen = ids_of(77, 850)
    sizes = {"segment_tokens": segment, "reset_tokens": reset}
    alone = run(CountingModel(), {0: chosen}, task(window=192), **sizes)[0]
    company = {n: ids_of(n, length) for n, length in enumerate(lengths, 1)}
    among = run(CountingModel(), {**company, 0: chosen}, task(window=192), step_tokens=512, **sizes)[0]
    for kind in (WindowRow, DocumentRow):
        assert printed(of(among, kind)) == printed(of(alone, kind))


def test_windows_that_span_resets_say_since_when_they_have_seen_all() -> None:
    windows = of(run(CountingModel(), {0: ids_of(0, 500)}, task(window=192), reset_tokens=RESET)[0], WindowRow)
    assert [(w.token_start, w.context_start) for w in windows] == [(0, 0), (192, 128), (384, 384)]
    without = of(run(CountingModel(), {0: ids_of(0, 500)}, task(window=192))[0], WindowRow)
    assert [w.context_start for w in without] == [None] * 3
    assert any(not np.array_equal(a.vectors["last"], b.vectors["last"]) for a, b in zip(windows, without, strict=True))


def test_an_entry_is_cut_where_it_starts_afresh() -> None:
    entry = Entry(3, 300, position=256, lane_in=5, lane_out=5, ends=False)
    first, second, third = starts_afresh(entry, 128, 9)
    assert first == Entry(3, 128, 0, lane_in=9, lane_out=NO_LANE)
    assert second == Entry(5, 128, 0, lane_in=9, lane_out=NO_LANE)
    assert third == Entry(7, 44, 0, lane_in=9, lane_out=5)
    assert list(starts_afresh(Entry(0, 64, position=64, lane_in=5, ends=True), 128, 9)) == [Entry(0, 64, 64, lane_in=5, ends=True)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 900)), min_size=1, max_size=6), st.sampled_from([128, 256, 512]))
def test_no_entry_both_reads_its_lane_and_starts_afresh(documents: list[tuple[int, int]], reset: int) -> None:
    candidates = [Candidate(n, 0, 64 * at, ready, True, lane=n) for n, (at, ready) in enumerate(documents)]
    plan = plan_step(candidates, [], step_tokens=2048, segment_tokens=64, reset_tokens=reset)
    assert plan.assignments
    for a in plan.assignments:
        assert a.position % reset == 0 or a.position % reset + a.num_tokens <= reset


def test_state_norms_are_those_of_the_final_state(mamba2: Any) -> None:
    asked = TaskConfig("embed", state_norm=True)
    documents = {n: ids_of(n, length) for n, length in enumerate([1, 64, 65, 300, 700, 5, 6, 7, 0])}
    rows = run(mamba2, documents, asked, lanes=2, step_tokens=256)
    for n, ids in documents.items():
        (row,) = of(rows[n], DocumentRow)
        if not len(ids):
            assert (row.state_norm_max, row.state_norm_mean) == (None, None)
            continue
        state = mamba2.new_state(1)
        tiles = -(-len(ids) // TILE)
        padded = torch.zeros((1 + tiles) * TILE, dtype=torch.int64)
        padded[0] = 3
        with torch.inference_mode():
            mamba2.step(padded[:TILE], Segments.pack([Entry(0, 1, lane_out=0)], 1), state)
            padded[: len(ids)] = torch.from_numpy(ids)
            mamba2.step(padded[: tiles * TILE], Segments.pack([Entry(0, len(ids), lane_in=0, lane_out=0)], tiles), state)
        norms = state.ssm[:, 0].double().flatten(1).norm(dim=1)
        assert row.state_norm_max == pytest.approx(float(norms.max()), rel=1e-12)
        assert row.state_norm_mean == pytest.approx(float(norms.mean()), rel=1e-12)
    alone = run(mamba2, {4: documents[4]}, asked)[4]
    assert of(alone, DocumentRow)[0].state_norm_max == of(rows[4], DocumentRow)[0].state_norm_max


def test_decays_are_scaled(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    models = {
        scale: load_model(folder, dtype=torch.float32, device="cpu", backend="torch", decay_scale=scale) for scale in (1.0, 0.5, 1e-6)
    }
    plain, halved, hardly = models.values()
    for one, other in zip(plain._layers, halved._layers, strict=True):
        assert torch.equal(other.A_H, one.A_H / 2)
    rows = {
        scale: of(run(model, {0: ids_of(0, 3000)}, TaskConfig("embed", state_norm=True))[0], DocumentRow)[0]
        for scale, model in models.items()
    }
    assert rows[1e-6].state_norm_max > 2 * rows[1.0].state_norm_max, "a state that forgets nothing grows"
    assert not math.isclose(rows[0.5].state_norm_max, rows[1.0].state_norm_max)
    assert hardly.decay_scale == 1e-6

"""A real, small Mamba-2 in the engine: fp32 on a CPU, the same bits in any company, equal to the whole document at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import engine_of, stream
from fakes import tiny_checkpoint
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.pipeline.config import EmbeddingConfig, ScoreConfig, TaskConfig
from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.model import load_model
from longscan.pipeline.model.mamba2 import Mamba2
from longscan.pipeline.records import DocumentRow, ErrorRow, Outcome, TokensRow, TokenStream, WindowRow

VOCAB = 320
CONTEXT = 0
POOLINGS = ["mean", "last", "max", "weighted_mean"]
EMBEDDING = EmbeddingConfig(pooling=POOLINGS, normalize=False, window_tokens=192)
TASK = TaskConfig("embed_score", EMBEDDING, ScoreConfig(per_token=True, window_tokens=192))
CHOSEN = 700
COMPANY = [1, 2, 3, 4, 63, 64, 65, 127, 128, 129, 191, 192, 193, 500, 0, 1000, 255, 256, 257, 30]

Print = list[Any]


@pytest.fixture(scope="module", params=[1, 2], ids=["G1", "G2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mamba2:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, num_groups=request.param, tied=request.param == 1)
    return load_model(folder, dtype=torch.float32, device="cpu", backend="torch")


def ids_of(ordinal: int, length: int) -> np.ndarray:
    return np.random.default_rng(ordinal).integers(0, VOCAB, length).astype(np.int32)


def streams(lengths: Iterable[int], first: int = 0, block: int = 100) -> Iterator[TokenStream]:
    for ordinal, length in enumerate(lengths, first):
        yield stream(ordinal, ids_of(ordinal, length), block=block, num_bytes=4 * length)


def run(model: Mamba2, documents: Iterable[TokenStream], task: TaskConfig = TASK, **sizes: Any) -> dict[int, list[Outcome]]:
    sizes = {"lanes": 4, "step_tokens": 512, "segment_tokens": 128, "context_id": CONTEXT} | sizes
    with engine_of(model, task, **sizes) as engine:
        return gather(engine, documents)


def gather(engine: Engine, documents: Iterable[TokenStream]) -> dict[int, list[Outcome]]:
    rows: dict[int, list[Outcome]] = {}
    for row in engine.process(documents):
        assert not isinstance(row, ErrorRow)
        rows.setdefault(row.document.ordinal, []).append(row)
    return rows


def bits(rows: list[Outcome]) -> dict[str, Print]:
    """Everything that is computed, as bytes: vectors and log-likelihoods of the document, its windows and its tokens."""
    prints: dict[str, Print] = {"document": [], "windows": [], "tokens": []}
    for row in rows:
        if isinstance(row, TokensRow):
            prints["tokens"].append((row.token_start, row.token_ids.tobytes(), row.logprobs.tobytes()))
        elif isinstance(row, WindowRow | DocumentRow):
            vectors = {pooling: None if vector is None else vector.tobytes() for pooling, vector in row.vectors.items()}
            prints["windows" if isinstance(row, WindowRow) else "document"].append((vectors, row.log_likelihood))
    return prints


@pytest.fixture(scope="module")
def alone(model: Mamba2) -> dict[str, Print]:
    """The chosen document, number 100, alone and whole in one step."""
    return bits(run(model, streams([CHOSEN], first=100, block=10_000), lanes=1, step_tokens=1024)[100])


@pytest.mark.parametrize(
    "sizes",
    [
        {"lanes": 1, "step_tokens": 128},
        {"lanes": 2, "step_tokens": 320},
        {"lanes": 4, "step_tokens": 512},
        {"lanes": 21, "step_tokens": 4096},
        {"lanes": 4, "step_tokens": 512, "constant_shape": True},
    ],
    ids=lambda sizes: "-".join(str(size) for size in sizes.values()),
)
def test_alone_and_among_twenty_others(model: Mamba2, sizes: dict[str, Any], alone: dict[str, Print]) -> None:
    documents = [*streams(COMPANY[:10]), *streams([CHOSEN], first=100), *streams(COMPANY[10:], first=10)]
    rows = run(model, documents, **sizes)
    assert len(rows) == 21
    assert bits(rows[100]) == alone


def test_in_several_threads_at_once(model: Mamba2, alone: dict[str, Print]) -> None:
    sizes = {"lanes": 3, "step_tokens": 512, "segment_tokens": 128, "context_id": CONTEXT}
    with engine_of(model, TASK, **sizes) as engine, ThreadPoolExecutor(3) as pool:
        orders = [[CHOSEN, *COMPANY[:6]], [CHOSEN], [CHOSEN, *COMPANY[6:12]]]
        calls = [pool.submit(gather, engine, list(streams(order, first=100))) for order in orders]
        for call in calls:
            assert bits(call.result()[100]) == alone


def whole(model: Mamba2, ids: np.ndarray, context: bool) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states [n, D] and log-probabilities of the tokens, [n] with the context and [n - 1] without, in one pass."""
    seen = np.concatenate([[CONTEXT] if context else [], ids]).astype(np.int64)
    tiles = -(-len(seen) // TILE)
    ids_T = torch.zeros(tiles * TILE, dtype=torch.int64)
    ids_T[: len(seen)] = torch.from_numpy(seen)
    targets_T = torch.full_like(ids_T, -1)
    targets_T[: len(seen) - 1] = ids_T[1 : len(seen)]
    with torch.inference_mode():
        hidden_TD, _ = model.step(ids_T, Segments.pack([Entry(0, len(seen), ends=True)], tiles), model.new_state(1))
        scores_T = model.logprobs(hidden_TD, targets_T)
    return hidden_TD[context : len(seen)].double().numpy(), scores_T[: len(seen) - 1].double().numpy()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, CHOSEN, 6000])
@pytest.mark.parametrize("context", [True, False], ids=["context", "skip"])
def test_equal_to_the_whole_document_in_one_pass(model: Mamba2, length: int, context: bool) -> None:
    task = TASK if context else TaskConfig("embed_score", EMBEDDING, ScoreConfig(per_token=True, window_tokens=192, first_token="skip"))
    rows = run(model, streams([length], block=77), task, context_id=CONTEXT if context else None)[0]
    hidden, scores = whole(model, ids_of(0, length), context)
    row = rows[-1]
    assert isinstance(row, DocumentRow)
    weights = np.arange(1, length + 1)[:, None]
    expected = {
        "mean": hidden.mean(axis=0),
        "last": hidden[-1],
        "max": hidden.max(axis=0),
        "weighted_mean": (weights * hidden).sum(axis=0) / weights.sum(),
    }
    for pooling, vector in row.vectors.items():
        assert vector is not None
        assert np.allclose(vector, expected[pooling], atol=2e-5), pooling
    assert row.num_scored_tokens == len(scores)
    assert row.log_likelihood == pytest.approx(scores.sum(), rel=1e-5)
    tokens = np.concatenate([row.logprobs for row in rows if isinstance(row, TokensRow)])
    assert np.allclose(tokens[length - len(scores) :], scores, atol=1e-4)
    windows = [row for row in rows if isinstance(row, WindowRow)]
    assert np.allclose(windows[-1].vectors["mean"], hidden[windows[-1].token_start :].mean(axis=0), atol=2e-5)
    assert sum(window.log_likelihood or 0.0 for window in windows) == pytest.approx(row.log_likelihood, rel=1e-12)


def test_a_skipped_first_token_leaves_the_bits_of_embed(model: Mamba2) -> None:
    lengths = [1, 64, 65, 500]
    scored = TaskConfig("embed_score", EMBEDDING, ScoreConfig(first_token="skip"))
    embedded = run(model, streams(lengths), TaskConfig("embed", EMBEDDING), context_id=None)
    both = run(model, streams(lengths), scored, context_id=None)
    for ordinal in range(len(lengths)):
        for kind in (DocumentRow, WindowRow):
            assert vectors_of(both[ordinal], kind) == vectors_of(embedded[ordinal], kind)


def vectors_of(rows: list[Outcome], kind: type[DocumentRow | WindowRow]) -> list[dict[str, bytes]]:
    return [{pooling: vector.tobytes() for pooling, vector in row.vectors.items()} for row in rows if isinstance(row, kind)]

"""All that the engine gives, with a real network: the same bits alone, in company, and after stops and crashes at random places.

On a CPU with a tiny network in fp32, there also with a device that is late, and (`-m gpu`) with a small one on the CUDA Tile
kernels, whose tokens are as true as PyTorch's.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import engine_of, stream
from fakes import tiny_checkpoint
from late_device import LateForward
from longscan.kernels.checks import Backend
from longscan.pipeline.config import ClassifyConfig, EmbeddingConfig, ScoreConfig, TaskConfig
from longscan.pipeline.engine.engine import Engine, EngineFailed
from longscan.pipeline.engine.forward import Forward
from longscan.pipeline.model import Mamba2, load_model
from longscan.pipeline.model.classify import Head
from longscan.pipeline.records import Carry, DocumentRow, ErrorRow, Outcome, PositionRow, Reached, TokensRow, TokenStream, WindowRow
from longscan.pipeline.schemas import HeadShape
from longscan.pipeline.tokenize.blocks import LaterBlocks
from longscan.pipeline.tokenize.prompt import Prompt
from recurrence import truth
from waiting import HANG_S, until

VOCAB = 320
CONTEXT = 0
SEGMENT = 128
EVERYTHING = TaskConfig(
    "embed_score",
    EmbeddingConfig(pooling=["mean", "last", "max", "weighted_mean"], normalize=False, window_tokens=192),
    ScoreConfig(per_token=True, window_tokens=192),
    state_norm=True,
)
INSTRUCTED = TaskConfig("embed", EmbeddingConfig(pooling=["mean", "max"], window_tokens=128, include_prompt=True), state_norm=True)
Key = tuple[str, int]
Bits = dict[Key, Any]


@dataclass(frozen=True)
class Variant:
    """What a job may ask of the engine."""

    name: str
    task: TaskConfig = field(default_factory=lambda: EVERYTHING)
    sizes: dict[str, Any] = field(default_factory=dict)
    heads: bool = False


VARIANTS = (
    Variant("everything"),
    Variant("resets", replace(EVERYTHING, state_norm=False), {"reset_tokens": 256}),
    Variant("prompt", INSTRUCTED, {"prompt": Prompt("as if", tuple(range(40, 49)), fixed=6, tail=""), "context_id": None}),
    Variant("classify_documents", TaskConfig("classify", classify=ClassifyConfig(pooling="mean")), heads=True),
    Variant("classify_positions", TaskConfig("classify", classify=ClassifyConfig(at="positions")), heads=True),
)


class Keeping:
    """Remembers every carry, whole and on the host, and keeps nothing."""

    def __init__(self, checkpoint_tokens: int) -> None:
        self.checkpoint_tokens = checkpoint_tokens
        self.carries: dict[int, list[Carry]] = {}

    def reserve(self) -> bool:
        return True

    def forget(self) -> None:
        pass

    def keep(self, news: Sequence[Outcome | Carry | Reached]) -> list[Outcome]:
        for item in news:
            if isinstance(item, Carry):
                tensors = {name: tensor.clone() for name, tensor in item.tensors().items()}
                self.carries.setdefault(item.ordinal, []).append(replace(item, tensors=lambda kept=tensors: kept))  # type: ignore[misc]
        return [item for item in news if not isinstance(item, Carry | Reached)]


class Place:
    """A network, and the sizes of an engine that it runs in. device: cpu, cuda, or late."""

    def __init__(self, folder: Path, device: str, num_groups: int, span_tiles: int | None) -> None:
        self.forward = LateForward if device == "late" else Forward
        self.device, self.span_tiles = "cpu" if device == "late" else device, span_tiles
        on_gpu = device == "cuda"
        shape = {"d_model": 256, "head_dim": 64, "state_size": 128} if on_gpu else {}
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.folder = tiny_checkpoint(folder, vocab_size=VOCAB, num_groups=num_groups, dtype=self.dtype, **shape)  # type: ignore[arg-type]
        self.step_tokens = 1024 if on_gpu else 512
        self.lengths = [1, 2, 3, 4, 63, 64, 65, 128, 129, 0, 255, 256, 257, 700, 1300] + [2000, 3000, 511] * on_gpu
        self.backend: Backend = "cutile" if on_gpu else "torch"
        self.model = cache(self._model)

    def _model(self, backend: Backend) -> Mamba2:
        return load_model(self.folder, dtype=self.dtype, device=self.device, backend=backend, row_block=self.step_tokens)

    def engine(self, variant: Variant, *, lanes: int, backend: Backend | None = None, **more: Any) -> Engine:
        backend = backend or self.backend
        model = self.model(backend)
        numbers = np.random.default_rng(5)
        head = Head(HeadShape("", 3, None), numbers.normal(size=(3, model.width)), numbers.normal(size=3))
        sizes: dict[str, Any] = {"context_id": CONTEXT, "heads": (head,) * variant.heads, "forward": self.forward} | variant.sizes | more
        return engine_of(
            model,
            variant.task,
            lanes=lanes,
            step_tokens=self.step_tokens,
            segment_tokens=SEGMENT,
            device=self.device,
            backend=backend,
            span_tiles=self.span_tiles,
            constant_shape=True,
            **sizes,
        )

    def documents(self, variant: Variant, chosen: Iterable[int], carries: dict[int, Carry] | None = None) -> list[TokenStream]:
        return [document(n, self.lengths[n], variant, (carries or {}).get(n)) for n in chosen]


PLACES = [
    pytest.param(("cpu", 2, 2), id="cpu"),
    pytest.param(("late", 2, 2), id="late"),
    pytest.param(("cuda", 1, 2), id="gpu_G1_spans", marks=pytest.mark.gpu),
    pytest.param(("cuda", 8, None), id="gpu_G8", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    device, num_groups, span_tiles = request.param
    return Place(tmp_path_factory.mktemp("model"), device, num_groups, span_tiles)


def ids_of(ordinal: int, length: int) -> np.ndarray:
    return np.random.default_rng(ordinal).integers(0, VOCAB, length).astype(np.int32)


def document(ordinal: int, length: int, variant: Variant, carry: Carry | None) -> TokenStream:
    """A document's tokens, from its carry on; some stand for tokens of the prompt, and all have places that are asked for."""
    made = stream(ordinal, ids_of(ordinal, length), block=100, num_bytes=3 * length)
    blocks = made.blocks
    if "prompt" in variant.sizes and ordinal % 3:
        blocks = (replace(block, replaced=ordinal % 3 if n == 0 else 0) for n, block in enumerate(blocks))
    if carry is not None:
        blocks = LaterBlocks(blocks, carry.position)  # type: ignore[assignment]
    positions = np.unique(np.random.default_rng(900 + ordinal).integers(0, length + 1, 1 + length // 40))
    return replace(made, document=replace(made.document, carry=carry, positions=positions), blocks=blocks)


def key(row: Outcome) -> Key:
    if isinstance(row, WindowRow):
        return "window", row.window_index
    if isinstance(row, TokensRow):
        return "tokens", row.token_start
    return ("position", row.index) if isinstance(row, PositionRow) else ("document", 0)


def printed(row: Outcome) -> Any:
    """All of a row but its document, numbers as their bits."""

    def told(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.dtype, value.shape, value.tobytes()
        if isinstance(value, dict):
            return {name: told(part) for name, part in value.items()}
        return value.hex() if isinstance(value, float) else value

    return [told(getattr(row, name)) for name in row.__slots__ if name != "document"]


def gather(rows: Iterable[Outcome], found: dict[int, Bits]) -> None:
    """Add rows to those that are there: a row that comes again has the same bits."""
    for row in rows:
        assert not isinstance(row, ErrorRow), row
        one = found.setdefault(row.document.ordinal, {})
        assert one.setdefault(key(row), printed(row)) == printed(row), f"document {row.document.ordinal}: {key(row)} has changed"


def run(place: Place, variant: Variant, chosen: Iterable[int], **sizes: Any) -> dict[int, Bits]:
    found: dict[int, Bits] = {}
    with place.engine(variant, **{"lanes": 5, **sizes}) as engine:
        gather(engine.process(place.documents(variant, chosen)), found)
    return found


def run_until(
    place: Place, variant: Variant, left: Sequence[int], carries: dict[int, Carry], stop_at: int, lanes: int, found: dict[int, Bits]
) -> tuple[Keeping, int]:
    """Run documents from their carries until so many tokens are through, then stop; the carries that were made, and the tokens."""
    due, seen = threading.Event(), 0

    def count(tokens: int, _: int) -> None:
        nonlocal seen
        seen += tokens
        if seen >= stop_at and not due.is_set():
            due.set()
            until(lambda: engine._stopping or engine._closed)

    keeper = Keeping(checkpoint_tokens=256)
    with place.engine(variant, lanes=lanes, on_tokens=count) as engine:

        def stop() -> None:
            due.wait()
            engine.stop(HANG_S)

        stopper = threading.Thread(target=stop)
        stopper.start()
        try:
            gather(engine.process(place.documents(variant, left, carries), keeper), found)
        except EngineFailed as error:
            if error.__cause__ is not None:
                raise
        finally:
            due.set()
            stopper.join()
    return keeper, seen


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_same_bits_alone_and_in_company_and_after_stops(place: Place, variant: Variant) -> None:
    everyone = range(len(place.lengths))
    expected = run(place, variant, everyone, forward=Forward)
    assert sorted(expected) == list(everyone)
    assert len(expected[14]) > 1 or variant.name == "classify_documents"
    with place.engine(variant, lanes=1) as engine:
        for n in everyone:
            alone: dict[int, Bits] = {}
            gather(engine.process(place.documents(variant, [n])), alone)
            assert alone[n] == expected[n], f"document {n} alone"
    chance = random.Random(variant.name)
    backwards = run(place, variant, chance.sample(everyone, len(everyone)), lanes=3)
    assert backwards == expected, "in other company"
    found: dict[int, Bits] = {}
    carries: dict[int, Carry] = {}
    stops = total = resumed = 0
    while left := [n for n in everyone if ("document", 0) not in found.get(n, {})]:
        stop_at = chance.randrange(100, sum(place.lengths) // 6) if stops < 6 else 1 << 40
        resumed += sum(n in carries for n in left)
        keeper, seen = run_until(place, variant, left, carries, stop_at, chance.choice((1, 2, 3, 5)), found)
        total, stops = total + seen, stops + 1
        for n, made in keeper.carries.items():
            # A stop leaves the newest; a crash one of those before it.
            carries[n] = made[-1] if chance.random() < 0.6 else chance.choice(made)
    assert found == expected, "after stops"
    assert stops > 2
    assert resumed > 0
    assert total < stops * sum(place.lengths), "what is done is not done again"


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 8])
def test_tokens_are_as_true_as_those_of_pytorch(groups: int, tmp_path: Path) -> None:
    """Each token's log-probability against the float64 recurrence, and the two paths against each other."""
    check_tokens(Place(tmp_path, "cuda", groups, None), "cutile", "torch")


def check_tokens(place: Place, ours: Backend, other: Backend) -> None:
    chosen = [n for n, length in enumerate(place.lengths) if 1 < length <= 1300]
    expected = [truth(place.folder, torch.tensor([CONTEXT, *ids_of(n, place.lengths[n]).tolist()])).logprob_L for n in chosen]
    errors, scores = {}, {}
    for backend in (ours, other):
        with place.engine(Variant("tokens"), lanes=5, backend=backend) as engine:
            rows = [row for row in engine.process(place.documents(Variant("tokens"), chosen)) if isinstance(row, TokensRow)]
        by_document = {n: sorted((row for row in rows if row.document.ordinal == n), key=lambda row: row.token_start) for n in chosen}
        scores[backend] = torch.cat([torch.from_numpy(np.concatenate([row.logprobs for row in by_document[n]])) for n in chosen]).double()
        errors[backend] = scores[backend] - torch.cat(expected)
    size = torch.cat(expected).std()
    rough = {backend: float(error.square().mean().sqrt() / size) for backend, error in errors.items()}
    worst = {backend: float(error.abs().max() / size) for backend, error in errors.items()}
    told = f"{rough}, worst {worst}"
    assert 0 < rough[ours] <= 1.5e-2, told
    assert rough[ours] <= 1.2 * rough[other], told
    assert worst[ours] <= 2 * worst[other], told
    assert float((scores[ours] - scores[other]).square().mean().sqrt() / size) <= 2e-2, told


def test_the_truth_of_tokens_is_that_of_the_engine(tmp_path: Path) -> None:
    """In fp32 the recurrence and the engine agree, so that what the GPU's test asks is asked of the right tokens."""
    place = Place(tmp_path, "cpu", 2, None)
    n = place.lengths.index(257)
    expected = truth(place.folder, torch.tensor([CONTEXT, *ids_of(n, 257).tolist()])).logprob_L
    with place.engine(Variant("tokens"), lanes=2) as engine:
        rows = [row for row in engine.process(place.documents(Variant("tokens"), [n])) if isinstance(row, TokensRow)]
    found = np.concatenate([row.logprobs for row in sorted(rows, key=lambda row: row.token_start)])
    assert np.allclose(found, expected.numpy(), atol=1e-4)


def test_a_document_that_is_finished_has_all_its_rows(place: Place) -> None:
    found = run(place, VARIANTS[0], [14])
    kinds = [kind for kind, _ in found[14]]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"document": 1, "window": 7, "tokens": 11}
    assert DocumentRow.__slots__[-1] == "continued_at", "printed() tells every field"

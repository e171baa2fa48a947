"""The network against the float64 recurrence, token by token and state by state, and its bits in any company and any cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from compare import assert_close, assert_same_bits
from fakes import tiny_checkpoint
from longscan.kernels.pool import POOLINGS, PoolState, pool
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments
from longscan.pipeline.errors import ModelError
from longscan.pipeline.model import Mamba2, ModelState, load_model
from recurrence import Truth, truth
from threads import torch_threads

LENGTHS = (1, 2, 3, 4, 63, 64, 65, 1000, 5000)
VOCABULARY = 97
TOLERANCE = 1e-5
PAD = 5

Cut = tuple[int, int, int]
"""A document, its first token in the step, and how many."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operations, quickest in one thread; what more threads give is compared where a test says so."""
    with torch_threads(1):
        yield


class Subject:
    """A model of one geometry, the documents that it reads, and the truth about them."""

    def __init__(self, folder: Path, num_groups: int) -> None:
        shape = {"d_model": 64, "head_dim": 16, "num_layers": 2, "state_size": 16, "vocab_size": VOCABULARY}
        self.folder = tiny_checkpoint(folder, num_groups=num_groups, seed=num_groups, **shape)
        self.model = load_model(self.folder, dtype=torch.float32, device="cpu", backend="torch")
        generator = torch.Generator().manual_seed(1)
        self.documents = [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]
        self.truth = cache(lambda d: truth(self.folder, self.documents[d]))
        self.alone = cache(lambda d: stream(self.model, self.documents, [[(d, 0, LENGTHS[d])]]))


@pytest.fixture(scope="module", params=[1, 2, 8], ids=lambda groups: f"G{groups}")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("model"), request.param)


def poisoned(model: Mamba2, slots: int) -> ModelState:
    state = model.new_state(slots)
    state.tail.fill_(torch.nan)
    state.ssm.fill_(torch.nan)
    return state


def stream(model: Mamba2, documents: Sequence[torch.Tensor], steps: Sequence[Sequence[Cut]]) -> tuple[dict[int, torch.Tensor], ModelState]:
    """Run `steps`; hidden states [L, D] by document, and the state with the document's number as its lane.

    Lanes that nobody has written are NaN, a tile of nobody stands in the middle of each step, and padding holds a token of its own.
    """
    state = poisoned(model, len(documents))
    hidden: dict[int, list[torch.Tensor]] = {}
    for step in steps:
        entries: list[Entry] = []
        tile = 0
        for i, (d, start, count) in enumerate(step):
            tile += i == len(step) // 2
            entries.append(Entry(tile, count, start, d if start else NO_LANE, d, start + count == len(documents[d])))
            tile += entries[-1].num_tiles
        ids_T = torch.full((tile * TILE,), PAD)
        for entry, (d, start, count) in zip(entries, step, strict=True):
            ids_T[entry.rows] = documents[d][start : start + count]
        hidden_TD, state = model.step(ids_T, Segments.pack(entries, tile), state)
        for entry, (d, _, _) in zip(entries, step, strict=True):
            hidden.setdefault(d, []).append(hidden_TD[entry.rows])
    return {d: torch.cat(parts) for d, parts in hidden.items()}, state


def assert_true(found: torch.Tensor, state: ModelState, lane: int, expected: Truth, tolerance: float = TOLERANCE) -> None:
    assert_close("hidden", found, expected.hidden_LD, tolerance, dtype=found.dtype)
    for layer, (ssm_HNP, tail_KC) in enumerate(zip(expected.ssm, expected.tail, strict=True)):
        assert_close(f"ssm of layer {layer}", state.ssm[layer, lane], ssm_HNP, tolerance, dtype=state.ssm.dtype)
        assert_close(f"tail of layer {layer}", state.tail[layer, lane], tail_KC, tolerance, dtype=state.tail.dtype)


@pytest.mark.parametrize("d", range(len(LENGTHS)), ids=lambda d: f"T{LENGTHS[d]}")
def test_alone_and_whole_is_true(subject: Subject, d: int) -> None:
    hidden, state = subject.alone(d)
    assert_true(hidden[d], state, d, subject.truth(d))


def random_steps(lengths: Sequence[int], seed: int) -> list[list[Cut]]:
    """Documents cut at random tiles, each step with the next piece of some of them, in any order."""
    chance = random.Random(seed)
    left = dict.fromkeys(range(len(lengths)), 0)
    steps: list[list[Cut]] = []
    while left:
        step = []
        for d in chance.sample(sorted(left), chance.randint(1, len(left))):
            count = min(lengths[d] - left[d], TILE * chance.choice([1, 1, 2, 3, 10, 40]))
            step.append((d, left[d], count))
            left[d] += count
            if left[d] == lengths[d]:
                del left[d]
        steps.append(step)
    return steps


@pytest.mark.parametrize("seed", range(3))
def test_split_anywhere_in_company_is_true_and_has_the_same_bits(subject: Subject, seed: int) -> None:
    hidden, state = stream(subject.model, subject.documents, random_steps(LENGTHS, seed))
    for d in range(len(LENGTHS)):
        assert_true(hidden[d], state, d, subject.truth(d))
        whole, whole_state = subject.alone(d)
        assert_same_bits(f"document {d}", hidden[d], whole[d])
        assert_same_bits(f"ssm of document {d}", state.ssm[:, d], whole_state.ssm[:, d])
        assert_same_bits(f"tail of document {d}", state.tail[:, d], whole_state.tail[:, d])


def test_everyone_at_once_has_the_same_bits(subject: Subject) -> None:
    hidden, state = stream(subject.model, subject.documents, [[(d, 0, length) for d, length in enumerate(LENGTHS)]])
    for d in range(len(LENGTHS)):
        whole, whole_state = subject.alone(d)
        assert_same_bits(f"document {d}", hidden[d], whole[d])
        assert_same_bits(f"ssm of document {d}", state.ssm[:, d], whole_state.ssm[:, d])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_vectors_alone_and_among_twenty_others_have_the_same_bits(subject: Subject, threads: int) -> None:
    generator = torch.Generator().manual_seed(2)
    documents = [torch.randint(VOCABULARY, (50 + 61 * d % 700,), generator=generator) for d in range(21)]

    def vectors(order: Sequence[int]) -> dict[str, torch.Tensor]:
        """Of document 7, which is in `order`."""
        entries, ids, tile = [], [], 0
        for d in order:
            entries.append(Entry(tile, len(documents[d]), ends=True))
            ids.append(torch.nn.functional.pad(documents[d], (0, -len(documents[d]) % TILE), value=PAD))
            tile += entries[-1].num_tiles
        segments = Segments.pack(entries, tile)
        hidden_TD, _ = subject.model.step(torch.cat(ids), segments, subject.model.new_state(0))
        state = PoolState.new(0, subject.model.width, POOLINGS, 128)
        output, _ = pool(hidden_TD, state=state, poolings=POOLINGS, segments=segments, window_tokens=128, backend="torch")
        return {pooling: found[order.index(7)] for pooling, found in output.documents.items()}

    alone = vectors([7])
    with torch_threads(threads):
        company = vectors([3, 0, *range(8, 21), 7, 1, 2, 4, 5, 6])
    for pooling in POOLINGS:
        assert_same_bits(pooling, company[pooling], alone[pooling])


def test_a_shared_prefix_is_read_by_many_and_stays(subject: Subject) -> None:
    prefix, documents = torch.tensor([3]), [subject.documents[6], subject.documents[2]]
    state = poisoned(subject.model, 3)
    ids_T = torch.full((TILE,), PAD)
    ids_T[0] = prefix
    subject.model.step(ids_T, Segments.pack([Entry(0, 1, lane_out=2)], 1), state)
    before = (state.ssm[:, 2].clone(), state.tail[:, 2].clone())
    ids_T = torch.full((3 * TILE,), PAD)
    entries = [Entry(0, 65, lane_in=2, lane_out=0, ends=True), Entry(2, 3, lane_in=2, lane_out=1, ends=True)]
    for entry, document in zip(entries, documents, strict=True):
        ids_T[entry.rows] = document
    hidden_TD, state = subject.model.step(ids_T, Segments.pack(entries, 3), state)
    for entry, document in zip(entries, documents, strict=True):
        expected = truth(subject.folder, torch.cat([prefix, document]))
        found = torch.cat([expected.hidden_LD[:1].float(), hidden_TD[entry.rows]])
        assert_true(found, state, entry.lane_out, expected)
    assert_same_bits("ssm of the prefix", state.ssm[:, 2], before[0])
    assert_same_bits("tail of the prefix", state.tail[:, 2], before[1])


def test_log_probabilities_are_true(subject: Subject) -> None:
    ids = subject.documents[7]
    hidden, _ = subject.alone(7)
    targets = torch.cat([ids[1:], torch.tensor([-1])])
    found = subject.model.logprobs(hidden[7], targets)
    assert bool(found[-1].isnan())
    torch.testing.assert_close(found[:-1].double(), subject.truth(7).logprob_L, rtol=0, atol=2e-5)


def test_in_float64_nothing_is_left_but_its_rounding(subject: Subject) -> None:
    model = load_model(subject.folder, dtype=torch.float64, device="cpu", backend="torch")
    hidden, state = stream(model, subject.documents, [[(7, 0, 320), (6, 0, 65)], [(7, 320, 680)]])
    for d in (6, 7):
        assert_true(hidden[d], state, d, subject.truth(d), tolerance=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_close_and_keeps_its_bits_in_company(subject: Subject, dtype: torch.dtype) -> None:
    model = load_model(subject.folder, dtype=dtype, device="cpu", backend="torch")
    alone, state = stream(model, subject.documents, [[(7, 0, 1000)]])
    assert_close("hidden", alone[7], subject.truth(7).hidden_LD, {torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype], dtype=dtype)
    assert state.ssm.dtype == torch.float32
    assert state.tail.dtype == dtype
    company, _ = stream(model, subject.documents, [[(5, 0, 64), (7, 0, 640), (6, 0, 65)], [(2, 0, 3), (7, 640, 360)]])
    assert_same_bits("hidden", company[7], alone[7])


def test_products_in_blocks_of_rows_give_the_same(subject: Subject) -> None:
    model = load_model(subject.folder, dtype=torch.float32, device="cpu", backend="torch", row_block=TILE)
    hidden, _ = stream(model, subject.documents, [[(7, 0, 1000)]])
    assert_same_bits("hidden", hidden[7], subject.alone(7)[0][7])
    model.row_block = 3 * TILE
    with pytest.raises(ValueError, match=r"segments.num_rows: expected a multiple of row_block 192, got 1088"):
        stream(model, subject.documents, [[(7, 0, 1000)]])


def test_ids_of_another_length_are_told_by_name(subject: Subject) -> None:
    with pytest.raises(ValueError, match=r"ids_T: expected shape \[128\], got \[64\]"):
        subject.model.step(torch.zeros(64, dtype=torch.int64), Segments.pack([Entry(0, 65)], 2), subject.model.new_state(0))


def test_a_base_model_embeds_but_does_not_score(tmp_path: Path) -> None:
    whole = tiny_checkpoint(tmp_path / "whole", tied=False)
    base = tiny_checkpoint(tmp_path / "base", tied=False, base_model=True)
    segments, ids_T = Segments.pack([Entry(0, 64)], 1), torch.arange(64)
    hidden = {}
    for folder in (whole, base):
        model = load_model(folder, dtype=torch.float32, device="cpu", backend="torch")
        hidden[folder], _ = model.step(ids_T, segments, model.new_state(0))
    assert_same_bits("hidden", hidden[base], hidden[whole])
    with pytest.raises(ModelError, match="expected a checkpoint with an output projection"):
        model.logprobs(hidden[base], ids_T)

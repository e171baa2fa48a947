"""The network on CUDA Tile kernels, in bf16, against the float64 recurrence and beside the PyTorch path; and its bits in any company."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from compare import assert_same_bits, relative_error
from fakes import tiny_checkpoint
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments
from longscan.pipeline.model import Mamba2, ModelState, load_model
from recurrence import Truth, truth

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 3, 4, 63, 64, 65, 1000, 5000)
VOCABULARY = 97
STEP = 128 * TILE
ROW_BLOCK = 32 * TILE


class Subject:
    def __init__(self, folder: Path, num_groups: int) -> None:
        shape = {"d_model": 256, "head_dim": 64, "num_layers": 2, "state_size": 128, "vocab_size": VOCABULARY}
        self.folder = tiny_checkpoint(folder, num_groups=num_groups, seed=num_groups, dtype=torch.bfloat16, **shape)
        generator = torch.Generator().manual_seed(1)
        self.documents = [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]
        self.truth: dict[int, Truth] = {d: truth(self.folder, ids) for d, ids in enumerate(self.documents)}
        self.model = cache(self._model)

    def _model(self, backend: str) -> Mamba2:
        return load_model(self.folder, dtype=torch.bfloat16, device="cuda", backend=backend, row_block=ROW_BLOCK)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[1, 2, 8], ids=lambda groups: f"G{groups}")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("model"), request.param)


def run(
    model: Mamba2, documents: Sequence[torch.Tensor], steps: Sequence[Sequence[tuple[int, int, int]]]
) -> tuple[dict[int, torch.Tensor], ModelState]:
    """Steps of one constant shape; a step is a list of (document, first token, tokens). Lanes that nobody has written are NaN."""
    state = model.new_state(len(documents))
    state.tail.fill_(torch.nan)
    state.ssm.fill_(torch.nan)
    hidden: dict[int, list[torch.Tensor]] = {}
    for step in steps:
        ids_T = torch.full((STEP,), 5)
        entries: list[Entry] = []
        tile = 0
        for d, start, count in step:
            entries.append(Entry(tile, count, start, d if start else NO_LANE, d, start + count == len(documents[d])))
            ids_T[entries[-1].rows] = documents[d][start : start + count]
            tile += entries[-1].num_tiles
        segments = Segments.pack(entries, STEP // TILE, "cuda", slots=STEP // TILE)
        hidden_TD, state = model.step(ids_T.cuda(), segments, state)
        for entry, (d, _, _) in zip(entries, step, strict=True):
            hidden.setdefault(d, []).append(hidden_TD[entry.rows].cpu())
    return {d: torch.cat(parts) for d, parts in hidden.items()}, state


BACKENDS = ("cutile", "torch")
SHORT = (1, 2, 3, 4)


def check_errors(name: str, errors: dict[str, float]) -> None:
    assert errors["cutile"] <= 1e-2, f"{name}: {errors}"
    assert errors["cutile"] <= 1.2 * errors["torch"], f"{name}: {errors}"


TOGETHER = [[(d, 0, length) for d, length in enumerate(LENGTHS)]]
SPLIT = [
    [(8, 0, 2048), (7, 0, 512), (0, 0, 1)],
    [(5, 0, 64), (8, 2048, 64), (7, 512, 488), (1, 0, 2)],
    [(6, 0, 64), (8, 2112, 2888)],
    [(6, 64, 1)],
]


def test_true_to_the_recurrence_as_far_as_bf16_goes(subject: Subject) -> None:
    found = {backend: run(subject.model(backend), subject.documents, TOGETHER) for backend in BACKENDS}
    for d, expected in subject.truth.items():
        if LENGTHS[d] > max(SHORT):
            check_errors(f"document {d}", {b: relative_error(hidden[d].double(), expected.hidden_LD) for b, (hidden, _) in found.items()})
    for name in ("ssm", "tail"):
        for layer in range(len(subject.truth[0].ssm)):
            # Of all documents together: one document's state hangs on its last few time steps, each rounded to a hundredth in bf16.
            value = torch.stack([getattr(expected, name)[layer] for expected in subject.truth.values()])
            states = {backend: getattr(state, name)[layer].cpu().double() for backend, (_, state) in found.items()}
            errors = {backend: relative_error(states[backend], value) for backend in states}
            assert errors["cutile"] <= max(1e-2, 1.2 * errors["torch"]), f"{name} of layer {layer}: {errors}"


@pytest.mark.parametrize("length", SHORT)
def test_short_documents_are_as_true(subject: Subject, length: int) -> None:
    """Of 32 together: in one of a few tokens, the rounding of a number for each head decides the error of all."""
    generator = torch.Generator().manual_seed(100 + length)
    documents = [torch.randint(VOCABULARY, (length,), generator=generator) for _ in range(32)]
    expected = torch.stack([truth(subject.folder, ids).hidden_LD for ids in documents])
    together = [[(d, 0, length) for d in range(len(documents))]]
    found = {backend: run(subject.model(backend), documents, together)[0] for backend in BACKENDS}
    check_errors(
        f"length {length}", {b: relative_error(torch.stack([h[d] for d in range(32)]).double(), expected) for b, h in found.items()}
    )


def test_bits_depend_neither_on_cuts_nor_on_company(subject: Subject) -> None:
    model = subject.model("cutile")
    together, whole = run(model, subject.documents, TOGETHER)
    split, state = run(model, subject.documents, SPLIT)
    for d, hidden in split.items():
        assert_same_bits(f"hidden of document {d}", hidden, together[d])
        assert_same_bits(f"ssm of document {d}", state.ssm[:, d], whole.ssm[:, d])
        assert_same_bits(f"tail of document {d}", state.tail[:, d], whole.tail[:, d])
    for d in range(len(LENGTHS)):
        alone, _ = run(model, subject.documents, [[(d, 0, LENGTHS[d])]])
        assert_same_bits(f"document {d} alone", alone[d], together[d])

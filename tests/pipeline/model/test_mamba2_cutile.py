"""The network on the CUDA Tile kernels' very source, over the emulator, in bf16: as true as PyTorch's path, its bits in any company."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from compare import assert_same_bits, relative_error
from emulated_network import put_on_emulator
from fakes import tiny_checkpoint
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments
from longscan.pipeline.model import Mamba2, load_model
from recurrence import truth

VOCABULARY = 97


@pytest.fixture
def on_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_emulator(monkeypatch)


def network(folder: Path, num_groups: int) -> tuple[Path, Mamba2]:
    shape = {"d_model": 256, "head_dim": 64, "num_layers": 2, "state_size": 128, "vocab_size": VOCABULARY}
    made = tiny_checkpoint(folder, num_groups=num_groups, seed=num_groups, dtype=torch.bfloat16, **shape)
    return made, load_model(made, dtype=torch.bfloat16, device="cpu", backend="torch")


def hidden_states(model: Mamba2, documents: Sequence[torch.Tensor], borders: Sequence[int] = (0,)) -> list[torch.Tensor]:
    """Of each document; all go through the same steps, cut at `borders`."""
    state = model.new_state(len(documents))
    parts: list[list[torch.Tensor]] = [[] for _ in documents]
    for start, stop in zip(borders, [*borders[1:], None], strict=True):
        ids, entries, tile = [], [], 0
        for d, document in enumerate(documents):
            piece = document[start:stop]
            if len(piece):
                ends = stop is None or stop >= len(document)
                entries.append(Entry(tile, len(piece), start, d if start else NO_LANE, d, ends))
                tile += entries[-1].num_tiles
                ids.append(torch.nn.functional.pad(piece, (0, -len(piece) % TILE)))
        segments = Segments.pack(entries, tile, "cpu")
        hidden_TD, state = model.step(torch.cat(ids), segments, state)
        for entry in entries:
            parts[entry.lane_out].append(hidden_TD[entry.rows])
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("num_groups", [1, 8])
@pytest.mark.parametrize("length", [1, 3, 65])
def test_as_true_as_the_pytorch_path(tmp_path: Path, request: pytest.FixtureRequest, num_groups: int, length: int) -> None:
    folder, model = network(tmp_path / "model", num_groups)
    generator = torch.Generator().manual_seed(100 + length)
    documents = [torch.randint(VOCABULARY, (length,), generator=generator) for _ in range(8 if length < TILE else 2)]
    expected = torch.stack([truth(folder, ids).hidden_LD for ids in documents])
    in_torch = relative_error(torch.stack(hidden_states(model, documents)).double(), expected)
    request.getfixturevalue("on_emulator")
    in_cutile = relative_error(torch.stack(hidden_states(model, documents)).double(), expected)
    assert in_torch <= 1e-2, "documents that are well conditioned: a group whose norm is next to nothing has no digits in bf16"
    assert in_cutile != in_torch
    assert in_cutile <= 1e-2
    assert in_cutile <= 1.2 * in_torch


@pytest.mark.usefixtures("on_emulator")
def test_bits_depend_neither_on_cuts_nor_on_company(tmp_path: Path) -> None:
    _, model = network(tmp_path / "model", 2)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(VOCABULARY, (length,), generator=generator) for length in (1, 63, 64, 130)]
    together = hidden_states(model, documents)
    for d, hidden in enumerate(hidden_states(model, documents, borders=(0, 64, 128))):
        assert_same_bits(f"document {d} in parts", hidden, together[d])
    for d, document in enumerate(documents):
        assert_same_bits(f"document {d} alone", hidden_states(model, [document])[0], together[d])

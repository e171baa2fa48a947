"""Log-probabilities of every token against transformers' Mamba-2 in fp32, loaded by transformers from the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fakes import tiny_checkpoint
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.pipeline.model import load_model
from packaging.version import Version

GEOMETRIES: dict[str, dict[str, Any]] = {
    "G1_tied": {},
    "G4_untied": {"num_groups": 4, "tied": False, "num_layers": 3},
    "G2_eps_and_limit": {"num_groups": 2, "eps": 1e-3, "time_step_limit": (0.005, 0.02)},
    "biases_everywhere": {"use_bias": True, "tied": False},
    "no_conv_bias_3_taps": {"use_conv_bias": False, "conv_kernel": 3},
    "P64_N128_expand_4": {"d_model": 32, "head_dim": 64, "state_size": 128, "expand": 4},
    "stored_in_bf16": {"dtype": torch.bfloat16, "num_groups": 4, "shards": 3},
}
LENGTHS = (2, 3, 64, 65, 300)


def expected(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """[L - 1]: transformers' log-probability of each token but the first."""
    model = transformers.Mamba2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        scores = torch.log_softmax(model(ids[None]).logits[0], -1)
    return scores[:-1].gather(1, ids[1:, None])[:, 0]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """transformers says at length which optional kernels it has not."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_log_probability_of_every_token(tmp_path: Path, geometry: dict[str, Any]) -> None:
    assert Version(transformers.__version__) >= Version("5.23"), "older releases are wrong for several groups"
    folder = tiny_checkpoint(tmp_path, **geometry)
    model = load_model(folder, dtype=torch.float32, device="cpu", backend="torch")
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(model.geometry.vocab_size, (length,), generator=generator) for length in LENGTHS]
    entries, tile = [], 0
    for document in documents:
        entries.append(Entry(tile, len(document), ends=True))
        tile += entries[-1].num_tiles
    ids_T, targets_T = torch.zeros(tile * TILE, dtype=torch.int64), torch.full((tile * TILE,), -1)
    for entry, document in zip(entries, documents, strict=True):
        ids_T[entry.rows] = document
        targets_T[entry.rows][:-1] = document[1:]
    hidden_TD, _ = model.step(ids_T, Segments.pack(entries, tile), model.new_state(0))
    found = model.logprobs(hidden_TD, targets_T)
    for entry, document in zip(entries, documents, strict=True):
        torch.testing.assert_close(found[entry.rows][:-1], expected(folder, document), rtol=0, atol=1e-4)

"""The families at their true shapes, in every format: the same bits, the recurrence's hidden states, and the memory of loading."""

from __future__ import annotations

import multiprocessing
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_formats import WRITERS, rewrite
from fakes import tiny_checkpoint
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.pipeline.model import load_model, read_geometry
from longscan.pipeline.model.weights import load_weights, weight_files
from recurrence import truth

SHAPES: dict[str, dict[str, Any]] = {
    "mamba2_130m": {"d_model": 768, "num_layers": 24, "vocab_size": 50288, "tied": True, "dtype": torch.float32},
    "codestral_2_layers": {
        "d_model": 4096,
        "num_layers": 2,
        "vocab_size": 32768,
        "num_groups": 8,
        "tied": False,
        "dtype": torch.bfloat16,
    },
}
LENGTH = 66
"""Tokens: more than a tile."""


@pytest.fixture(params=SHAPES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """In Hugging Face format; gone afterwards, as it is large."""
    yield tiny_checkpoint(tmp_path / "source", head_dim=64, state_size=128, **SHAPES[request.param])
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_every_format_at_true_shapes(source: Path, tmp_path: Path) -> None:
    geometry = read_geometry(source)
    expected = load_weights(source, geometry)
    for form in WRITERS:
        folder = rewrite(source, tmp_path / form, form)
        weights = load_weights(folder, read_geometry(folder))
        assert weights.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items()), form
        shutil.rmtree(folder)
    del expected, weights
    folder = rewrite(source, tmp_path / "state_spaces", "state_spaces")
    ids = torch.randint(geometry.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(3))
    expected_LD = truth(source, ids).hidden_LD
    # In float64 what is left is what was read; in fp32 also the rounding of up to 24 layers, which grows with the values.
    for dtype, most in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = load_model(folder, dtype=dtype, device="cpu", backend="torch")
        segments = Segments.pack([Entry(0, LENGTH)], 2, "cpu")
        rows = torch.zeros(2 * TILE, dtype=torch.int64)
        rows[:LENGTH] = ids
        with torch.inference_mode():
            hidden_LD = model.step(rows, segments, model.new_state(1))[0][:LENGTH]
        del model
        off = (hidden_LD.double() - expected_LD).abs().max()
        print(f"{dtype}: off by {off:.1e}, values up to {expected_LD.abs().max():.1f}")
        assert off < most * expected_LD.abs().max()


def memory_of_loading(folder: Path, dtype: torch.dtype, results: Any) -> None:
    """Put the peak of the process's memory beyond what it was before, and the bytes of the weights."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model = load_model(folder, dtype=dtype, device="cpu", backend="torch")
    results.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, model.geometry.num_parameters * dtype.itemsize))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hugging_face_shards", "state_spaces", "mistral"])
def test_loading_takes_a_shard_more_than_the_weights(form: str, source: Path, tmp_path: Path) -> None:
    folder = rewrite(source, tmp_path / form, form)
    shard = max(file.stat().st_size for file in weight_files(folder))
    context = multiprocessing.get_context("spawn")
    for dtype in (torch.float32, torch.bfloat16):
        results = context.Queue()
        process = context.Process(target=memory_of_loading, args=(folder, dtype, results))
        process.start()
        peak, weights = results.get(timeout=300)
        process.join()
        assert peak < weights + 1.2 * shard, f"{peak / 1e6:.0f} MB for {weights / 1e6:.0f} MB of weights in shards of {shard / 1e6:.0f} MB"

"""The peers of a job: their loop computes what longscan does, another network has no speed, and memory that is short makes it smaller."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fakes import tiny_checkpoint
from longscan.jobs.bench import main
from longscan.jobs.bench_peers import Kernels, Peer, Sample, Transformers, bench_peers, fitting, mean_vectors
from longscan.jobs.bench_shapes import write_model
from longscan.jobs.benchmark.stacks import GEOMETRIES
from longscan.pipeline.model import load_model, read_geometry
from plain_stack import PLAIN, gate

Array = npt.NDArray[Any]
LENGTHS = (1, 2, 70, 700, 255, 257, 64)


def documents(seed: int = 0) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.integers(320, size=length, dtype=np.int32) for length in LENGTHS]


def whole(peer: Peer, ids: Array) -> Array:
    """The mean by its definition: one forward over all of it."""
    with torch.inference_mode():
        hidden_BLD, _ = peer.forward(torch.from_numpy(ids.astype(np.int64))[None], None)
    return hidden_BLD[0].double().mean(0).numpy()


def sample(model: Path, ids: list[Array]) -> Sample:
    """With the vectors that transformers gives."""
    vectors = [whole(Transformers(model, "cpu", torch.float32), document) for document in ids]
    return Sample(ids, [vector / np.linalg.norm(vector) for vector in vectors])


@pytest.mark.parametrize("step_tokens", [64, 512, 65536])
def test_documents_in_batches_have_the_means_of_documents_alone(tmp_path: Path, step_tokens: int) -> None:
    peer = Transformers(tiny_checkpoint(tmp_path, chunk_size=16), "cpu", torch.float32)
    ids = documents()
    for found, document in zip(mean_vectors(peer, ids, step_tokens, "cpu"), ids, strict=True):
        np.testing.assert_allclose(found, whole(peer, document), rtol=0, atol=2e-5)


def test_the_stack_of_kernels_carries_its_states(tmp_path: Path) -> None:
    """On parts in plain PyTorch, in steps that cut documents and let them leave the batch."""
    model = tiny_checkpoint(tmp_path, num_groups=2)
    ids = [document[:300] for document in documents()[2:5]]
    kernels = Kernels(model, "cpu", torch.float32, lambda _: PLAIN)
    expected = mean_vectors(Transformers(model, "cpu", torch.float32), ids, 2048, "cpu")
    for found, vector in zip(mean_vectors(kernels, ids, 500, "cpu"), expected, strict=True):
        np.testing.assert_allclose(found, vector, rtol=0, atol=2e-5)


def test_every_peer_is_checked_then_timed(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, d_model=32, num_layers=1)
    rows = list(bench_peers(sample(model, documents()[:3]), str(model), "cpu", torch.float32, 1000.0, parts=lambda _: PLAIN))
    assert [row.name.split()[0] for row in rows] == ["mamba_ssm", "transformers", "windows"]
    for row in rows:
        assert row.documents == 3
        assert row.tokens == sum(LENGTHS[:3])
        assert row.seconds is not None
        assert row.tokens_per_second == pytest.approx(row.tokens / row.seconds)
        assert row.times_peer == pytest.approx(1000.0 / row.tokens_per_second)
    assert [row.distance is None for row in rows] == [False, False, True]
    assert max(row.distance or 0.0 for row in rows) < 1e-4
    assert "another function" in rows[-1].line()


def test_another_network_is_not_timed(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, d_model=32, num_layers=1)
    wrong = replace(PLAIN, gate=lambda y, z, weight, size, eps: gate(z, y, weight, size, eps))
    kernels, transformers, windows = bench_peers(
        sample(model, documents()[:3]), str(model), "cpu", torch.float32, 1000.0, parts=lambda _: wrong
    )
    assert kernels.distance is not None
    assert kernels.distance > 0.1
    assert kernels.tokens_per_second is None
    assert kernels.note in kernels.line()
    assert transformers.tokens_per_second is not None
    assert windows.tokens_per_second is not None


def test_peers_that_fail_are_told_of(tmp_path: Path) -> None:
    def fails(_: int) -> Any:
        raise RuntimeError("no such target\nand more")

    model = tiny_checkpoint(tmp_path, d_model=32, num_layers=1)
    row = next(bench_peers(sample(model, documents()[:2]), str(model), "cpu", torch.float32, 1000.0, parts=fails))
    assert row.note == "failed: RuntimeError: no such target"


def test_memory_that_is_short_makes_batches_smaller() -> None:
    tried = []

    def work(step_tokens: int) -> str:
        tried.append(step_tokens)
        if step_tokens > 3000:
            raise torch.OutOfMemoryError("no")
        return "done"

    assert fitting(16384, work) == (2048, "done")
    assert tried == [16384, 8192, 4096, 2048]
    with pytest.raises(torch.OutOfMemoryError):
        fitting(16384, lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("never")))


def test_the_command_holds_a_job_against_its_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_checkpoint(tmp_path / "model", tokenizer=True)
    words = ["job", "--lengths", "lognormal:300", "--tokens", "8000", "--model", str(model), "--peers", "--peer-tokens", "4000"]
    assert main([*words, "--json", str(tmp_path / "record.json")]) == 0
    (record,) = json.loads((tmp_path / "record.json").read_text())["rows"]
    transformers, windows = record["peers"]
    assert 0 < transformers["tokens"] <= 4000 < record["tokens"]
    assert transformers["distance"] < 1e-5
    assert transformers["times_peer"] == pytest.approx(record["tokens_per_second"] / transformers["tokens_per_second"])
    assert windows["distance"] is None
    printed = capsys.readouterr().out
    assert printed.count("peer  ") == 2
    assert printed.count("tokens/s alone") == 1


def test_jobs_that_peers_do_not_compute_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_checkpoint(tmp_path / "model", tokenizer=True)
    words = ["job", "--lengths", "constant:300", "--tokens", "600", "--model", str(model), "--peers"]
    assert main([*words, "--keys", "task.embedding.pooling=[last]"]) == 2
    assert "that is what the peers compute" in capsys.readouterr().err


def test_a_model_of_a_shape_is_one_that_both_load(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "130m", layers=1)
    assert read_geometry(model) == replace(GEOMETRIES["130m"], num_layers=1, bos_id=0, eos_id=0)
    ids = np.arange(70) * 700 % 50288
    hidden = load_model(str(model), dtype=torch.float32, device="cpu", backend="torch")
    (found,) = mean_vectors(Transformers(model, "cpu", torch.float32), [ids], 2048, "cpu")
    assert found.shape == (hidden.width,)
    assert np.isfinite(found).all()

"""Policies for length, through the command: a warning with numbers, resets, decays, and what the output says of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from fakes import tiny_checkpoint
from longscan.jobs.run import main
from tiny_jobs import SENTENCE, rows, table, texts, words, write_input


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True, max_position_embeddings=200)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_input(tmp_path / "in.parquet", ["short", SENTENCE * 3, "", None, SENTENCE * 5], row_group=2)


def test_documents_beyond_the_trained_length_are_told_of_once(
    model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(model, source, tmp_path / "out", "max_errors=1", "output.shard_tokens=100")) == 0
    longest = max(row["num_tokens"] for row in rows(tmp_path / "out", "documents"))
    said = capsys.readouterr().err
    assert said.count("that this model was trained on") == 1
    assert f"longer than the 200 tokens that this model was trained on: 2 of 5 documents, the longest has {longest}" in said
    assert "engine.reset_tokens=192" in said
    assert main(words(model, source, tmp_path / "reset", "max_errors=1", "engine.reset_tokens=192")) == 0
    assert "trained on" not in capsys.readouterr().err, "no state goes on beyond that length"


def test_what_the_output_says_of_resets(model: Path, source: Path, tmp_path: Path) -> None:
    more = ["max_errors=1", "engine.reset_tokens=64", "task.embedding.window_tokens=128", "task.state_norm=true", "model.decay_scale=0.5"]
    assert main(words(model, source, tmp_path / "out", *more)) == 0
    windows = rows(tmp_path / "out", "windows")
    assert {row["context_start"] - row["token_start"] for row in windows} == {0}
    (part,) = (tmp_path / "out" / "windows").iterdir()
    facts = json.loads(pq.read_schema(part).metadata[b"longscan"])
    assert (facts["engine"]["reset_tokens"], facts["model"]["decay_scale"], facts["task"]["state_norm"]) == (64, 0.5, True)
    assert table(tmp_path / "out", "documents").column_names[-2:] == ["state_norm_max", "state_norm_mean"]
    norms = [(row["state_norm_max"], row["state_norm_mean"]) for row in rows(tmp_path / "out", "documents")]
    assert norms[2] == (None, None), "a document of no tokens"
    assert all(0 < mean <= most for most, mean in (norms[0], norms[1], norms[3]))


@pytest.mark.parametrize("change", ["engine.reset_tokens=64", "model.decay_scale=0.9", "task.state_norm=true"])
def test_they_are_another_run(change: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_input(tmp_path / "in.parquet", texts(3))
    assert main(words(model, source, tmp_path / "out")) == 0
    assert main(words(model, source, tmp_path / "out", change)) == 2
    assert change.partition("=")[0].rpartition(".")[2] in capsys.readouterr().err
    assert main(words(model, source, tmp_path / "other", change)) == 0
    vectors = [np.array([row["embedding"] for row in rows(tmp_path / name, "documents")]) for name in ("out", "other")]
    assert np.array_equal(*vectors) == (change == "task.state_norm=true")

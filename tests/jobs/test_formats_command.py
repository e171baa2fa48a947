"""The command on a folder that holds two checkpoints in two formats: `model.format` says which one runs, the rest of the job alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoint_formats import CODESTRAL, rewrite
from fakes import tiny_checkpoint
from longscan.jobs.run import main
from tiny_jobs import rows, texts, words, write_input


def test_a_named_format_is_the_one_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_input(tmp_path / "in" / "a.parquet", texts(3, seed=1), row_group=3)
    both = tiny_checkpoint(tmp_path / "both", num_layers=1, seed=1, tokenizer=True, **CODESTRAL)
    other = tiny_checkpoint(tmp_path / "other", num_layers=1, seed=2, tokenizer=True, **CODESTRAL)
    for file in rewrite(other, tmp_path / "mistral", "mistral").iterdir():
        file.rename(both / file.name)
    vectors = {}
    for name, folder, more in (("auto", both, []), ("named", both, ["model.format=mistral"]), ("alone", other, [])):
        assert main(words(folder, tmp_path / "in", tmp_path / name, *more)) == 0
        vectors[name] = np.array([row["embedding"] for row in rows(tmp_path / name, "documents")])
    assert np.array_equal(vectors["named"], vectors["alone"])
    assert not np.array_equal(vectors["auto"], vectors["named"])
    assert main(words(both, tmp_path / "in", tmp_path / "auto", "model.format=mistral")) == 2, "another model: another run"
    capsys.readouterr()
    assert main(words(both, tmp_path / "in", tmp_path / "out", "model.format=gguf")) == 2
    assert "model.format: expected one of auto, hugging_face, state_spaces, mistral, got 'gguf'" in capsys.readouterr().err
    assert main(words(both, tmp_path / "in", tmp_path / "dry", "model.format=mistral", "dry_run=true")) == 0

"""longscan-inspect: what a checkpoint is, what it takes, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_formats import CODESTRAL, MAMBA2, config_of, rewrite, tensors_of, write_json
from fakes import tiny_checkpoint
from longscan.jobs.inspect import main
from longscan.pipeline.model import read_geometry


def test_a_checkpoint_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_checkpoint(tmp_path / "source", dtype=torch.bfloat16, **CODESTRAL)
    folder = rewrite(source, tmp_path / "mistral", "mistral")
    assert main(["model", str(folder), "--lanes", "3"]) == 0
    captured = capsys.readouterr()
    assert not captured.err
    parameters = sum(tensor.numel() for tensor in tensors_of(source).values())
    state = read_geometry(source).state_bytes(4)
    assert state == 2 * (4 * 8 * 64 * 128 + 4 * 3 * (8 * 64 + 2 * 8 * 128))
    for part in (
        "mistral, by params.json",
        "2 layers of width 256, inner width 512",
        f"({parameters})",
        "8 heads of 64, 8 groups, state 128, convolution over 4, time steps 0 to inf, norm after the gate, eps 1e-05, biases: convolution",
        "320 rows, head of its own",
        "consolidated.safetensors, ",
        "tensors: 21 BF16",
        f"({state} bytes) of state a document",
        f"with 3 lanes {(4 * parameters + 4 * state) / 1e6:.1f} MB",
    ):
        assert part in captured.out


def test_the_demo_and_its_mixture_of_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "demo"]) == 0
    assert "tensors: 21 F32, 17 BF16" in capsys.readouterr().out


def test_a_refusal_is_told_after_what_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_layers=1, **MAMBA2)
    folder = rewrite(source, tmp_path / "folder", "state_spaces")
    config = config_of(folder)
    write_json(folder / "config.json", config | {"n_layer": 2})
    assert main(["model", str(folder)]) == 2
    captured = capsys.readouterr()
    assert "state_spaces, by config.json" in captured.out
    assert "2 layers of width 64" in captured.out
    assert captured.err.startswith("longscan-inspect: error: ")
    assert "missing: layers.1.norm.weight [64]" in captured.err
    write_json(folder / "config.json", config | {"attn_layer_idx": [0], "d_intermediate": 8})
    assert main(["model", str(folder)]) == 2
    captured = capsys.readouterr()
    assert "state_spaces, by config.json" in captured.out
    assert "attention layers" in captured.err
    assert "MLP layers" in captured.err


def test_tokenizer_and_embedding_are_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint(tmp_path / "model", tokenizer=True)
    kinds = ("Transformer", "Pooling")
    (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": kind * (kind == "Pooling")} for kind in kinds]), "utf-8")
    (folder / "Pooling").mkdir()
    write_json(folder / "Pooling" / "config.json", {"pooling_mode": "lasttoken"})
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "q: ", "text": ""}, "default_prompt_name": "query"})
    assert main(["model", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "tokenizer   320 entries, BOS 0, EOS 0, its template adds neither" in out
    assert "embedding   last, not normalized, prompts: query (the default), text, in the pooling" in out
    (folder / "tokenizer.json").rename(folder / "tekken.json")
    assert main(["model", str(folder)]) == 0, "documents may bring ids, and another tokenizer may be named"
    assert "tokenizer   none that runs: " in (out := capsys.readouterr().out)
    assert "found tekken.json, which mistral-common reads" in out
    write_json(folder / "Pooling" / "config.json", {"pooling_mode": "cls"})
    assert main(["model", str(folder)]) == 2
    assert "pooling_mode: expected one of mean, last, max, weighted_mean, found cls" in capsys.readouterr().err


def test_a_format_can_be_named_and_must_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint(tmp_path / "folder", base_model=True, tied=False, max_position_embeddings=2048, shards=2)
    assert main(["model", str(folder), "--format", "hugging_face"]) == 0
    out = capsys.readouterr().out
    assert "head none: it embeds and does not score" in out
    assert "texts of up to 2048 tokens" in out
    assert "2 files, model-00001-of-00002.safetensors to model-00002-of-00002.safetensors" in out
    assert main(["model", str(folder), "--format", "gguf"]) == 2
    assert "format: expected one of auto, state_spaces, hugging_face, mistral, found 'gguf'" in capsys.readouterr().err


def test_what_is_no_checkpoint_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["model", str(tmp_path)]) == 2
    assert "expected config.json or params.json of a Mamba-2, found an empty folder" in capsys.readouterr().err
    assert main(["model", str(tmp_path / "nothing")]) == 2
    assert "expected a folder or a hub id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "usage: longscan-inspect"),
        (["model", "--help"], 0, "--lanes N"),
        ([], 2, "KIND"),
        (["model", "demo", "--lanes", "0"], 2, "expected a number of documents, at least 1, got '0'"),
    ],
    ids=str,
)
def test_the_command_as_a_process(words: list[str], code: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "longscan.jobs.inspect", *words], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr

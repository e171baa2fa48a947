"""longscan-convert: any format to a Hugging Face folder, the same bits, which transformers loads to equal outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_formats import CODESTRAL, MAMBA2, WRITERS, config_of, rewrite, tensors_of, write_json
from fakes import tiny_checkpoint
from longscan.jobs.convert import main
from longscan.pipeline.model import read_geometry
from longscan.pipeline.model.weights import load_weights
from safetensors.torch import save_file
from transformers import Mamba2ForCausalLM, Mamba2Model

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module", params=["mamba2", "codestral"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In Hugging Face format, as every other format is written from it."""
    shape: dict[str, dict[str, Any]] = {
        "mamba2": {**MAMBA2, "dtype": torch.float32},
        "codestral": {**CODESTRAL, "dtype": torch.bfloat16, "num_layers": 1},
    }
    ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return tiny_checkpoint(tmp_path_factory.mktemp(request.param) / "source", tokenizer=True, **shape[request.param], **ids)


def logits(folder: Path, **options: Any) -> torch.Tensor:
    model, info = Mamba2ForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True, **options)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ids = torch.randint(300, (1, 40), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        scores: torch.Tensor = model.float().eval()(ids).logits
    return scores


@pytest.mark.parametrize("form", [*WRITERS, "hugging_face"])
def test_round_trips_are_exact(form: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = source if form == "hugging_face" else rewrite(source, tmp_path / form, form, copied=TOKENIZER)
    target = tmp_path / "nested" / "target"
    assert main([str(folder), str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    written, expected = tensors_of(target), tensors_of(source)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor), name
    assert read_geometry(target) == read_geometry(source)
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors", *TOKENIZER}
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in TOKENIZER)
    assert [path.name for path in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("form", ["state_spaces", "mistral"])
def test_transformers_gives_equal_outputs(form: str, source: Path, tmp_path: Path) -> None:
    assert main([str(rewrite(source, tmp_path / form, form, copied=TOKENIZER)), str(tmp_path / "target")]) == 0
    expected = logits(source, dtype=torch.float32)
    assert torch.equal(logits(tmp_path / "target", dtype=torch.float32), expected)
    assert torch.equal(logits(tmp_path / "target"), expected)


def test_every_setting_and_a_mixture_of_dtypes_arrive(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "d_model": 48,
        "head_dim": 24,
        "num_groups": 2,
        "state_size": 8,
        "conv_kernel": 3,
        "expand": 3,
        "vocab_size": 304,
        "eps": 1e-5,
    }
    more: dict[str, Any] = {"time_step_limit": (0.01, 0.05), "use_bias": True, "use_conv_bias": False, "max_position_embeddings": 2048}
    source = tiny_checkpoint(tmp_path / "source", **shape, **more, residual_in_fp32=False, eos_token_id=[3, 4], pad_token_id=9)
    tensors = tensors_of(source)
    halves = {name: tensor.to(torch.bfloat16) if "proj" in name else tensor for name, tensor in tensors.items()}
    save_file(halves, source / "model.safetensors")
    assert main([str(source), str(tmp_path / "target")]) == 0
    assert all(tensor.dtype == halves[name].dtype for name, tensor in tensors_of(tmp_path / "target").items())
    assert read_geometry(tmp_path / "target") == read_geometry(source)
    config = config_of(tmp_path / "target")
    assert (config["eos_token_id"], config["pad_token_id"], config["torch_dtype"]) == ([3, 4], 9, "float32")
    assert torch.equal(logits(tmp_path / "target"), logits(source, dtype=torch.float32))


def test_a_base_model_stays_one(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", tied=False, base_model=True)
    assert main([str(source), str(tmp_path / "target")]) == 0
    model, info = Mamba2Model.from_pretrained(tmp_path / "target", output_loading_info=True, local_files_only=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(model.state_dict()["embeddings.weight"], tensors_of(source)["embeddings.weight"])
    assert not read_geometry(tmp_path / "target").has_head


def test_token_ids_come_from_the_tokenizer_where_the_config_has_none(source: Path, tmp_path: Path) -> None:
    """Those of transformers' defaults are a 7B model's."""
    for name, copied, expected in (("with", TOKENIZER, (0, 0, None)), ("without", (), (None, None, None))):
        folder = rewrite(source, tmp_path / name, "mistral", copied=copied)
        (folder / "tokenizer.model.v3").write_bytes(b"pieces")
        assert main([str(folder), str(tmp_path / f"{name}-target")]) == 0
        config = config_of(tmp_path / f"{name}-target")
        assert tuple(config[f"{token}_token_id"] for token in ("bos", "eos", "pad")) == expected
        assert (tmp_path / f"{name}-target" / "tokenizer.model.v3").read_bytes() == b"pieces"


def test_a_format_can_be_named(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_layers=1, seed=1, **CODESTRAL)
    rewrite(tiny_checkpoint(tmp_path / "other", num_layers=1, seed=2, **CODESTRAL), tmp_path / "mistral", "mistral")
    for file in (tmp_path / "mistral").iterdir():
        file.rename(source / file.name)
    assert main([str(source), str(tmp_path / "target"), "--format", "mistral"]) == 0
    written = load_weights(tmp_path / "target", replace(read_geometry(source), bos_id=None, eos_id=None))
    assert torch.equal(written["embedding"], tensors_of(tmp_path / "other")["backbone.embeddings.weight"])


def no_source(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def full_target(folder: Path) -> None:
    (folder.parent / "target").mkdir()
    (folder.parent / "target" / "notes.txt").write_text("keep", "utf-8")


def target_is_a_file(folder: Path) -> None:
    (folder.parent / "target").write_text("keep", "utf-8")


def short_of_a_tensor(folder: Path) -> None:
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    del tensors["backbone.norm_f.weight"]
    torch.save(tensors, folder / "pytorch_model.bin")


def not_finite(folder: Path) -> None:
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    tensors["backbone.norm_f.weight"][3] = torch.nan
    torch.save(tensors, folder / "pytorch_model.bin")


def another_head(folder: Path) -> None:
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save(tensors | {"lm_head.weight": torch.ones(304, 64)}, folder / "pytorch_model.bin")


def before_the_gate(folder: Path) -> None:
    config = config_of(folder)
    write_json(folder / "config.json", config | {"ssm_cfg": config["ssm_cfg"] | {"norm_before_gate": True}})


def linked_tokenizer(folder: Path) -> None:
    (folder / "merges.txt").symlink_to(Path(__file__))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_source, "model.path: expected a folder or a hub id, found no folder at"),
        (full_target, "target: expected no folder or an empty one, found one that holds something"),
        (target_is_a_file, "target: expected no folder or an empty one"),
        (short_of_a_tensor, "missing: norm_f.weight [64]"),
        (not_finite, "expected finite weights, found NaN or infinity in backbone.norm_f.weight"),
        (another_head, "config.json says tie_embeddings, but lm_head.weight is not the embedding"),
        (before_the_gate, "norm_before_gate: expected false, found true, which Hugging Face's Mamba-2 does not compute"),
        (linked_tokenizer, "merges.txt: expected a file of the checkpoint, found a link that leaves its folder"),
    ],
)
def test_what_cannot_be_converted_leaves_nothing_behind(
    spoil: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = tiny_checkpoint(tmp_path / "source", num_layers=1, **MAMBA2)
    folder = rewrite(source, tmp_path / "folder", "state_spaces")
    spoil(folder)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main([str(folder), str(tmp_path / "target")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("longscan-convert: error: ")
    assert message in captured.err
    assert not captured.out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_expansion_that_transformers_does_not_take_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_layers=1)
    write_json(source / "config.json", config_of(source) | {"expand": 1.5, "num_heads": 3})
    assert main([str(source), str(tmp_path / "target")]) == 2
    assert "expand: expected a whole number, found 1.5" in capsys.readouterr().err


def test_an_empty_target_is_taken(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    assert main([str(tiny_checkpoint(tmp_path / "source", num_layers=1)), str(tmp_path / "target")]) == 0
    assert json.loads((tmp_path / "target" / "config.json").read_text("utf-8"))["num_hidden_layers"] == 1


@pytest.mark.parametrize(("words", "code", "said"), [(["--help"], 0, "usage: longscan-convert"), ([], 2, "SOURCE, TARGET")])
def test_the_command_as_a_process(words: list[str], code: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "longscan.jobs.convert", *words], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr

"""Weights: every tensor once and in its place, or one error that lists all that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fakes import tiny_checkpoint
from longscan.pipeline.errors import ModelError
from longscan.pipeline.model import model_hash, read_geometry
from longscan.pipeline.model.weights import load_weights, weight_files
from safetensors.torch import load_file, save_file

KEPT_IN_FP32 = ("norm", "A_log", "dt_bias", "D")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_weights(folder, read_geometry(folder), dtype=dtype)


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the single file; None removes one. Names with `_` for `.` where that is clear."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_bits_arrive_as_they_are_in_the_files(tmp_path: Path, shards: int, tied: bool) -> None:
    folder = tiny_checkpoint(tmp_path, shards=shards, tied=tied, use_bias=True, num_groups=2)
    files = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    weights = load(folder)
    names = {
        "embedding": "backbone.embeddings.weight",
        "final_norm": "backbone.norm_f.weight",
        "head": "backbone.embeddings.weight" if tied else "lm_head.weight",
    }
    for layer in range(2):
        for name, file_name in (
            ("norm", "norm.weight"),
            ("in_proj", "mixer.in_proj.weight"),
            ("in_proj_bias", "mixer.in_proj.bias"),
            ("conv_bias", "mixer.conv1d.bias"),
            ("A_log", "mixer.A_log"),
            ("dt_bias", "mixer.dt_bias"),
            ("D", "mixer.D"),
            ("gated_norm", "mixer.norm.weight"),
            ("out_proj", "mixer.out_proj.weight"),
            ("out_proj_bias", "mixer.out_proj.bias"),
        ):
            names[f"layers.{layer}.{name}"] = f"backbone.layers.{layer}.{file_name}"
        convolution = files[f"backbone.layers.{layer}.mixer.conv1d.weight"]
        assert torch.equal(weights.pop(f"layers.{layer}.conv_weight"), convolution[:, 0])
    assert set(weights) == set(names)
    for name, file_name in names.items():
        assert torch.equal(weights[name], files[file_name]), name
    assert (weights["head"] is weights["embedding"]) == tied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=lambda dtype: f"stored_{dtype}")
def test_decays_and_norms_stay_in_fp32(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    weights = load(tiny_checkpoint(tmp_path, dtype=stored), dtype)
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if name.endswith(KEPT_IN_FP32) else dtype), name


def test_weights_outlive_their_file(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    weights = load(folder)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(bytes(4096))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.items())


def test_a_base_model_is_saved_without_prefix_and_the_first_spelling_is_known(tmp_path: Path) -> None:
    expected = load(tiny_checkpoint(tmp_path / "usual", tied=False))
    base = load(tiny_checkpoint(tmp_path / "base", tied=False, base_model=True))
    assert set(expected) - set(base) == {"head"}
    folder = tiny_checkpoint(tmp_path / "first", tied=False)
    embedding = load_file(folder / "model.safetensors")["backbone.embeddings.weight"]
    edit(folder, **{"backbone.embeddings.weight": None, "backbone.embedding.weight": embedding})
    first = load(folder)
    assert all(torch.equal(first[name], expected[name]) for name in expected)
    assert all(torch.equal(base[name], expected[name]) for name in base)


def test_a_tied_head_in_the_files_must_be_the_embedding(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tied=True)
    embedding = load_file(folder / "model.safetensors")["backbone.embeddings.weight"]
    edit(folder, **{"lm_head.weight": embedding.clone()})
    weights = load(folder)
    assert weights["head"] is weights["embedding"]
    edit(folder, **{"lm_head.weight": embedding + 1})
    with pytest.raises(ModelError, match=r"says tie_word_embeddings, but lm_head.weight is not the embedding"):
        load(folder)


def test_large_weights_whose_sum_is_infinite_are_no_error(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    large = torch.tensor([3e38, 3e38, -1.0, 0.0])
    edit(folder, **{"backbone.layers.1.mixer.D": large})
    assert torch.equal(load(folder)["layers.1.D"], large)


def test_one_error_lists_all_tensors_that_are_wrong(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tied=False)
    edit(
        folder,
        **{
            "backbone.layers.1.mixer.D": None,
            "lm_head.weight": None,
            "backbone.layers.0.mixer.in_proj.weight": torch.zeros(291, 64),
            "backbone.norm_f.weight": torch.zeros(64, dtype=torch.int8),
            "backbone.layers.0.mlp.weight": torch.zeros(3, 3),
        },
    )
    with pytest.raises(ModelError) as caught:
        load(folder)
    for part in (
        "missing: layers.1.mixer.D [4]",
        "missing: lm_head.weight [320, 64]",
        "shape: backbone.layers.0.mixer.in_proj.weight is [291, 64], expected [292, 64]",
        "dtype: backbone.norm_f.weight is I8, expected one of F64, F32, BF16, F16",
        "unexpected: backbone.layers.0.mlp.weight [3, 3]",
        str(folder),
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("values", [(1.0, torch.nan), (1.0, torch.inf), (-torch.inf, torch.inf)])
def test_weights_that_are_not_finite_are_told(tmp_path: Path, values: tuple[float, float]) -> None:
    folder = tiny_checkpoint(tmp_path)
    edit(folder, **{"backbone.layers.1.mixer.D": torch.tensor([1.0, *values, 1.0])})
    with pytest.raises(ModelError, match=r"found NaN or infinity in backbone.layers.1.mixer.D \(model.safetensors\)"):
        load(folder)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_a_dtype_cannot_hold_are_told(tmp_path: Path, stored: torch.dtype) -> None:
    folder = tiny_checkpoint(tmp_path)
    weight = load_file(folder / "model.safetensors")["backbone.layers.1.mixer.out_proj.weight"].to(stored)
    weight[0, 0] = 1e5
    edit(folder, **{"backbone.layers.1.mixer.out_proj.weight": weight})
    with pytest.raises(ModelError, match=r"found larger ones in layers.1.mixer.out_proj.weight in torch.float16. Use model.dtype=bfloat16"):
        load(folder, torch.float16)
    assert load(folder, torch.bfloat16)["layers.1.out_proj"].max() > 9e4


def test_a_truncated_file_is_told(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors: expected a safetensors file, but it cannot be read.*Download it again"):
        load(folder)


def test_a_missing_shard_is_told(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"expected the 3 files of model.safetensors.index.json, missing model-00002-of-00003.safetensors"):
        load(folder)


@pytest.mark.parametrize("weight_map", [{"a": "../elsewhere.safetensors"}, {"a": "/etc/passwd"}])
def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path, weight_map: dict[str, str]) -> None:
    folder = tiny_checkpoint(tmp_path, shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    with pytest.raises(ModelError, match="expected plain file names in the folder"):
        load(folder)


def test_an_index_without_a_map_is_told(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    (folder / "model.safetensors.index.json").write_text("{}", "utf-8")
    with pytest.raises(ModelError, match="expected a weight_map of file names"):
        load(folder)


@pytest.mark.parametrize(("name", "message"), [("model.gguf", "found model.gguf. Download"), (None, "found no weights")])
def test_a_folder_without_weights_is_told(tmp_path: Path, name: str | None, message: str) -> None:
    folder = tiny_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    if name:
        (folder / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_the_hash_knows_content_and_nothing_else(tmp_path: Path) -> None:
    one, same = tiny_checkpoint(tmp_path / "one"), tiny_checkpoint(tmp_path / "same")
    (same / "README.md").write_text("notes", "utf-8")
    assert model_hash(one) == model_hash(same)
    assert len(model_hash(one)) == 64
    hashes = {model_hash(one)}
    hashes.add(model_hash(tiny_checkpoint(tmp_path / "seed", seed=1)))
    hashes.add(model_hash(tiny_checkpoint(tmp_path / "eps", eps=1e-6)))
    hashes.add(model_hash(tiny_checkpoint(tmp_path / "shards", shards=2)))
    assert len(hashes) == 4
    (one / "config.json").unlink()
    with pytest.raises(ModelError, match=r"one: expected config.json or params.json of a Mamba-2, found model.safetensors"):
        model_hash(one)
    assert [file.name for file in weight_files(tmp_path / "shards")] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]

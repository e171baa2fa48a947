"""Folders that are broken or hostile, in every format: one error each, which says what was found and where, and nothing is run."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_formats import CODESTRAL, MAMBA2, original_names, rewrite, write_json
from fakes import tiny_checkpoint
from longscan.pipeline.errors import ModelError
from longscan.pipeline.model import load_model, model_hash
from safetensors.torch import load_file, save_file

BIN = "pytorch_model.bin"
ONE, MISTRAL = "model.safetensors", "consolidated.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("source") / "hugging_face", num_layers=1, **MAMBA2)


class Hostile:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def truncate(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])


def edit_bin(folder: Path, **changes: Any) -> None:
    """Replace tensors of pytorch_model.bin; None removes one."""
    tensors = torch.load(folder / BIN, weights_only=True) | changes
    torch.save({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / BIN)


def edit_json(folder: Path, name: str, **changes: Any) -> None:
    write_json(folder / name, json.loads((folder / name).read_text("utf-8")) | changes)


def link_out(folder: Path, name: str) -> None:
    outside = folder.parent / f"outside-{name}"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)


def link_to_nowhere(folder: Path) -> None:
    (folder / BIN).unlink()
    (folder / BIN).symlink_to(folder.parent / "nowhere.bin")


def duplicate_embedding(folder: Path) -> None:
    embedding = torch.load(folder / BIN, weights_only=True)["backbone.embeddings.weight"]
    edit_bin(folder, **{"backbone.embedding.weight": embedding})


def row_short(folder: Path) -> None:
    tensors = load_file(folder / MISTRAL)
    name = "model.backbone.layers.0.mixer.in_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, folder / MISTRAL)


def names_of_the_other_format(folder: Path) -> None:
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / MISTRAL).items()}
    save_file(original_names(tensors, "network."), folder / MISTRAL)


D, NORM = "backbone.layers.0.mixer.D", "backbone.norm_f.weight"
Break = Callable[[Path], object]
CASES: dict[str, tuple[str, Break, str]] = {
    "safetensors_truncated": ("mistral", lambda f: truncate(f, MISTRAL), "consolidated.safetensors: expected a safetensors file, but it"),
    "safetensors_of_text": ("hugging_face_first_spelling", lambda f: (f / ONE).write_text("404: Not Found"), "expected a safetensors file"),
    "safetensors_empty": ("hugging_face_first_spelling", lambda f: (f / ONE).write_bytes(b""), "expected a safetensors file"),
    "safetensors_a_pointer_of_git_lfs": (
        "mistral",
        lambda f: (f / MISTRAL).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 14\n"),
        "expected a safetensors file",
    ),
    "bin_truncated": ("hugging_face_bin", lambda f: truncate(f, BIN), "expected a file of tensors as torch.save writes it, but it cannot"),
    "bin_of_old_pytorch_truncated": ("hugging_face_legacy_bin", lambda f: truncate(f, BIN), "expected a file of tensors as torch.save"),
    "bin_empty": ("state_spaces", lambda f: (f / BIN).write_bytes(b""), "pytorch_model.bin: expected a file of tensors"),
    "bin_of_a_list": ("state_spaces", lambda f: torch.save([torch.ones(2)], f / BIN), "expected tensors by name, found list"),
    "bin_with_more_than_tensors": ("hugging_face_bin", lambda f: edit_bin(f, epoch=3), "unexpected: epoch"),
    "bin_with_a_number_for_a_tensor": ("hugging_face_bin", lambda f: edit_bin(f, **{D: 1.0}), "D is float, no tensor, expected one of"),
    "bin_with_integers": ("state_spaces", lambda f: edit_bin(f, **{NORM: torch.ones(64, dtype=torch.int8)}), "norm_f.weight is torch.int8"),
    "bin_with_a_sparse_tensor": ("hugging_face_bin", lambda f: edit_bin(f, **{NORM: torch.ones(64).to_sparse()}), "a torch.sparse_coo"),
    "bin_with_complex_numbers": ("hugging_face_bin", lambda f: edit_bin(f, **{NORM: torch.ones(64) * 1j}), "is torch.complex64"),
    "bin_with_nan": ("state_spaces", lambda f: edit_bin(f, **{D: torch.tensor([1.0, torch.nan])}), r"NaN or infinity in backbone.*mixer.D"),
    "bin_without_a_tensor": ("state_spaces", lambda f: edit_bin(f, **{D: None}), r"missing: layers.0.mixer.D \[2\]"),
    "bin_with_a_tensor_twice": ("hugging_face_bin", duplicate_embedding, "expected each tensor once, found backbone.embeddings.weight and"),
    "tensor_a_row_short": ("mistral", row_short, r"in_proj.weight is \[513, 64\], expected \[514, 64\] \(consolidated.safetensors\)"),
    "names_of_another_network": ("mistral", names_of_the_other_format, r"(?s)missing: embeddings.weight.*unexpected: network.backbone"),
    "vocabulary_not_as_padded": (
        "state_spaces",
        lambda f: edit_json(f, "config.json", pad_vocab_size_multiple=1),
        r"embedding.weight is \[304, 64\], expected \[301, 64\]",
    ),
    "tied_and_yet_another_head": (
        "state_spaces",
        lambda f: edit_bin(f, **{"lm_head.weight": torch.ones(304, 64)}),
        "config.json says tie_embeddings, but lm_head.weight is not the embedding",
    ),
    "weights_linked_from_outside": ("mistral", lambda f: link_out(f, MISTRAL), "a link that leaves its folder, to .*outside-consolidated"),
    "bin_linked_from_outside": ("state_spaces", lambda f: link_out(f, BIN), "a link that leaves its folder"),
    "shard_linked_from_outside": (
        "hugging_face_shards",
        lambda f: link_out(f, "model-00002-of-00003.safetensors"),
        "a link that leaves its folder",
    ),
    "config_linked_from_outside": ("state_spaces", lambda f: link_out(f, "config.json"), "a link that leaves its folder"),
    "link_to_nowhere": ("state_spaces", link_to_nowhere, "a link that leaves its folder"),
    "index_with_a_missing_shard": (
        "hugging_face_bin_shards",
        lambda f: (f / "pytorch_model-00002-of-00002.bin").unlink(),
        "expected the 2 files of pytorch_model.bin.index.json, missing pytorch_model-00002-of-00002.bin",
    ),
    "index_that_leaves_the_folder": (
        "hugging_face_bin_shards",
        lambda f: edit_json(f, "pytorch_model.bin.index.json", weight_map={"a": "../b.bin"}),
        r"expected plain file names in the folder, found \.\./b.bin",
    ),
    "index_of_nothing": (
        "hugging_face_shards",
        lambda f: edit_json(f, "model.safetensors.index.json", weight_map={}),
        "expected a weight_map of file names",
    ),
    "config_without_geometry": (
        "hugging_face_bin",
        lambda f: write_json(f / "config.json", {"model_type": "mamba2"}),
        "hidden_size: expected",
    ),
    "config_without_anything": ("hugging_face_bin", lambda f: write_json(f / "config.json", {}), "expected model_type mamba2, found None"),
    "original_without_geometry": (
        "state_spaces",
        lambda f: write_json(f / "config.json", {"ssm_cfg": {"layer": "Mamba2"}}),
        "d_model: exp",
    ),
    "params_without_geometry": ("mistral", lambda f: write_json(f / "params.json", {"model_type": "mamba"}), "n_layers: expected a value"),
    "config_cut_short": (
        "state_spaces",
        lambda f: truncate(f, "config.json"),
        "config.json: expected a JSON object, but it cannot be read",
    ),
    "config_nested_without_end": (
        "state_spaces",
        lambda f: (f / "config.json").write_text("[" * 100_000),
        "expected a JSON object, but it",
    ),
    "params_no_object": ("mistral", lambda f: (f / "params.json").write_text("[1]"), "params.json: expected a JSON object, found list"),
    "weights_not_downloaded": ("mistral", lambda f: (f / MISTRAL).unlink(), r"expected consolidated.safetensors \(or .*found no weights"),
    "config_with_words_for_lists": (
        "hugging_face_bin",
        lambda f: edit_json(f, "config.json", architectures=5, layer_types=True),
        "(?s)layer_types: expected a list, found True.*architectures: expected a list, found 5",
    ),
    "config_of_a_trillion_layers": (
        "hugging_face_bin",
        lambda f: edit_json(f, "config.json", num_hidden_layers=10**12),
        "expected the tensors of 1000000000000 layers, as config.json says, found 11 tensors in all",
    ),
    "weights_of_another_geometry": (
        "state_spaces",
        lambda f: edit_json(f, "config.json", n_layer=2),
        r"missing: layers.1.norm.weight \[64\]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_error(case: str, source: Path, tmp_path: Path) -> None:
    form, broken, message = CASES[case]
    folder = rewrite(source, tmp_path / "folder", form)
    load_model(folder, dtype=torch.float32, device="cpu", backend="torch")
    broken(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(folder, dtype=torch.float32, device="cpu", backend="torch")
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("kind", ["archive", "archive_with_a_name", "pickle_alone", "old_pytorch"])
@pytest.mark.parametrize("form", ["hugging_face_bin", "state_spaces"])
def test_pickled_code_is_not_run(form: str, kind: str, source: Path, tmp_path: Path) -> None:
    folder, ran = rewrite(source, tmp_path / "folder", form), tmp_path / "ran"
    content = {"backbone.norm_f.weight": Hostile(ran)} if kind == "archive_with_a_name" else Hostile(ran)
    if kind == "pickle_alone":
        (folder / BIN).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, folder / BIN, _use_new_zipfile_serialization=kind != "old_pytorch")
    named = r"expected tensors and nothing else, found \w+.mkdir, which was not run"
    with pytest.raises(ModelError, match="expected a file of tensors as torch.save writes" if kind == "pickle_alone" else named):
        load_model(folder, dtype=torch.float32, device="cpu", backend="torch")
    assert not ran.exists()
    assert len(model_hash(folder)) == 64  # which looks at bytes only
    torch.load(folder / BIN, weights_only=False) if kind != "pickle_alone" else pickle.loads((folder / BIN).read_bytes())
    assert ran.exists(), "the file is as hostile as the test says"


def test_codestral_with_the_geometry_of_one_group(tmp_path: Path) -> None:
    """What a loader that ignores ssm_cfg would compute."""
    source = tiny_checkpoint(tmp_path / "source", num_layers=1, **CODESTRAL)
    folder = rewrite(source, tmp_path / "folder", "state_spaces")
    edit_json(folder, "config.json", ssm_cfg={"layer": "Mamba2"})
    with pytest.raises(ModelError, match=r"(?s)conv1d.weight is \[2560, 1, 4\].*in_proj.weight is \[3080, 256\], expected \[1288, 256\]"):
        load_model(folder, dtype=torch.float32, device="cpu", backend="torch")

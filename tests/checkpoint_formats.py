"""One checkpoint in every format that a Mamba-2 comes in, written by hand from a Hugging Face folder, name by name.

Independent of the code that reads them. `MAMBA2` and `CODESTRAL` are the two families' geometry, shrunk where a config says
a number: width, depth, vocabulary. What no config says (64 channels a head, state 128, convolution over 4) is as it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MAMBA2: dict[str, Any] = {"d_model": 64, "head_dim": 64, "state_size": 128, "vocab_size": 304, "tied": True}
"""state-spaces/mamba2-*: one group, tied, 301 entries padded to 304."""
CODESTRAL: dict[str, Any] = {"d_model": 256, "head_dim": 64, "state_size": 128, "vocab_size": 320, "num_groups": 8, "tied": False}

Tensors = dict[str, torch.Tensor]


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of a Hugging Face folder's safetensors."""
    return {name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()}


def original_names(tensors: Tensors, prefix: str = "") -> Tensors:
    """As mamba_ssm names them: `embedding`, not `embeddings`."""
    return {prefix + name.replace("backbone.embeddings.", "backbone.embedding."): tensor for name, tensor in tensors.items()}


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return values


def write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values), "utf-8")


def save_shards(folder: Path, stem: str, suffix: str, tensors: Tensors, shards: int = 2) -> None:
    """`stem`-0000i-of-0000n`suffix` and their index."""
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"{stem}-{shard + 1:05d}-of-{shards:05d}{suffix}"
        chosen = dict(list(tensors.items())[shard::shards])
        if suffix == ".bin":
            torch.save(chosen, folder / file)
        else:
            save_file(chosen, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    write_json(folder / f"{stem}{suffix}.index.json", {"metadata": {}, "weight_map": weight_map})


def _hugging_face(source: Path, folder: Path) -> Tensors:
    write_json(folder / "config.json", config_of(source))
    return tensors_of(source)


def hugging_face_bin(source: Path, folder: Path) -> None:
    torch.save(_hugging_face(source, folder), folder / "pytorch_model.bin")


def hugging_face_legacy_bin(source: Path, folder: Path) -> None:
    """As PyTorch saved before 1.6: no zip archive."""
    torch.save(_hugging_face(source, folder), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def hugging_face_bin_shards(source: Path, folder: Path) -> None:
    save_shards(folder, "pytorch_model", ".bin", _hugging_face(source, folder))


def hugging_face_shards(source: Path, folder: Path) -> None:
    save_shards(folder, "model", ".safetensors", _hugging_face(source, folder), shards=3)


def hugging_face_first_spelling(source: Path, folder: Path) -> None:
    save_file(original_names(_hugging_face(source, folder)), folder / "model.safetensors")


def mamba_ssm_config(config: dict[str, Any], **ssm_cfg: Any) -> dict[str, Any]:
    """As the published config.json says it, which leaves the mixer to mamba_ssm's defaults. ssm_cfg: what it does say."""
    groups = {} if config["n_groups"] == 1 else {"ngroups": config["n_groups"]}
    return {
        "d_model": config["hidden_size"],
        "d_intermediate": 0,
        "n_layer": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"] - 3,
        "ssm_cfg": {"layer": "Mamba2", **groups, **ssm_cfg},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": config["tie_word_embeddings"],
    }


def _original(source: Path, folder: Path, **ssm_cfg: Any) -> Tensors:
    config = config_of(source)
    write_json(folder / "config.json", mamba_ssm_config(config, **ssm_cfg))
    tensors = original_names(tensors_of(source))
    if config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]  # one storage under two names, as state_dict gives it
    return tensors


def state_spaces(source: Path, folder: Path, **ssm_cfg: Any) -> None:
    torch.save(_original(source, folder, **ssm_cfg), folder / "pytorch_model.bin")


def state_spaces_safetensors(source: Path, folder: Path) -> None:
    save_file({name: tensor.clone() for name, tensor in _original(source, folder).items()}, folder / "model.safetensors")


def mistral(source: Path, folder: Path) -> None:
    config = config_of(source)
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "n_groups": config["n_groups"],
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": config["tie_word_embeddings"],
        "model_type": "mamba",
    }
    write_json(folder / "params.json", params)
    save_file(original_names(tensors_of(source), "model."), folder / "consolidated.safetensors")


def mistral_beside_a_config(source: Path, folder: Path) -> None:
    """A part of Codestral's repository: both configs are there, the weights in Mistral's format alone."""
    mistral(source, folder)
    write_json(folder / "config.json", config_of(source))


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    writer.__name__: writer
    for writer in (
        hugging_face_bin,
        hugging_face_legacy_bin,
        hugging_face_bin_shards,
        hugging_face_shards,
        hugging_face_first_spelling,
        state_spaces,
        state_spaces_safetensors,
        mistral,
        mistral_beside_a_config,
    )
}


def rewrite(source: Path, folder: Path, form: str, *, copied: Iterable[str] = (), **ssm_cfg: Any) -> Path:
    """Write the Hugging Face folder `source` to `folder` in the form of that name, and take along the files `copied`."""
    folder.mkdir(parents=True)
    if ssm_cfg:
        state_spaces(source, folder, **ssm_cfg)
    else:
        WRITERS[form](source, folder)
    for name in copied:
        shutil.copyfile(source / name, folder / name)
    return folder

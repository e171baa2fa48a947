"""Any checkpoint that longscan reads -> a Hugging Face folder that transformers loads: the same bits under other names.

Tensors pass through one at a time and keep the dtype of their file. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from longscan.pipeline.errors import ModelError, OutputError
from longscan.pipeline.model.classify import HEAD_FILE
from longscan.pipeline.model.config import Mamba2Geometry
from longscan.pipeline.model.formats import AUTO, FORMATS, find_format
from longscan.pipeline.model.formats.fields import read_json
from longscan.pipeline.model.formats.files import FLOATS, SAFETENSORS, Stored, inside
from longscan.pipeline.model.recipe import recipe_files
from longscan.pipeline.model.weights import check_weights, hugging_face_key, not_tied, read_tensors
from longscan.pipeline.tokenize import load_tokenizer

TOKENIZER = "tokenizer.json"
COPIED = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    HEAD_FILE,
)
"""Files of a tokenizer, and a classifier's heads: taken along where they are there, as the files of sentence-transformers are."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert(source: str | Path, target: str | Path, *, format: str = AUTO) -> Path:
    """Write the checkpoint in `source` to `target`, a folder that is not there yet or empty. Returns it.

    Raises ModelError where longscan does not run the checkpoint or Hugging Face's Mamba-2 has no word for it, OutputError
    where `target` cannot be written; nothing is left there then.
    """
    source, target, format = Path(source), Path(target), find_format(source, format)
    geometry = FORMATS[format].read_geometry(source)
    _check_expressible(source, geometry)
    stored = check_weights(source, geometry, format=format)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{target}: expected no folder or an empty one, found one that holds something. Choose another target.")
    config = hugging_face_config(geometry, _token_ids(source, format), _dtype(stored))
    unfinished = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(parents=True)
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        _write_tensors(source, geometry, stored, format, unfinished / SAFETENSORS)
        for name in (*(name for name in COPIED if (source / name).exists()), *recipe_files(source)):
            (unfinished / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(inside(source, name), unfinished / name)
        with suppress(FileNotFoundError):
            target.rmdir()
        os.rename(unfinished, target)
    except OSError as error:
        raise OutputError(f"{target}: expected a folder that can be written: {error}. Choose another target.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _check_expressible(source: Path, geometry: Mamba2Geometry) -> None:
    """Raise ModelError where transformers would compute something else."""
    if geometry.norm_before_gate:
        raise ModelError(
            f"{source}: norm_before_gate: expected false, found true, which Hugging Face's Mamba-2 does not compute."
            " Use the checkpoint as it is: longscan reads it."
        )
    if geometry.inner % geometry.d_model:
        raise ModelError(
            f"{source}: expand: expected a whole number, found {geometry.inner / geometry.d_model:g}, which Hugging Face's Mamba-2"
            " does not take. Use the checkpoint as it is: longscan reads it."
        )


def hugging_face_config(g: Mamba2Geometry, ids: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json, every number said: transformers' defaults are those of one 7B model. ids: of the IDS. dtype: as torch names it."""
    config: dict[str, Any] = {
        "architectures": ["Mamba2ForCausalLM" if g.has_head else "Mamba2Model"],
        "model_type": "mamba2",
        "torch_dtype": dtype,
        "vocab_size": g.vocab_size,
        "hidden_size": g.d_model,
        "num_hidden_layers": g.num_layers,
        "num_heads": g.num_heads,
        "head_dim": g.head_dim,
        "n_groups": g.num_groups,
        "state_size": g.state_size,
        "conv_kernel": g.conv_kernel,
        "expand": g.inner // g.d_model,
        "hidden_act": "silu",
        "layer_norm_epsilon": g.eps,
        "tie_word_embeddings": g.tied,
        "use_bias": g.use_bias,
        "use_conv_bias": g.use_conv_bias,
        "residual_in_fp32": g.residual_in_fp32,
        **ids,
    }
    if g.dt_limit != (0.0, math.inf):  # transformers' default, for which JSON has no word
        config["time_step_limit"] = list(g.dt_limit)
    if g.max_trained_tokens is not None:
        config["max_position_embeddings"] = g.max_trained_tokens
    return config


def _token_ids(source: Path, format: str) -> dict[str, Any]:
    """What the source's config says, else its tokenizer; null where neither does."""
    if format == "hugging_face":
        config = read_json(inside(source, FORMATS[format].CONFIG))
        return {key: config.get(key) for key in IDS}
    ids: dict[str, Any] = dict.fromkeys(IDS)
    if (source / TOKENIZER).exists():
        tokenizer = load_tokenizer(str(source))
        ids |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return ids


def _dtype(stored: Mapping[str, Stored]) -> str:
    """The widest of the files', as torch names it, which is what transformers takes all of them to: nothing is lost."""
    widest = max((FLOATS[tensor.dtype] for tensor in stored.values()), key=lambda dtype: dtype.itemsize)
    return str(widest).removeprefix("torch.")


def _write_tensors(source: Path, geometry: Mamba2Geometry, stored: Mapping[str, Stored], format: str, file: Path) -> None:
    """A safetensors file, by its definition: the header's length, the header as JSON, the tensors end to end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name in sorted(stored, key=lambda name: (-FLOATS[stored[name].dtype].itemsize, name)):
        if name == "lm_head.weight" and geometry.tied:
            continue
        tensor = stored[name]
        begins[name], end = end, end + math.prod(tensor.shape) * FLOATS[tensor.dtype].itemsize
        header[hugging_face_key(name, geometry)] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begins[name], end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that every tensor is aligned, the widest dtypes coming first
    tables: list[torch.Tensor] = []
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, values in read_tensors(source, geometry, format=format):
            if geometry.tied and name in ("embeddings.weight", "lm_head.weight"):
                tables.append(values)
            if name in begins:
                stream.seek(8 + len(encoded) + begins[name])
                stream.writelines(_bytes(values))
    if len(tables) == 2 and not torch.equal(*tables):
        raise not_tied(source, format)


def _bytes(values: torch.Tensor) -> Iterable[memoryview]:
    """The tensor's bytes in order, in pieces."""
    return (memoryview(piece.contiguous().view(torch.uint8).numpy().reshape(-1)) for piece in values.split(1 << 14))

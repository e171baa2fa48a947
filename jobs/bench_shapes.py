"""Checkpoints of random weights at the shapes of real models, for benchmarks of whole jobs: no speed depends on what was learnt."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from longscan.jobs.benchmark.stacks import GEOMETRIES, random_weights
from safetensors.torch import save_file

TOKENIZER = Path(__file__).parent / "demo" / "model"
MIXER = {
    "in_proj": "in_proj.weight",
    "conv_weight": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "D": "D",
    "gated_norm": "norm.weight",
    "out_proj": "out_proj.weight",
}


def write_model(folder: Path, shape: str, layers: int | None = None) -> Path:
    """Write a model of `shape`, one of GEOMETRIES, in Hugging Face's format, in bf16, with the demo's tokenizer. Returns the folder.

    layers: fewer than it has; None for all. transformers' chunk is its default.
    """
    g = GEOMETRIES[shape]
    g = replace(g, num_layers=layers or g.num_layers)
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "torch_dtype": "bfloat16",
        "vocab_size": g.vocab_size,
        "hidden_size": g.d_model,
        "num_hidden_layers": g.num_layers,
        "num_heads": g.num_heads,
        "head_dim": g.head_dim,
        "n_groups": g.num_groups,
        "state_size": g.state_size,
        "conv_kernel": g.conv_kernel,
        "expand": g.inner // g.d_model,
        "layer_norm_epsilon": g.eps,
        "tie_word_embeddings": g.tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = random_weights(g, device=device, dtype=torch.bfloat16)
    tensors = {"backbone.embeddings.weight": weights.pop("embedding"), "backbone.norm_f.weight": weights.pop("final_norm")}
    head = weights.pop("head")
    if not g.tied:
        tensors["lm_head.weight"] = head
    for name, tensor in weights.items():
        layer, _, part = name.removeprefix("layers.").partition(".")
        key = "norm.weight" if part == "norm" else f"mixer.{MIXER[part]}"
        tensors[f"backbone.layers.{layer}.{key}"] = tensor[:, None] if part == "conv_weight" else tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder

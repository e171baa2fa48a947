"""Checkpoints of random weights at the shapes of real models, for benchmarks of whole jobs: no speed depends on what was learnt."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from longscan.jobs.benchmark.stacks import GEOMETRIES, random_weights
from longscan.pipeline.model.convert import IDS, hugging_face_config
from longscan.pipeline.model.weights import as_hugging_face
from safetensors.torch import save_file

TOKENIZER = Path(__file__).parent / "demo" / "model"


def write_model(folder: Path, shape: str, layers: int | None = None) -> Path:
    """Write a model of `shape`, one of GEOMETRIES, in Hugging Face's format, in bf16, with the demo's tokenizer. Returns the folder.

    layers: fewer than it has; None for all. transformers' chunk is its default.
    """
    g = GEOMETRIES[shape]
    g = replace(g, num_layers=layers or g.num_layers)
    folder.mkdir(parents=True)
    config = hugging_face_config(g, dict.fromkeys(IDS, 0), "bfloat16")
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = as_hugging_face(random_weights(g, device=device, dtype=torch.bfloat16), g)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder

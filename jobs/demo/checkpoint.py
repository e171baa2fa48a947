"""The demo's model as a folder in Hugging Face format: config.json, model.safetensors and the tokenizer's two files."""

from __future__ import annotations

from pathlib import Path

import torch
from longscan.jobs.demo import vocabulary
from longscan.jobs.demo.network import Network, Shape
from longscan.jobs.demo.vocabulary import END_ID
from longscan.kernels.segments import TILE
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import Mamba2Config

KEPT_FP32 = ("A_log", "D", "dt_bias", "norm.weight", "norm_f.weight")
"""Endings of the names that are saved in float32; all else is rounded to bfloat16."""


def save(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder, or write it anew."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = network.shape
    config = Mamba2Config(
        architectures=["Mamba2ForCausalLM"],
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        num_hidden_layers=shape.num_layers,
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        state_size=shape.state_size,
        conv_kernel=shape.conv_kernel,
        layer_norm_epsilon=shape.eps,
        n_groups=1,
        expand=2,
        chunk_size=TILE,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )
    config.save_pretrained(folder)
    weights = {
        name: value.detach().cpu().to(torch.float32 if name.endswith(KEPT_FP32) else torch.bfloat16).contiguous()
        for name, value in network.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    vocabulary.save(tokenizer, folder)


def load(folder: Path) -> tuple[Network, Tokenizer]:
    """The network in float32, its weights as saved, ready to measure; and its tokenizer."""
    config = Mamba2Config.from_pretrained(folder)
    shape = Shape(
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        config.head_dim,
        config.state_size,
        config.conv_kernel,
        config.layer_norm_epsilon,
    )
    network = Network(shape)
    network.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
    return network.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))

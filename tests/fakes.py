"""Small things that behave like the big ones: a random Mamba-2 checkpoint and a byte-level tokenizer, made in a moment.

The checkpoint is written by hand, name by name, so that it is independent of the code that reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"

LINES = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.",
    "However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so",
    "well fixed in the minds of the surrounding families, that he is considered as the rightful property of some one of them.",
    "\tdef f(x): return x ** 2  # 1234567890\n\n  \n",
)


def tiny_checkpoint(
    folder: str | Path,
    *,
    vocab_size: int = 320,
    d_model: int = 64,
    num_layers: int = 2,
    head_dim: int = 32,
    num_groups: int = 1,
    state_size: int = 16,
    conv_kernel: int = 4,
    expand: int = 2,
    eps: float = 1e-5,
    time_step_limit: Sequence[float] | None = None,
    tied: bool = True,
    use_bias: bool = False,
    use_conv_bias: bool = True,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: bool = False,
    base_model: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a random Mamba-2 in Hugging Face format, with time scales like a trained one's, and return its folder.

    dtype: of the tensors in the files. shards: number of safetensors files. tokenizer: write one as well, of at most
    `vocab_size` entries. base_model: as a base model is saved, without an output projection and the prefix `backbone.`.
    Further keywords go into config.json as they are; None removes a key.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    num_heads = d_model * expand // head_dim
    values: dict[str, Any] = {
        "architectures": ["Mamba2Model" if base_model else "Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": vocab_size,
        "hidden_size": d_model,
        "num_hidden_layers": num_layers,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "n_groups": num_groups,
        "state_size": state_size,
        "conv_kernel": conv_kernel,
        "expand": expand,
        "layer_norm_epsilon": eps,
        "time_step_limit": [0.0, math.inf] if time_step_limit is None else list(time_step_limit),
        "tie_word_embeddings": tied,
        "use_bias": use_bias,
        "use_conv_bias": use_conv_bias,
        "hidden_act": "silu",
        "residual_in_fp32": True,
        "chunk_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    values |= config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}, indent=2), "utf-8")
    tensors = {name: tensor.to(dtype) for name, tensor in _tensors(values, torch.Generator().manual_seed(seed)).items()}
    if base_model:
        tensors = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    _save(folder, tensors, shards)
    if tokenizer:
        tiny_tokenizer(folder, vocab_size=vocab_size)
    return folder


def tiny_tokenizer(folder: str | Path, *, vocab_size: int = 320, lines: Sequence[str] = LINES) -> Path:
    """Write a byte-level BPE tokenizer, trained on `lines`, that transformers' AutoTokenizer loads. Id 0 ends a text."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), "utf-8")
    return folder


def _tensors(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    def around_one(size: int) -> torch.Tensor:
        return 1 + normal(size, scale=0.1)

    D, H, K = config["hidden_size"], config["num_heads"], config["conv_kernel"]
    inner = H * config["head_dim"]
    channels = inner + 2 * config["n_groups"] * config["state_size"]
    projected = inner + channels + H
    tensors = {"backbone.embeddings.weight": normal(config["vocab_size"], D, scale=0.3)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"backbone.layers.{layer}."
        rate = 1 + 15 * torch.rand(H, generator=generator)
        step = torch.exp(math.log(1e-3) + math.log(100) * torch.rand(H, generator=generator))
        tensors |= {
            prefix + "norm.weight": around_one(D),
            prefix + "mixer.A_log": rate.log(),
            prefix + "mixer.dt_bias": step + torch.log(-torch.expm1(-step)),
            prefix + "mixer.D": around_one(H),
            prefix + "mixer.conv1d.weight": normal(channels, 1, K, scale=K**-0.5),
            prefix + "mixer.in_proj.weight": normal(projected, D, scale=D**-0.5),
            prefix + "mixer.norm.weight": around_one(inner),
            prefix + "mixer.out_proj.weight": normal(D, inner, scale=inner**-0.5),
        }
        if config["use_conv_bias"]:
            tensors[prefix + "mixer.conv1d.bias"] = normal(channels, scale=0.1)
        if config["use_bias"]:
            tensors[prefix + "mixer.in_proj.bias"] = normal(projected, scale=0.1)
            tensors[prefix + "mixer.out_proj.bias"] = normal(D, scale=0.1)
    tensors["backbone.norm_f.weight"] = around_one(D)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], D, scale=0.3)
    return tensors


def _save(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        old.unlink()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[shard::shards]
        save_file({name: tensors[name] for name in chosen}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), "utf-8")

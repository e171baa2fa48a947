"""The truth for a whole Mamba-2: a checkpoint's files read by their names, and every token taken by the float64 recurrence in turn."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
import torch
from safetensors.torch import load_file
from threads import torch_threads


@dataclass(frozen=True, slots=True)
class Truth:
    """Of one document, float64."""

    hidden_LD: torch.Tensor
    """After the final norm."""
    ssm: list[torch.Tensor]
    """By layer, [H, N, P]."""
    tail: list[torch.Tensor]
    """By layer, [K - 1, C]."""
    logprob_L: torch.Tensor
    """[L - 1]: of each token but the first, given those before it."""


def truth(folder: Path, ids: torch.Tensor, *, norm_before_gate: bool = False) -> Truth:
    """Run one document from the zero state. In one thread: thousands of operations, each too small to share.

    norm_before_gate: which no Hugging Face config can ask for.
    """
    with torch_threads(1):
        return _truth(folder, ids, norm_before_gate)


def _truth(folder: Path, ids: torch.Tensor, norm_before_gate: bool) -> Truth:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8")) | {"norm_before_gate": norm_before_gate}
    tensors = {name: tensor.double() for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    eps = config["layer_norm_epsilon"]
    stream_LD = tensors["backbone.embeddings.weight"][ids]
    ssm, tail = [], []
    for layer in range(config["num_hidden_layers"]):
        prefix = f"backbone.layers.{layer}."
        mixer = {name.removeprefix(prefix + "mixer."): tensor for name, tensor in tensors.items() if name.startswith(prefix + "mixer.")}
        added_LD, state, last = _mixer(config, mixer, oracle.rms_norm(stream_LD, tensors[prefix + "norm.weight"], eps))
        stream_LD = stream_LD + added_LD
        ssm.append(state)
        tail.append(last)
    hidden_LD = oracle.rms_norm(stream_LD, tensors["backbone.norm_f.weight"], eps)
    head = tensors["backbone.embeddings.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    scores = torch.log_softmax(hidden_LD @ head.T, -1)
    return Truth(hidden_LD, ssm, tail, scores[:-1].gather(1, ids[1:, None])[:, 0])


def _mixer(config: dict[str, Any], mixer: dict[str, torch.Tensor], x_LD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    H, P, G, N = config["num_heads"], config["head_dim"], config["n_groups"], config["state_size"]
    projected = x_LD @ mixer["in_proj.weight"].T + mixer.get("in_proj.bias", torch.zeros(()))
    z_LI, xbc_LC, dt_LH = projected.split([H * P, H * P + 2 * G * N, H], dim=1)
    xbc_LC, tail_KC = oracle.causal_conv(xbc_LC, mixer["conv1d.weight"].squeeze(1), mixer.get("conv1d.bias"))
    x_LI, b_LN, c_LN = xbc_LC.split([H * P, G * N, G * N], dim=1)
    low, high = config.get("time_step_limit", (0.0, math.inf))
    y_LHP, state_HNP = oracle.ssd_recurrence(
        x_LI.unflatten(1, (H, P)),
        dt_LH,
        -mixer["A_log"].exp(),
        b_LN.unflatten(1, (G, N)),
        c_LN.unflatten(1, (G, N)),
        D_H=mixer["D"],
        dt_bias_H=mixer["dt_bias"],
        dt_limit=(low, high),
    )
    y_LI = oracle.gated_rms_norm(
        y_LHP.flatten(1),
        z_LI,
        mixer["norm.weight"],
        groups=G,
        eps=config["layer_norm_epsilon"],
        norm_before_gate=config["norm_before_gate"],
    )
    return y_LI @ mixer["out_proj.weight"].T + mixer.get("out_proj.bias", torch.zeros(())), state_HNP, tail_KC

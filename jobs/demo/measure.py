"""How well the demo's model predicts a novel: bits per byte, and their curve along the position.

Two ways to read the same tokens: with the state carried from the novel's first token to its last, and with the state
reset every 512 tokens, as by a model of short context. Every start has `END` as its only context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from longscan.jobs.demo.network import Network
from longscan.jobs.demo.vocabulary import END_ID
from longscan.kernels.segments import TILE
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

RESET = 512
"""Tokens between resets in the second way of reading."""

CHUNK = 4096
"""Tokens of a stream in one forward pass: bounds the memory, changes nothing."""

STREAMS = 32
"""Streams in one forward pass where the state is reset."""

POSITIONS = (0, 512, 2048, 8192, 32768, 131072)
"""Edges of the curve along the novel, in tokens; the last stretch ends with the novel."""

OFFSETS = (0, 16, 64, 128, 256, 512)
"""Edges of the curve since the last reset, in tokens."""


@torch.no_grad()
def log_probs(network: Network, ids_T: Tensor, reset: int | None = None) -> Tensor:
    """ln p of each token given all before it, [T] float64 on the CPU; the state is zeroed every `reset` tokens (a multiple of TILE)."""
    length, block = len(ids_T), reset or -(-len(ids_T) // TILE) * TILE
    targets_ST = F.pad(ids_T, (0, -length % block), value=END_ID).reshape(-1, block)
    inputs_ST = torch.cat([torch.full_like(targets_ST[:, :1], END_ID), targets_ST[:, :-1]], dim=1)
    rows = []
    for first in range(0, len(targets_ST), STREAMS):
        inputs, targets = inputs_ST[first : first + STREAMS], targets_ST[first : first + STREAMS]
        state = network.new_state(len(inputs))
        scored = []
        for at in range(0, block, CHUNK):
            logits, state = network(inputs[:, at : at + CHUNK], state)
            chunk = targets[:, at : at + CHUNK].unsqueeze(-1)
            scored.append(logits.gather(-1, chunk).squeeze(-1) - logits.logsumexp(-1))
        rows.append(torch.cat(scored, dim=1))
    return torch.cat(rows).flatten()[:length].double().cpu()


def token_bytes(tokenizer: Tokenizer) -> Tensor:
    """Bytes of text that each entry stands for, [V]: in byte-level BPE a character of an entry is a byte; none for END."""
    sizes = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.int64)
    for entry, i in tokenizer.get_vocab().items():
        sizes[i] = len(entry)
    sizes[END_ID] = 0
    return sizes


@dataclass(frozen=True, slots=True)
class Reading:
    """One novel read both ways: per token its bytes, and its ln p with the state carried and reset."""

    bytes_T: Tensor
    carried_T: Tensor
    reset_T: Tensor

    def bits_per_byte(self, where: Tensor | slice = slice(None)) -> dict[str, float]:
        """Of the tokens selected by `where`."""
        bits = math.log(2) * int(self.bytes_T[where].sum())
        return {"carried": -float(self.carried_T[where].sum()) / bits, "reset": -float(self.reset_T[where].sum()) / bits}

    def along(self, places_T: Tensor, edges: Sequence[int]) -> list[dict[str, Any]]:
        """Bits per byte of the tokens whose place lies between two edges; the last stretch takes all beyond."""
        stretches = [*pairwise(edges), (edges[-1], int(places_T.max()) + 1)]
        picked = [(low, high, (places_T >= low) & (places_T < high)) for low, high in stretches]
        return [{"from": low, "to": high, **self.bits_per_byte(where)} for low, high, where in picked if where.any()]


def read(network: Network, tokenizer: Tokenizer, text: str) -> Reading:
    ids = torch.tensor(tokenizer.encode(text).ids)
    on_device = ids.to(network.backbone.norm_f.weight.device)
    return Reading(token_bytes(tokenizer)[ids], log_probs(network, on_device), log_probs(network, on_device, RESET))


def measure(network: Network, tokenizer: Tokenizer, novels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Bits per byte of every row of the corpus, and the held-out novel's two curves."""
    table, curves = [], {}
    for novel in novels:
        reading = read(network, tokenizer, novel["text"])
        places = torch.arange(len(reading.bytes_T))
        table.append(
            {
                "title": novel["title"],
                "held_out": novel["held_out"],
                "tokens": len(places),
                "bytes": int(reading.bytes_T.sum()),
                **reading.bits_per_byte(),
            }
        )
        if novel["held_out"]:
            curves = {"position": reading.along(places, POSITIONS), "offset": reading.along(places % RESET, OFFSETS)}
    return {"novels": table, "curves": curves}

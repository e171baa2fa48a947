"""A Mamba-2's geometry: one set of fields, whatever format a checkpoint has. The readers of formats/ fill it in."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mamba2Geometry:
    """The shape of a Mamba-2 and the constants of its computation. Letters as in kernels/SHAPES.md."""

    vocab_size: int
    """V, rows of the embedding: the tokenizer's, often padded."""
    d_model: int
    """D"""
    num_layers: int
    num_heads: int
    """H"""
    head_dim: int
    """P"""
    num_groups: int
    """G"""
    state_size: int
    """N"""
    conv_kernel: int
    """K"""
    eps: float = 1e-5
    """Of every norm."""
    dt_limit: tuple[float, float] = (0.0, math.inf)
    """Bounds of the time step after softplus."""
    tied: bool = False
    """The output projection is the embedding."""
    has_head: bool = True
    """There is an output projection; without one a model embeds but does not score."""
    norm_before_gate: bool = False
    use_bias: bool = False
    """in_proj and out_proj have a bias."""
    use_conv_bias: bool = True
    residual_in_fp32: bool = True
    """What the checkpoint asks for. The residual stream is kept in fp32 either way."""
    bos_id: int | None = None
    eos_id: int | None = None
    max_trained_tokens: int | None = None
    """Longest text of its training, where the checkpoint says so."""

    @property
    def inner(self) -> int:
        """I = H P"""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """C = I + 2 G N"""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def projected(self) -> int:
        """Rows of in_proj: z (I), x (I), B (G N), C (G N), dt (H)."""
        return self.inner + self.channels + self.num_heads

    @property
    def num_parameters(self) -> int:
        biases = (self.projected + self.d_model) * self.use_bias + self.channels * self.use_conv_bias
        layer = (
            self.d_model * (self.projected + self.inner + 1) + self.channels * self.conv_kernel + 3 * self.num_heads + self.inner + biases
        )
        tables = 1 + (self.has_head and not self.tied)
        return tables * self.vocab_size * self.d_model + self.num_layers * layer + self.d_model

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of one lane's state: SSM in fp32, convolution tails in items of `itemsize` bytes."""
        return self.num_layers * (4 * self.inner * self.state_size + itemsize * (self.conv_kernel - 1) * self.channels)

    def step_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of a step's activations at their largest: a layer's projection and what is made of it, beside the stream in fp32."""
        return tokens * (itemsize * (2 * self.projected + 2 * self.inner + self.channels) + 4 * self.d_model)

"""The demo's Mamba-2 as it is trained: differentiable, in batches of equal streams, state in and state out.

Modules and parameters carry the names of Hugging Face's Mamba2ForCausalLM, so that `state_dict()` is the checkpoint.
The product runs the saved folder on the operators of kernels/, which pack unequal documents and need no gradient.

Letters are those of kernels/SHAPES.md; here S is the batch of streams, T the tokens of a chunk, Z its tiles of Q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from longscan.kernels.segments import TILE
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Shape:
    """One group, head width and state of 64, inner width twice the model's, four taps, tied embeddings."""

    vocab_size: int
    d_model: int
    num_layers: int
    head_dim: int = 64
    state_size: int = 64
    conv_kernel: int = 4
    eps: float = 1e-5

    @property
    def inner(self) -> int:
        return 2 * self.d_model

    @property
    def num_heads(self) -> int:
        return self.inner // self.head_dim

    @property
    def channels(self) -> int:
        """C, what the convolution mixes in time: x, B and C."""
        return self.inner + 2 * self.state_size


LayerState = tuple[Tensor, Tensor]
"""tail_SKC, the last K - 1 inputs of the convolution, and ssm_SHNP."""


def decay(edges: Tensor) -> Tensor:
    """exp(edges[i] - edges[j]) for j <= i, else 0: [..., Q] -> [..., Q, Q]. `edges` is a running sum of log decays."""
    differences = edges.unsqueeze(-1) - edges.unsqueeze(-2)
    later = torch.ones(differences.shape[-2:], dtype=torch.bool, device=edges.device).triu(1)
    return differences.masked_fill(later, -math.inf).exp()


def ssd(x_STHP: Tensor, dt_STH: Tensor, A_H: Tensor, B_STN: Tensor, C_STN: Tensor, ssm_SHNP: Tensor) -> tuple[Tensor, Tensor]:
    """The state space dual form over tiles (arXiv 2405.21060, section 6): y_STHP and the state after the last token.

    state[t] = exp(dt A) state[t-1] + dt B x^T, y[t] = C . state[t]; dt after softplus, T a multiple of TILE.
    """
    S, T, H, P = x_STHP.shape
    N, Z = B_STN.shape[-1], T // TILE
    u_SHZQP = (x_STHP * dt_STH.unsqueeze(-1)).reshape(S, Z, TILE, H, P).permute(0, 3, 1, 2, 4)
    log_SHZQ = (dt_STH * A_H).reshape(S, Z, TILE, H).permute(0, 3, 1, 2).cumsum(-1)
    B_SZQN, C_SZQN = B_STN.reshape(S, Z, TILE, N), C_STN.reshape(S, Z, TILE, N)

    # 1. Inside a tile: attention with C as queries, B as keys and the decay between them as a mask.
    scores_SZQQ = C_SZQN @ B_SZQN.transpose(-1, -2)
    y_SHZQP = (scores_SZQQ.unsqueeze(1) * decay(log_SHZQ)) @ u_SHZQP

    # 2. What each tile adds to the state at its end.
    to_end_SHZQ = (log_SHZQ[..., -1:] - log_SHZQ).exp()
    added_SHZNP = B_SZQN.transpose(-1, -2).unsqueeze(1) @ (u_SHZQP * to_end_SHZQ.unsqueeze(-1))

    # 3. The state at every edge of a tile: all that came in before, each decayed up to there.
    edges_SHZ = F.pad(log_SHZQ[..., -1].cumsum(-1), (1, 0))
    incoming = torch.cat([ssm_SHNP.unsqueeze(2), added_SHZNP], dim=2).flatten(3)
    states_SHZNP = (decay(edges_SHZ) @ incoming).reshape(S, H, Z + 1, N, P)

    # 4. What each token reads from the state at its tile's start.
    y_SHZQP = y_SHZQP + (C_SZQN.unsqueeze(1) @ states_SHZNP[:, :, :-1]) * log_SHZQ.exp().unsqueeze(-1)
    return y_SHZQP.permute(0, 2, 3, 1, 4).reshape(S, T, H, P), states_SHZNP[:, :, -1]


class Convolution(nn.Module):
    """Causal, a filter a channel, then SiLU. The parameters' shapes are those of nn.Conv1d with as many groups as channels."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(taps)
        self.weight = nn.Parameter(torch.empty(channels, 1, taps).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))

    def forward(self, x_STC: Tensor, tail_SKC: Tensor) -> tuple[Tensor, Tensor]:
        T, taps = x_STC.shape[1], self.weight.shape[-1]
        inputs = torch.cat([tail_SKC, x_STC], dim=1)
        mixed_STC: Tensor = self.bias
        for k in range(taps):
            mixed_STC = mixed_STC + inputs[:, k : k + T] * self.weight[:, 0, k]
        return F.silu(mixed_STC), inputs[:, T:]


class Mixer(nn.Module):
    """Mamba-2's block: projection, causal convolution, SSD, gated norm, projection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.num_heads
        self.in_proj = nn.Linear(shape.d_model, shape.inner + shape.channels + heads, bias=False)
        self.conv1d = Convolution(shape.channels, shape.conv_kernel)
        # As in the paper's code: steps log-uniform in [0.001, 0.1] after the softplus, decay rates uniform in [1, 16].
        steps = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(shape.inner, eps=shape.eps)
        self.out_proj = nn.Linear(shape.inner, shape.d_model, bias=False)
        with torch.no_grad():
            self.out_proj.weight /= math.sqrt(shape.num_layers)

    def forward(self, hidden_STD: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        shape, (tail, ssm) = self.shape, state
        S, T, _ = hidden_STD.shape
        z_STI, xBC_STC, dt_STH = torch.split(self.in_proj(hidden_STD), [shape.inner, shape.channels, shape.num_heads], dim=-1)
        xBC_STC, tail = self.conv1d(xBC_STC, tail)
        x_STI, B_STN, C_STN = torch.split(xBC_STC, [shape.inner, shape.state_size, shape.state_size], dim=-1)
        x_STHP = x_STI.reshape(S, T, shape.num_heads, shape.head_dim)
        y_STHP, ssm = ssd(x_STHP, F.softplus(dt_STH + self.dt_bias), -self.A_log.exp(), B_STN, C_STN, ssm)
        y_STHP = y_STHP + x_STHP * self.D.unsqueeze(-1)
        out_STD = self.out_proj(self.norm(y_STHP.reshape(S, T, shape.inner) * F.silu(z_STI)))
        return out_STD, (tail, ssm)


class Layer(nn.Module):
    """The residual stream plus what the mixer makes of it."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.d_model, eps=shape.eps)
        self.mixer = Mixer(shape)
        self.dropout = dropout

    def forward(self, hidden_STD: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        out_STD, state = self.mixer(self.norm(hidden_STD), state)
        return hidden_STD + F.dropout(out_STD, self.dropout, self.training), state


class Backbone(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(shape.vocab_size, shape.d_model)
        nn.init.normal_(self.embeddings.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_layers))
        self.norm_f = nn.RMSNorm(shape.d_model, eps=shape.eps)


class Network(nn.Module):
    """ids_ST and the state of every layer -> logits_STV and the state after the last token; T a multiple of TILE."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.backbone = Backbone(shape, dropout)

    def new_state(self, streams: int) -> list[LayerState]:
        """Before any token: all zeros."""
        shape, zeros = self.shape, self.backbone.norm_f.weight.new_zeros
        tail = (streams, shape.conv_kernel - 1, shape.channels)
        ssm = (streams, shape.num_heads, shape.state_size, shape.head_dim)
        return [(zeros(tail), zeros(ssm)) for _ in range(shape.num_layers)]

    def compile_mixers(self) -> None:
        """Through torch.compile, once for all layers; dropout stays outside, so that no setting of it compiles anew."""
        for layer in self.backbone.layers:
            assert isinstance(layer, Layer)
            layer.mixer.compile()

    def forward(self, ids_ST: Tensor, state: list[LayerState]) -> tuple[Tensor, list[LayerState]]:
        if ids_ST.shape[1] % TILE:
            raise ValueError(f"ids_ST: expected a multiple of {TILE} tokens, got {ids_ST.shape[1]}")
        embedding = self.backbone.embeddings
        hidden_STD = F.dropout(embedding(ids_ST), self.dropout, self.training)
        after = []
        for layer, before in zip(self.backbone.layers, state, strict=True):
            hidden_STD, layer_state = layer(hidden_STD, before)
            after.append(layer_state)
        return F.linear(self.backbone.norm_f(hidden_STD), embedding.weight), after

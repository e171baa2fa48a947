"""Mamba-2, forward, a packed step at a time with its state carried on: the network on the operators of kernels/.

Dao and Gu, *Transformers are SSMs* (arXiv 2405.21060). Each layer adds to the residual stream, which is fp32, in its last product:

    stream -> norm -> in_proj -> z, xBC, dt        xBC -> conv, silu -> x, B, C -> ssd -> norm(y silu(z)) -> stream += y out_proj
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from longscan.kernels.checks import Backend, check_shape
from longscan.kernels.conv1d import causal_conv1d
from longscan.kernels.logprob import logprob
from longscan.kernels.norm import gated_rms_norm, rms_norm
from longscan.kernels.product import product
from longscan.kernels.segments import Segments
from longscan.kernels.ssd import ssd
from longscan.pipeline.errors import ModelError
from longscan.pipeline.model.config import Mamba2Geometry

GPU_ALIGNMENT = 8
"""cuBLAS falls to less than half its speed for a bf16 product whose width is no multiple of it."""
GPU_LINE = 64
"""A product's rows begin at multiples of so many elements, 128 bytes: cuBLAS stores them 5 % faster at 130m's shape."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """What every lane's document has left behind in every layer. A lane's own part is `[:, lane]` of each table (`Mamba2.lane`)."""

    tail: torch.Tensor
    """[layers, S, K - 1, C], the model's dtype: last inputs of each convolution, oldest first."""
    ssm: torch.Tensor
    """[layers, S, H, N, P], fp32."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights as the operators take them."""

    norm_D: torch.Tensor
    in_proj: torch.Tensor
    """[2I + 2GN + H, padded on a GPU, D]"""
    in_proj_bias: torch.Tensor | None
    conv_weight_CK: torch.Tensor
    conv_bias_C: torch.Tensor | None
    A_H: torch.Tensor
    dt_bias_H: torch.Tensor
    D_H: torch.Tensor
    gated_norm_I: torch.Tensor
    out_proj: torch.Tensor
    """[D, I]"""
    out_proj_bias: torch.Tensor | None


class Mamba2:
    """The network on one device. It holds weights only; all state is an argument and a result."""

    def __init__(
        self,
        geometry: Mamba2Geometry,
        weights: Mapping[str, torch.Tensor],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        backend: Backend,
        row_block: int | None = None,
        decay_scale: float = 1.0,
    ) -> None:
        """weights: as `longscan.pipeline.model.weights.load_weights` names them.

        dtype: of activations and products; state, norms, decays and time steps are fp32 (float64 where dtype is).
        row_block: rows of every product, so that a row's bits do not depend on the step's length; steps are multiples of it.
            None: whole steps, which a CPU computes row by row the same.
        decay_scale: factor of A in every layer; below 1 states forget more slowly.
        """
        self.geometry = geometry
        self.device = torch.device(device)
        self.dtype = dtype
        self.backend: Backend = backend
        self.row_block = row_block
        self.decay_scale = decay_scale
        self._wide = torch.promote_types(dtype, torch.float32)
        self._embedding_VD = weights["embedding"].to(self.device, dtype)
        self._head_VD = self._embedding_VD if geometry.tied else None
        if geometry.has_head and not geometry.tied:
            self._head_VD = weights["head"].to(self.device, dtype)
        self._final_norm_D = weights["final_norm"].to(self.device, self._wide)
        # On a GPU rounded up, by columns that are never read.
        on_gpu = self.device.type == "cuda"
        self._projected = geometry.projected + (-geometry.projected % GPU_ALIGNMENT if on_gpu else 0)
        self._pitch = geometry.projected + (-geometry.projected % GPU_LINE if on_gpu else 0)
        self._layers = tuple(self._layer(weights, f"layers.{layer}.") for layer in range(geometry.num_layers))

    def _layer(self, weights: Mapping[str, torch.Tensor], prefix: str) -> _Layer:
        def plain(name: str) -> torch.Tensor:
            return weights[prefix + name].to(self.device, self.dtype)

        def wide(name: str) -> torch.Tensor:
            return weights[prefix + name].to(self.device, self._wide)

        g = self.geometry
        spare = self._projected - g.projected
        return _Layer(
            norm_D=wide("norm"),
            # Nothing to add, nothing to copy: it is most of the model.
            in_proj=F.pad(plain("in_proj"), (0, 0, 0, spare)) if spare else plain("in_proj"),
            in_proj_bias=F.pad(plain("in_proj_bias"), (0, spare)) if g.use_bias else None,
            # As its kernel takes it, so that no step makes it anew: fp32, the taps one after the other.
            conv_weight_CK=wide("conv_weight").T.contiguous().T,
            conv_bias_C=wide("conv_bias") if g.use_conv_bias else None,
            A_H=-wide("A_log").exp() * self.decay_scale,
            dt_bias_H=wide("dt_bias"),
            D_H=wide("D"),
            gated_norm_I=wide("gated_norm"),
            out_proj=plain("out_proj"),
            out_proj_bias=plain("out_proj_bias") if g.use_bias else None,
        )

    @property
    def width(self) -> int:
        """D, the width of the hidden states."""
        return self.geometry.d_model

    def new_state(self, slots: int) -> ModelState:
        """Tables of `slots` lanes, all in the zero state."""
        g = self.geometry
        tail = torch.zeros((g.num_layers, slots, g.conv_kernel - 1, g.channels), dtype=self.dtype, device=self.device)
        ssm = torch.zeros((g.num_layers, slots, g.num_heads, g.state_size, g.head_dim), dtype=self._wide, device=self.device)
        return ModelState(tail, ssm)

    def state_norms(self, state: ModelState, lane: int) -> torch.Tensor:
        """[layers, H], float64: Frobenius norm of each head's state in a lane. One lane at a time: its bits know no other."""
        norms: torch.Tensor = torch.linalg.vector_norm(state.ssm[:, lane], dim=(2, 3), dtype=torch.float64)
        return norms

    def lane(self, state: ModelState, lane: int) -> dict[str, torch.Tensor]:
        """Views of a lane's own part of each table."""
        return {"tail": state.tail[:, lane], "ssm": state.ssm[:, lane]}

    def step(self, ids_T: torch.Tensor, segments: Segments, state: ModelState) -> tuple[torch.Tensor, ModelState]:
        """Run the packed `segments` through all layers.

        ids_T: [T], int32 or int64: token ids; rows of padding hold any valid id.
        state: updated in place at each entry's lane_out, and returned.

        Returns hidden_TD [T, D] after the final norm, in the model's dtype. Raises ValueError on shapes that do not fit.
        """
        check_shape("ids_T", ids_T, (segments.num_rows,))
        if self.row_block and segments.num_rows % self.row_block:
            raise ValueError(f"segments.num_rows: expected a multiple of row_block {self.row_block}, got {segments.num_rows}")
        stream_TD = F.embedding(ids_T, self._embedding_VD)
        # One memory for all layers: on a CPU fresh pages for a tensor of this size cost as much as the work on it.
        projected = stream_TD.new_empty(len(stream_TD), self._pitch)[:, : self._projected]
        for layer, tail_SKC, ssm_SHNP in zip(self._layers, state.tail, state.ssm, strict=True):
            normed_TD, stream_TD = self._norm(stream_TD, layer.norm_D)
            self._product(normed_TD, layer.in_proj, layer.in_proj_bias, projected)
            y_TI = self._mix(layer, projected, tail_SKC, ssm_SHNP, segments)
            # Summed in the stream's dtype: what a layer adds is never rounded to the model's.
            self._product(y_TI, layer.out_proj, layer.out_proj_bias, stream_TD, add=True)
        hidden_TD, _ = self._norm(stream_TD, self._final_norm_D)
        return hidden_TD, state

    def _norm(self, stream_TD: torch.Tensor, weight_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm in the model's dtype, and the stream in fp32, which it is from the first layer on."""
        return rms_norm(stream_TD, weight_D, eps=self.geometry.eps, out_dtype=self.dtype, backend=self.backend)

    def _mix(
        self, layer: _Layer, projected: torch.Tensor, tail_SKC: torch.Tensor, ssm_SHNP: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        """[T, I]: the mixer between its two projections."""
        g = self.geometry
        z_TI, xbc_TC, dt_TH = projected[:, : g.projected].split([g.inner, g.channels, g.num_heads], dim=1)
        xbc_TC, _ = causal_conv1d(
            xbc_TC, layer.conv_weight_CK, layer.conv_bias_C, tail_SKC=tail_SKC, segments=segments, backend=self.backend
        )
        x_TI, b_TGN, c_TGN = xbc_TC.split([g.inner, g.num_groups * g.state_size, g.num_groups * g.state_size], dim=1)
        y_THP, _ = ssd(
            x_TI.unflatten(1, (g.num_heads, g.head_dim)),
            dt_TH,
            layer.A_H,
            b_TGN.unflatten(1, (g.num_groups, g.state_size)),
            c_TGN.unflatten(1, (g.num_groups, g.state_size)),
            D_H=layer.D_H,
            dt_bias_H=layer.dt_bias_H,
            dt_limit=g.dt_limit,
            ssm_SHNP=ssm_SHNP,
            segments=segments,
            backend=self.backend,
        )
        return gated_rms_norm(
            y_THP.flatten(1),
            z_TI,
            layer.gated_norm_I,
            groups=g.num_groups,
            eps=g.eps,
            norm_before_gate=g.norm_before_gate,
            backend=self.backend,
        )

    def _product(
        self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, out_TN: torch.Tensor, *, add: bool = False
    ) -> None:
        """A product of each `row_block` rows."""
        rows = self.row_block or len(x_TK)
        for x, out in zip(x_TK.split(rows), out_TN.split(rows), strict=True):
            product(x, weight_NK, bias_N, out_TN=out, add=add, backend=self.backend)

    def logprobs(self, hidden_TD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        """[T], fp32: log-probability of each row's target, the next token; NaN where the target is -1.

        hidden_TD: as `step` returned it. Raises ModelError where the checkpoint has no output projection.
        """
        if self._head_VD is None:
            raise ModelError(
                "scores: expected a checkpoint with an output projection (lm_head.weight, or tie_word_embeddings), found a base model"
                " without one. Run task=embed, or use the checkpoint of the language model."
            )
        return logprob(hidden_TD, self._head_VD, targets_T, backend=self.backend)

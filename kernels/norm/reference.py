"""The norms in plain PyTorch, anywhere: the product's path on a CPU, and on a GPU that cuTile does not support.

Without gradients they go through chunks of rows that stay in the cache. A row's bits do not depend on the other rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from longscan.kernels.blocks import row_chunks
from longscan.kernels.elementwise import VECTOR, silu_


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, *, residual_TD: torch.Tensor | None, eps: float, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `longscan.kernels.norm.rms_norm`; computes in fp32 at least. Gradients flow where they are recorded."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    if torch.is_grad_enabled() and _any_gradient(x_TD, weight_D, residual_TD):
        residual_TD = x_TD.to(wide) if residual_TD is None else residual_TD + x_TD
        return (residual_TD * _scale(residual_TD, eps) * weight_D).to(out_dtype), residual_TD
    added_TD = None if residual_TD is None else x_TD
    residual_TD = x_TD.to(wide) if residual_TD is None else residual_TD
    y_TD = torch.empty_like(x_TD, dtype=out_dtype, memory_format=torch.contiguous_format)
    for rows in row_chunks(len(x_TD), 3 * x_TD.shape[1] * residual_TD.element_size(), x_TD.device):
        chunk_TD = residual_TD[rows]
        if added_TD is not None:
            chunk_TD.add_(added_TD[rows])
        if out_dtype == wide:
            torch.mul(chunk_TD, _scale(chunk_TD, eps), out=y_TD[rows]).mul_(weight_D)
        else:
            y_TD[rows] = (chunk_TD * _scale(chunk_TD, eps)).mul_(weight_D)
    return y_TD, residual_TD


def gated_rms_norm(
    x_TI: torch.Tensor, z_TI: torch.Tensor, weight_I: torch.Tensor, *, groups: int, eps: float, norm_before_gate: bool
) -> torch.Tensor:
    """As `longscan.kernels.norm.gated_rms_norm`; computes in fp32 at least. Gradients flow where they are recorded."""
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    weight_I = weight_I.to(wide)
    if torch.is_grad_enabled() and _any_gradient(x_TI, z_TI, weight_I):
        gate_TI = F.silu(z_TI.to(wide))
        inner_TGI = (x_TI.to(wide) if norm_before_gate else x_TI * gate_TI).view(len(x_TI), groups, x_TI.shape[1] // groups)
        y_TI = (inner_TGI * _scale(inner_TGI, eps)).flatten(1) * weight_I
        return (y_TI * gate_TI if norm_before_gate else y_TI).to(x_TI.dtype)
    y_TI = torch.empty_like(x_TI, memory_format=torch.contiguous_format)
    for rows in row_chunks(len(x_TI), 4 * x_TI.shape[1] * weight_I.element_size(), x_TI.device):
        _gated_chunk(y_TI[rows], x_TI[rows], _gate(z_TI[rows], wide), weight_I, groups, eps, norm_before_gate)
    return y_TI


def _any_gradient(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which is kept."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (norm.square() / x.shape[-1] + eps).rsqrt()


def _gate(z_TI: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """silu(z), fresh."""
    whole = -(-len(z_TI) // VECTOR) * VECTOR
    gate_TI = z_TI.new_empty(whole, z_TI.shape[1], dtype=wide)
    gate_TI[: len(z_TI)] = z_TI
    gate_TI[len(z_TI) :] = 0
    return silu_(gate_TI)[: len(z_TI)]


def _gated_chunk(
    y_TI: torch.Tensor,
    x_TI: torch.Tensor,
    gate_TI: torch.Tensor,
    weight_I: torch.Tensor,
    groups: int,
    eps: float,
    norm_before_gate: bool,
) -> None:
    """Rows of the gated norm into y_TI; `gate_TI` is used up."""
    inner_TI = x_TI.to(gate_TI.dtype, copy=True, memory_format=torch.contiguous_format) if norm_before_gate else gate_TI.mul_(x_TI)
    inner_TGI = inner_TI.view(len(inner_TI), groups, inner_TI.shape[1] // groups)
    inner_TGI.mul_(_scale(inner_TGI, eps))
    if norm_before_gate:
        inner_TI.mul_(gate_TI)
    if y_TI.dtype == weight_I.dtype:
        torch.mul(inner_TI, weight_I, out=y_TI)
    else:
        y_TI.copy_(inner_TI.mul_(weight_I))

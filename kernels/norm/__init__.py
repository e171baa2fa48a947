"""Root mean square norms: of the residual stream, and of the mixer's gated output. Row by row, so they need no segments.

Zhang and Sennrich, *Root Mean Square Layer Normalization* (arXiv 1910.07467); the gate as in Mamba-2 (arXiv 2405.21060).
"""

from __future__ import annotations

import torch
from longscan.kernels.checks import Backend, check_backend, check_float, check_like, check_rank, check_shape


def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    *,
    residual_TD: torch.Tensor | None = None,
    eps: float,
    out_dtype: torch.dtype | None = None,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream in fp32 and normalise the sum.

    x_TD: [T, D]: what the last layer adds; the stream itself where no residual is given.
    weight_D: [D], x's dtype or fp32.
    residual_TD: [T, D], fp32. It is handed over: unless gradients are recorded, the new residual takes its memory.
    eps: added to the mean of the squares.
    out_dtype: of y; x's when None.

    Returns y_TD = residual / sqrt(mean(residual^2) + eps) * weight, and the new residual_TD in fp32 (x itself, not a copy,
    where x is fp32 and comes alone).

    Raises ValueError with name, expected and got where an argument does not fit.
    """
    check_rank("x_TD", x_TD, "TD")
    check_float("x_TD", x_TD)
    check_shape("weight_D", weight_D, x_TD.shape[1:])
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    check_like("weight_D", weight_D, x_TD, x_TD.dtype, wide)
    if residual_TD is not None:
        check_shape("residual_TD", residual_TD, x_TD.shape)
        check_like("residual_TD", residual_TD, x_TD, wide)
    check_backend(backend, x_TD)
    out_dtype = x_TD.dtype if out_dtype is None else out_dtype
    if not out_dtype.is_floating_point:
        raise ValueError(f"out_dtype: expected a floating-point dtype, got {out_dtype}")
    if backend == "cutile":
        from longscan.kernels.norm import cutile

        return cutile.rms_norm(x_TD, weight_D, residual_TD=residual_TD, eps=eps, out_dtype=out_dtype)
    from longscan.kernels.norm import reference

    return reference.rms_norm(x_TD, weight_D, residual_TD=residual_TD, eps=eps, out_dtype=out_dtype)


def gated_rms_norm(
    x_TI: torch.Tensor,
    z_TI: torch.Tensor,
    weight_I: torch.Tensor,
    *,
    groups: int,
    eps: float,
    norm_before_gate: bool = False,
    backend: Backend,
) -> torch.Tensor:
    """Gate x with silu(z) and normalise each group of I / groups channels on its own, in fp32.

    x_TI, z_TI: [T, I], one dtype: the mixer's output and its gate; both may be strided views, with their last axis dense.
    weight_I: [I], x's dtype or fp32.
    groups: number of groups, divides I.
    norm_before_gate: norm(x) * weight * silu(z) instead of norm(x * silu(z)) * weight.

    Returns y_TI [T, I] in x's dtype.

    Raises ValueError with name, expected and got where an argument does not fit.
    """
    check_rank("x_TI", x_TI, "TI")
    check_float("x_TI", x_TI)
    check_shape("z_TI", z_TI, x_TI.shape)
    check_like("z_TI", z_TI, x_TI)
    check_shape("weight_I", weight_I, x_TI.shape[1:])
    check_like("weight_I", weight_I, x_TI, x_TI.dtype, torch.promote_types(x_TI.dtype, torch.float32))
    if groups < 1 or x_TI.shape[1] % groups:
        raise ValueError(f"groups: expected a divisor of {x_TI.shape[1]} (I), got {groups}")
    check_backend(backend, x_TI)
    if backend == "cutile":
        from longscan.kernels.norm import cutile

        return cutile.gated_rms_norm(x_TI, z_TI, weight_I, groups=groups, eps=eps, norm_before_gate=norm_before_gate)
    from longscan.kernels.norm import reference

    return reference.gated_rms_norm(x_TI, z_TI, weight_I, groups=groups, eps=eps, norm_before_gate=norm_before_gate)

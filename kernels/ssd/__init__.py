"""The state space duality (SSD) of Mamba-2: a linear recurrence over each document's tokens, its state carried on.

Dao and Gu, *Transformers are SSMs* (arXiv 2405.21060), section 6. For each head, with S the state in [N, P]:

    dt_t = clamp(softplus(raw_t + bias), dt_limit)
    S_t  = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T
    y_t  = C_t^T S_t + D x_t                      (then times silu(z_t), where z is given)
"""

from __future__ import annotations

import math

import torch
from longscan.kernels.checks import Backend, check_backend, check_float, check_lanes, check_like, check_rank, check_shape
from longscan.kernels.segments import Segments


def ssd(
    x_THP: torch.Tensor,
    dt_TH: torch.Tensor,
    A_H: torch.Tensor,
    B_TGN: torch.Tensor,
    C_TGN: torch.Tensor,
    *,
    D_H: torch.Tensor | None = None,
    dt_bias_H: torch.Tensor | None = None,
    z_THP: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    ssm_SHNP: torch.Tensor,
    segments: Segments,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over the packed `segments`.

    x_THP: [T, H, P]: the heads' inputs. Like dt, B, C and z it may be a strided view, with its last axis dense.
    dt_TH: [T, H], x's dtype or fp32: raw time steps, before bias and softplus.
    A_H: [H], fp32, negative: decay rates.
    B_TGN, C_TGN: [T, G, N], x's dtype: what is written to the state and how it is read; a group is H / G consecutive heads.
    D_H, dt_bias_H: [H], fp32: skip weight; bias of the time steps.
    z_THP: [T, H, P], x's dtype: gate.
    dt_limit: bounds of the time step after softplus.
    ssm_SHNP: [S, H, N, P], fp32: table of states. Entries read slot `lane_in` and write slot `lane_out`, in place; where
        gradients are recorded the table handed in stays as it is and the one returned is new.

    Returns y_THP [T, H, P] in x's dtype and the table of states. Rows of padding hold finite numbers of no meaning, rows of
    tiles that belong to no entry hold zeros; neither they nor what the inputs hold there reach any state or any real row.

    Raises ValueError with name, expected and got where an argument does not fit.
    """
    _check(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, dt_bias_H, z_THP, dt_limit, ssm_SHNP, segments)
    check_backend(backend, x_THP)
    if backend == "cutile":
        from longscan.kernels.ssd import cutile

        launch = cutile.ssd
    else:
        from longscan.kernels.ssd import reference

        launch = reference.ssd
    return launch(
        x_THP,
        dt_TH,
        A_H,
        B_TGN,
        C_TGN,
        D_H=D_H,
        dt_bias_H=dt_bias_H,
        z_THP=z_THP,
        dt_limit=dt_limit,
        ssm_SHNP=ssm_SHNP,
        segments=segments,
    )


def _check(
    x_THP: torch.Tensor,
    dt_TH: torch.Tensor,
    A_H: torch.Tensor,
    B_TGN: torch.Tensor,
    C_TGN: torch.Tensor,
    D_H: torch.Tensor | None,
    dt_bias_H: torch.Tensor | None,
    z_THP: torch.Tensor | None,
    dt_limit: tuple[float, float],
    ssm_SHNP: torch.Tensor,
    segments: Segments,
) -> None:
    check_rank("x_THP", x_THP, "THP")
    check_rank("B_TGN", B_TGN, "TGN")
    check_rank("ssm_SHNP", ssm_SHNP, "SHNP")
    check_float("x_THP", x_THP)
    _, H, P = x_THP.shape
    _, G, N = B_TGN.shape
    T = segments.num_rows
    if G < 1 or H % G:
        raise ValueError(f"B_TGN: expected a number of groups G that divides the {H} heads, got {G}")
    for name, tensor, shape in (
        ("x_THP", x_THP, (T, H, P)),
        ("dt_TH", dt_TH, (T, H)),
        ("A_H", A_H, (H,)),
        ("B_TGN", B_TGN, (T, G, N)),
        ("C_TGN", C_TGN, (T, G, N)),
        ("D_H", D_H, (H,)),
        ("dt_bias_H", dt_bias_H, (H,)),
        ("z_THP", z_THP, (T, H, P)),
        ("ssm_SHNP", ssm_SHNP, (ssm_SHNP.shape[0], H, N, P)),
    ):
        if tensor is not None:
            check_shape(name, tensor, shape)
    wide = torch.promote_types(x_THP.dtype, torch.float32)
    check_like("dt_TH", dt_TH, x_THP, x_THP.dtype, wide)
    for name, tensor in (("B_TGN", B_TGN), ("C_TGN", C_TGN), ("z_THP", z_THP)):
        if tensor is not None:
            check_like(name, tensor, x_THP)
    for name, tensor in (("A_H", A_H), ("D_H", D_H), ("dt_bias_H", dt_bias_H), ("ssm_SHNP", ssm_SHNP)):
        if tensor is not None:
            check_like(name, tensor, x_THP, wide)
    if not 0.0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit: expected 0 <= low <= high, got {dt_limit}")
    check_lanes("ssm_SHNP", ssm_SHNP, segments)

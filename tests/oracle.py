"""The truth: Mamba-2's operators token by token in float64, one document at a time, as the equations say them.

Nothing here is fast, clever or shared with the product. Every test of ssd, conv1d, norm and of the model takes it from here.
"""

from __future__ import annotations

import math

import torch


def _f64(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", torch.float64)


def ssd_recurrence(
    x_LHP: torch.Tensor,
    dt_LH: torch.Tensor,
    A_H: torch.Tensor,
    B_LGN: torch.Tensor,
    C_LGN: torch.Tensor,
    state_HNP: torch.Tensor | None = None,
    *,
    D_H: torch.Tensor | None = None,
    dt_bias_H: torch.Tensor | None = None,
    z_LHP: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[torch.Tensor, torch.Tensor]:
    """L tokens of one document from `state_HNP` (zero when None). Returns y_LHP and the final state, float64, on the CPU."""
    x, dt, A, B, C = (tensor.detach().to("cpu", torch.float64) for tensor in (x_LHP, dt_LH, A_H, B_LGN, C_LGN))
    (L, H, P), (_, G, N) = x.shape, B.shape
    B, C = B.repeat_interleave(H // G, dim=1), C.repeat_interleave(H // G, dim=1)
    D, bias, z, state = _f64(D_H), _f64(dt_bias_H), _f64(z_LHP), _f64(state_HNP)
    if bias is not None:
        dt = dt + bias
    dt = torch.logaddexp(dt, torch.zeros((), dtype=torch.float64)).clamp(*dt_limit)
    state = torch.zeros(H, N, P, dtype=torch.float64) if state is None else state.clone()
    y = torch.empty_like(x)
    for t in range(L):
        state = torch.exp(dt[t] * A)[:, None, None] * state + dt[t][:, None, None] * B[t][:, :, None] * x[t][:, None, :]
        y[t] = torch.einsum("hn,hnp->hp", C[t], state)
        if D is not None:
            y[t] += D[:, None] * x[t]
    if z is not None:
        y = y * z / (1.0 + torch.exp(-z))
    return y, state


def causal_conv(
    x_LC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    tail_KC: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """L tokens of one document after `tail_KC`, its last K - 1 inputs (zero when None). Returns y_LC and the new tail, float64."""
    x, weight = x_LC.detach().to("cpu", torch.float64), weight_CK.detach().to("cpu", torch.float64)
    (C, K), bias, tail = weight.shape, _f64(bias_C), _f64(tail_KC)
    past = [torch.zeros(C, dtype=torch.float64)] * (K - 1) if tail is None else list(tail)
    outputs = []
    for row in x:
        past.append(row)
        y = torch.zeros(C, dtype=torch.float64) if bias is None else bias.clone()
        for k in range(K):
            y += weight[:, k] * past[len(past) - K + k]
        outputs.append(y / (1.0 + torch.exp(-y)) if activation == "silu" else y)
    return torch.stack(outputs), torch.stack(past[len(past) - (K - 1) :]) if K > 1 else torch.zeros(0, C, dtype=torch.float64)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, float64."""
    x, weight = x_TD.detach().to("cpu", torch.float64), weight_D.detach().to("cpu", torch.float64)
    return torch.stack([row / math.sqrt(float(row @ row) / len(row) + eps) * weight for row in x])


def gated_rms_norm(
    x_TI: torch.Tensor, z_TI: torch.Tensor, weight_I: torch.Tensor, *, groups: int, eps: float, norm_before_gate: bool = False
) -> torch.Tensor:
    """The mixer's norm, each of `groups` equal parts of a row on its own, float64."""
    x, z, weight = (tensor.detach().to("cpu", torch.float64) for tensor in (x_TI, z_TI, weight_I))
    gate = z / (1.0 + torch.exp(-z))
    width = x.shape[1] // groups
    inner = x if norm_before_gate else x * gate
    parts = [rms_norm(inner[:, i : i + width], weight[i : i + width], eps) for i in range(0, x.shape[1], width)]
    y = torch.cat(parts, dim=1)
    return y * gate if norm_before_gate else y

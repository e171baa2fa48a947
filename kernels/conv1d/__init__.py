"""The short causal convolution of Mamba-2: each channel's last K inputs, weighed, with what a document left before it.

    y_t = activation(bias + sum_k weight_k x_{t-K+1+k}),  k = 0 .. K-1

Inputs before an entry's first token come from its lane's tail; before a document's start they are zero.
"""

from __future__ import annotations

from typing import Literal

import torch
from longscan.kernels.checks import Backend, check_backend, check_float, check_lanes, check_like, check_rank, check_shape
from longscan.kernels.segments import Segments


def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    *,
    tail_SKC: torch.Tensor,
    segments: Segments,
    backend: Backend,
    activation: Literal["silu"] | None = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve every channel along the packed `segments`.

    x_TC: [T, C]: inputs; it may be a strided view, with its last axis dense.
    weight_CK: [C, K], x's dtype or fp32: taps, the last one for the token itself.
    bias_C: [C], the taps' dtype, or None.
    tail_SKC: [S, K - 1, C], x's dtype: table of the last inputs of each lane, oldest first. Entries read slot `lane_in` and
        write slot `lane_out`, in place; where gradients are recorded the table handed in stays as it is and the one returned is new.
    activation: "silu" or None.

    Returns y_TC [T, C] in x's dtype and the table of tails. Rows of padding hold finite numbers of no meaning, rows of tiles
    that belong to no entry hold zeros; neither they nor what x holds there reach any tail or any real row.

    Raises ValueError with name, expected and got where an argument does not fit.
    """
    _check(x_TC, weight_CK, bias_C, tail_SKC, segments, activation)
    check_backend(backend, x_TC)
    if backend == "cutile":
        from longscan.kernels.conv1d import cutile

        return cutile.causal_conv1d(x_TC, weight_CK, bias_C, tail_SKC=tail_SKC, segments=segments, activation=activation)
    from longscan.kernels.conv1d import reference

    return reference.causal_conv1d(x_TC, weight_CK, bias_C, tail_SKC=tail_SKC, segments=segments, activation=activation)


def _check(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    tail_SKC: torch.Tensor,
    segments: Segments,
    activation: str | None,
) -> None:
    check_rank("x_TC", x_TC, "TC")
    check_rank("weight_CK", weight_CK, "CK")
    check_rank("tail_SKC", tail_SKC, "SKC")
    check_float("x_TC", x_TC)
    C, K = x_TC.shape[1], weight_CK.shape[1]
    if K < 1:
        raise ValueError(f"weight_CK: expected at least one tap, got shape {list(weight_CK.shape)}")
    check_shape("x_TC", x_TC, (segments.num_rows, C))
    check_shape("weight_CK", weight_CK, (C, K))
    check_shape("tail_SKC", tail_SKC, (tail_SKC.shape[0], K - 1, C))
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    check_like("weight_CK", weight_CK, x_TC, x_TC.dtype, wide)
    check_like("tail_SKC", tail_SKC, x_TC)
    if bias_C is not None:
        check_shape("bias_C", bias_C, (C,))
        check_like("bias_C", bias_C, weight_CK)
    if activation not in ("silu", None):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
    check_lanes("tail_SKC", tail_SKC, segments)

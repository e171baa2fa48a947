"""logprob: how likely each row's target token is, without ever holding [tokens, vocabulary].

logprob_t = l_t[target_t] - log sum_v exp(l_t[v])        l_t = hidden_t . weight^T, fp32, natural logarithm
"""

from __future__ import annotations

from typing import Literal

import torch

UNWANTED = -1
"""As a target: the row is not wanted, its result is NaN."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def logprob(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, *, backend: Literal["torch", "cutile"]
) -> torch.Tensor:
    """Log-probabilities of the targets under softmax(hidden @ weight^T).

    hidden_TD: [T, D], fp32, bf16 or fp16: hidden states after the final norm.
    weight_VD: [V, D], the same dtype: the output projection, all of whose rows take part, padded ones too.
    targets_T: [T], int32 or int64: the token to score in each row, -1 where none is wanted.

    Returns [T], fp32, NaN where the target is -1. A row's bits depend neither on its place nor on the other rows.
    Raises ValueError on shapes and dtypes that do not fit and, on a CPU, on targets outside of [-1, V).
    """
    _check(hidden_TD, weight_VD, targets_T)
    if backend == "torch":
        from longscan.kernels.logprob import reference

        return reference.logprob(hidden_TD, weight_VD, targets_T)
    if backend == "cutile":
        from longscan.kernels.logprob import cutile

        result: torch.Tensor = cutile.logprob(hidden_TD, weight_VD, targets_T)
        return result
    raise ValueError(f"backend: expected torch or cutile, got {backend}")


def _check(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor) -> None:
    if hidden_TD.ndim != 2:
        raise ValueError(f"hidden_TD: expected [T, D], got {list(hidden_TD.shape)}")
    if hidden_TD.dtype not in DTYPES:
        raise ValueError(f"hidden_TD: expected fp32, bf16 or fp16, got {hidden_TD.dtype}")
    if weight_VD.ndim != 2 or weight_VD.shape[1] != hidden_TD.shape[1] or weight_VD.dtype != hidden_TD.dtype:
        expected = f"[V, {hidden_TD.shape[1]}], {hidden_TD.dtype}"
        raise ValueError(f"weight_VD: expected {expected}, got {list(weight_VD.shape)}, {weight_VD.dtype}")
    if targets_T.shape != hidden_TD.shape[:1] or targets_T.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"targets_T: expected [{hidden_TD.shape[0]}], int32 or int64, got {list(targets_T.shape)}, {targets_T.dtype}")
    # On a GPU this would make the host wait for the device.
    if targets_T.device.type == "cpu" and targets_T.numel():
        low, high = int(targets_T.min()), int(targets_T.max())
        if low < UNWANTED or high >= weight_VD.shape[0]:
            raise ValueError(f"targets_T: expected values of -1 to {weight_VD.shape[0] - 1}, got {low} to {high}")

"""logprob: how likely each row's target token is, without ever holding [tokens, vocabulary].

logprob_t = l_t[target_t] - log sum_v exp(l_t[v])        l_t = hidden_t . weight^T, fp32, natural logarithm
"""

from __future__ import annotations

import torch
from longscan.kernels.checks import Backend, check_backend, check_float, check_like, check_rank, check_shape

UNWANTED = -1
"""As a target: the row is not wanted, its result is NaN."""


def logprob(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, *, backend: Backend) -> torch.Tensor:
    """Log-probabilities of the targets under softmax(hidden @ weight^T).

    hidden_TD: [T, D]: hidden states after the final norm.
    weight_VD: [V, D], hidden's dtype: the output projection, all of whose rows take part, padded ones too.
    targets_T: [T], int32 or int64: the token to score in each row, -1 where none is wanted.

    Returns [T], fp32, NaN where the target is -1 or the hidden state is not finite. A row's bits depend neither on its place nor on the
    other rows.
    Raises ValueError on shapes and dtypes that do not fit and, on a CPU, on targets outside of [-1, V).
    """
    _check(hidden_TD, weight_VD, targets_T)
    check_backend(backend, hidden_TD)
    if backend == "cutile":
        from longscan.kernels.logprob import cutile

        return cutile.logprob(hidden_TD, weight_VD, targets_T)
    from longscan.kernels.logprob import reference

    return reference.logprob(hidden_TD, weight_VD, targets_T)


def _check(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor) -> None:
    check_rank("hidden_TD", hidden_TD, "TD")
    check_rank("weight_VD", weight_VD, "VD")
    check_float("hidden_TD", hidden_TD)
    check_shape("weight_VD", weight_VD, (weight_VD.shape[0], hidden_TD.shape[1]))
    check_like("weight_VD", weight_VD, hidden_TD)
    check_shape("targets_T", targets_T, hidden_TD.shape[:1])
    check_like("targets_T", targets_T, hidden_TD, torch.int32, torch.int64)
    # On a GPU this would make the host wait for the device.
    if targets_T.device.type == "cpu" and targets_T.numel():
        low, high = int(targets_T.min()), int(targets_T.max())
        if low < UNWANTED or high >= weight_VD.shape[0]:
            raise ValueError(f"targets_T: expected values from -1 to {weight_VD.shape[0] - 1}, got {low} to {high}")

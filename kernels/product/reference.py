"""The product as PyTorch makes it: anywhere, and on a GPU by what cuBLAS itself thinks best."""

from __future__ import annotations

import torch


def product(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, *, out_TN: torch.Tensor, add: bool) -> None:
    """As `longscan.kernels.product.product`."""
    weight_KN = weight_NK.T
    if not add:
        if bias_N is None:
            torch.mm(x_TK, weight_KN, out=out_TN)
        else:
            torch.addmm(bias_N, x_TK, weight_KN, out=out_TN)
        return
    if bias_N is not None:
        out_TN += bias_N
    if x_TK.dtype == out_TN.dtype:
        torch.addmm(out_TN, x_TK, weight_KN, out=out_TN)
    elif x_TK.is_cuda:
        torch.addmm(out_TN, x_TK, weight_KN, out_dtype=out_TN.dtype, out=out_TN)
    else:  # PyTorch has no such product on a CPU
        out_TN += torch.mm(x_TK, weight_KN)

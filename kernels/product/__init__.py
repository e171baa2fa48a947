"""product: a layer's dense projections, into rows that may be wider apart than they are long, or on top of the residual stream in fp32.

out = x W^T + bias        with add: out += x W^T + bias
"""

from __future__ import annotations

import torch
from longscan.kernels.checks import Backend, check_backend, check_float, check_like, check_rank, check_shape


def product(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    out_TN: torch.Tensor,
    add: bool = False,
    backend: Backend,
) -> None:
    """Write x @ weight^T + bias to `out_TN`, or add it there.

    x_TK: [T, K], any float, its last axis dense; a step's rows.
    weight_NK: [N, K], x's dtype, dense.
    bias_N: [N], x's dtype, or None.
    out_TN: [T, N], its last axis dense: x's dtype; with add also fp32, and then the sum is made in it, and x @ weight^T is never rounded to
        x's dtype (on a GPU; a CPU has no such product).
    backend: cutile: by cuBLAS with what the tuning table says of this GPU; torch: with what PyTorch has it choose.

    Bits depend on T as well: products of equal rows are equal where the steps are equally long.
    Raises ValueError with name, expected and got where an argument does not fit.
    """
    check_rank("x_TK", x_TK, "TK")
    check_float("x_TK", x_TK)
    check_shape("weight_NK", weight_NK, (weight_NK.shape[0], x_TK.shape[1]))
    check_like("weight_NK", weight_NK, x_TK)
    check_shape("out_TN", out_TN, (x_TK.shape[0], weight_NK.shape[0]))
    check_like("out_TN", out_TN, x_TK, *((x_TK.dtype, torch.float32) if add else (x_TK.dtype,)))
    if bias_N is not None:
        check_shape("bias_N", bias_N, weight_NK.shape[:1])
        check_like("bias_N", bias_N, x_TK)
    check_backend(backend, x_TK)
    if backend == "cutile" and bias_N is None:
        from longscan.kernels.product import cublas

        if cublas.product(x_TK, weight_NK, out_TN=out_TN, add=add):
            return
    from longscan.kernels.product import reference

    reference.product(x_TK, weight_NK, bias_N, out_TN=out_TN, add=add)

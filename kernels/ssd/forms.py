"""The forms of the SSD's arguments that its CUDA Tile kernels take; the PyTorch path takes every one."""

from __future__ import annotations

import torch

DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (32, 64, 128)
"""P, of heads."""
STATE_SIZES = (16, 64, 128, 256)
"""N."""


def check_form(x_THP: torch.Tensor, B_TGN: torch.Tensor, C_TGN: torch.Tensor, z_THP: torch.Tensor | None, ssm_SHNP: torch.Tensor) -> None:
    """Raises ValueError, with name, expected and got, where the kernels do not take arguments that the operator allows."""
    for name, tensor, sizes in (
        ("x_THP", x_THP, WIDTHS),
        ("B_TGN", B_TGN, STATE_SIZES),
        ("C_TGN", C_TGN, STATE_SIZES),
        ("z_THP", z_THP, WIDTHS),
    ):
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: expected bfloat16 or float16 on cutile, got {tensor.dtype}; use the torch backend")
        if tensor.shape[2] not in sizes:
            raise ValueError(f"{name}: expected a last axis of {sizes} on cutile, got {tensor.shape[2]}; use the torch backend")
        if tensor.stride()[1:] != (tensor.shape[2], 1) or tensor.stride(0) % 8 or tensor.storage_offset() % 8:
            expected = f"strides (a multiple of 8, {tensor.shape[2]}, 1) and an offset that is a multiple of 8 on cutile"
            raise ValueError(f"{name}: expected {expected}, got strides {tensor.stride()} at {tensor.storage_offset()}")
    if not ssm_SHNP.is_contiguous():
        raise ValueError(f"ssm_SHNP: expected a contiguous table on cutile, got strides {ssm_SHNP.stride()}")
    for name, tensor in (("x_THP", x_THP), ("B_TGN", B_TGN), ("ssm_SHNP", ssm_SHNP)):
        reach = sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if reach >= 2**31:
            raise ValueError(f"{name}: expected less than 2^31 elements from first to last on cutile, got {reach}; use smaller steps")

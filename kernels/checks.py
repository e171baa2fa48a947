"""What every operator asks of its arguments: shapes by letter, dtypes, devices and lanes, told as name, expected, got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from longscan.kernels.segments import Segments

MAY_BE_EMPTY = "TSK"
"""Letters of axes that may have no length: rows, slots, and the inputs that a convolution of one tap keeps."""

Backend = Literal["torch", "cutile"]
"""Which implementation an operator calls: plain PyTorch, anywhere, or the CUDA Tile kernels, on a GPU."""


def check_backend(backend: str, tensor: torch.Tensor) -> None:
    """Raise ValueError where `backend` is unknown, or is cutile for a tensor that is on no GPU."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend: expected one of {get_args(Backend)}, got {backend!r}")
    if backend == "cutile" and tensor.device.type != "cuda":
        raise ValueError(f"backend: expected 'torch' for tensors on {tensor.device.type}, got 'cutile', which needs a CUDA device")


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int]) -> None:
    """Raise ValueError unless `tensor` has exactly the shape `expected`: nothing broadcasts."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name}: expected shape {list(expected)}, got {list(tensor.shape)}")


def check_rank(name: str, tensor: torch.Tensor, letters: str) -> None:
    """Raise ValueError unless `tensor` has one axis for each of `letters`, and none of them is empty but those that may be."""
    if tensor.ndim != len(letters):
        raise ValueError(f"{name}: expected {len(letters)} axes [{', '.join(letters)}], got shape {list(tensor.shape)}")
    for letter, side in zip(letters, tensor.shape, strict=True):
        if side == 0 and letter not in MAY_BE_EMPTY:
            raise ValueError(f"{name}: expected {letter} to be at least 1, got shape {list(tensor.shape)}")


def check_like(name: str, tensor: torch.Tensor, like: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `tensor` is on the device of `like` and has one of `dtypes` (none given: the dtype of `like`)."""
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, got {tensor.device}")
    allowed = dtypes or (like.dtype,)
    if tensor.dtype not in allowed:
        raise ValueError(f"{name}: expected dtype {' or '.join(str(dtype) for dtype in allowed)}, got {tensor.dtype}")


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless `tensor` holds floating-point numbers."""
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"{name}: expected a floating-point dtype, got {tensor.dtype}")


def check_lanes(name: str, table: torch.Tensor, segments: Segments) -> None:
    """Raise ValueError where `segments` are on another device than `table`, or name a slot that `table`, slots first, does not have."""
    if segments.buffer.device != table.device:
        raise ValueError(f"segments: expected device {table.device}, as {name}, got {segments.buffer.device}")
    if segments.highest_lane >= table.shape[0]:
        raise ValueError(f"{name}: expected more than {segments.highest_lane} slots (the entries' highest lane), got {table.shape[0]}")

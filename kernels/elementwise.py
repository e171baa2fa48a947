"""Elementwise functions whose bits do not depend on where an element stands.

On a CPU PyTorch computes exp2 and silu with vector instructions, and the last few elements of each thread's share with scalar
ones that round differently. So an element's bits would depend on the size of the tensor and on the number of threads. Here the
functions are called on shares that are whole vectors for every thread. (exp, log, log1p, rsqrt and plain arithmetic need no such care.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

VECTOR = 32
"""fp32 elements of a turn of PyTorch's vector loop: two registers of AVX-512; fewer elsewhere, and a divisor of it."""
GRAIN = 32768
"""Elements below which PyTorch leaves a tensor to one thread (at::internal::GRAIN_SIZE)."""


def silu_(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)), in place. x: contiguous, a multiple of VECTOR elements."""
    return _in_shares(x, lambda share: F.silu(share, inplace=True))


def exp2_(x: torch.Tensor) -> torch.Tensor:
    """2 to the power of x, in place. x: contiguous, a multiple of VECTOR elements.

    Unlike PyTorch's exp on a CPU it is no slower where results vanish.
    """
    return _in_shares(x, lambda share: share.exp2_())


def softplus_(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), in place. x: contiguous, a multiple of VECTOR elements."""
    return _in_shares(x, lambda share: share.copy_(F.softplus(share)))


def _in_shares(x: torch.Tensor, function: Callable[[torch.Tensor], object]) -> torch.Tensor:
    flat = x.view(-1)
    if x.device.type != "cpu":
        function(flat)
        return x
    assert flat.numel() % VECTOR == 0, flat.shape
    start = 0
    while start < flat.numel():
        size = flat.numel() - start
        while size % (VECTOR * _threads(size)):
            size -= size % (VECTOR * _threads(size))
        function(flat[start : start + size])
        start += size
    return x


def _threads(size: int) -> int:
    """Threads among which PyTorch divides `size` elements, each but the last an equal share."""
    return min(torch.get_num_threads(), -(-size // GRAIN))

"""The parts of a stack of peers in plain PyTorch, the scan token by token: what their kernels compute, on any machine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from longscan.jobs.benchmark.stacks import Parts


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor | None, carried: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    before = x.new_zeros(len(x), weight.shape[1] - 1, x.shape[2]) if state is None else state
    x = torch.cat([before, x], 1)
    y = F.silu(F.conv1d(x.transpose(1, 2), weight[:, None], bias, groups=len(weight))).transpose(1, 2)
    return y, x[:, x.shape[1] - before.shape[1] :] if carried else None


def scan(*inputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, token by token."""
    given = [tensor for tensor in inputs[:7] if tensor is not None]
    x, dt, A, B, C, D, bias = (tensor.float() for tensor in given)
    step = F.softplus(dt + bias)
    heads = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(heads, 2), C.repeat_interleave(heads, 2)
    state = torch.zeros(len(x), x.shape[2], B.shape[3], x.shape[3]) if inputs[7] is None else inputs[7]
    outputs = []
    for t in range(x.shape[1]):
        written = torch.einsum("bhn,bhp->bhnp", B[:, t] * step[:, t, :, None], x[:, t])
        state = state * (step[:, t] * A).exp()[:, :, None, None] + written
        outputs.append(torch.einsum("bhn,bhnp->bhp", C[:, t], state) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1).to(given[0].dtype), state


def gate(y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, size: int, eps: float) -> torch.Tensor:
    gated = (y.float() * F.silu(z.float())).unflatten(-1, (-1, size))
    return (F.rms_norm(gated, (size,), eps=eps).flatten(-2) * weight).to(y.dtype)


def add_and_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    stream = x.float() if residual is None else residual + x
    return F.rms_norm(stream, weight.shape, weight, eps).to(x.dtype), stream


PLAIN = Parts(convolve, scan, gate, add_and_norm)

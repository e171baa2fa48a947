"""Whole networks in the benchmark: the stack of peers is the same network as longscan's, and no speed is told of another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from longscan.jobs.benchmark.layers import LOADS, Load, ModelRow, measure
from longscan.jobs.benchmark.stacks import GEOMETRIES, Parts, random_weights
from longscan.pipeline.model import Mamba2Geometry

TINY = Mamba2Geometry(100, 32, 2, num_heads=4, head_dim=16, num_groups=2, state_size=16, conv_kernel=4, tied=True)
LOAD = Load("two documents of 70", 2, 70, kept=False)


def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))
    return F.silu(y[:, :, : x.shape[1]]).transpose(1, 2)


def scan(*inputs: torch.Tensor) -> torch.Tensor:
    """The recurrence, token by token."""
    x, dt, A, B, C, D, bias = (tensor.float() for tensor in inputs)
    step = F.softplus(dt + bias)
    heads = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(heads, 2), C.repeat_interleave(heads, 2)
    state = torch.zeros(len(x), x.shape[2], B.shape[3], x.shape[3])
    outputs = []
    for t in range(x.shape[1]):
        written = torch.einsum("bhn,bhp->bhnp", B[:, t] * step[:, t, :, None], x[:, t])
        state = state * (step[:, t] * A).exp()[:, :, None, None] + written
        outputs.append(torch.einsum("bhn,bhnp->bhp", C[:, t], state) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1).to(inputs[0].dtype)


def gate(y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, size: int, eps: float) -> torch.Tensor:
    gated = (y.float() * F.silu(z.float())).unflatten(-1, (-1, size))
    return (F.rms_norm(gated, (size,), eps=eps).flatten(-2) * weight).to(y.dtype)


def add_and_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    stream = x.float() if residual is None else residual + x
    return F.rms_norm(stream, weight.shape, weight, eps).to(x.dtype), stream


PLAIN = Parts(convolve, scan, gate, add_and_norm)


def timer(call: Callable[[], object]) -> float:
    call()
    return 0.5


def run(parts: Callable[[int], Parts], dtype: torch.dtype = torch.float32, load: Load = LOAD) -> ModelRow:
    weights = random_weights(TINY, device="cpu", dtype=dtype)
    with torch.inference_mode():
        return measure("tiny", TINY, weights, load, timer=timer, parts=parts, chunks=(64, 128), backend="torch")


@pytest.mark.parametrize("load", [LOAD, Load("one document of 256", 1, 256, kept=True)], ids=lambda load: load.name)
def test_the_stack_of_peers_is_the_same_network(load: Load) -> None:
    row = run(lambda _: PLAIN, load=load)
    assert row.distance is not None
    assert row.distance < 1e-5
    tokens = load.documents * load.tokens
    assert row.tokens_per_second == row.peer_tokens_per_second == tokens / 0.5
    assert (row.layer_milliseconds, row.products_milliseconds, row.times_peer) == (250.0, 250.0, 1.0)
    assert row.ratio_to_products_and_limits == pytest.approx(1, abs=1e-3)
    assert "ours 1.00 x" in "\n".join(row.lines())


def test_in_bf16_they_agree_as_far_as_bf16_goes() -> None:
    row = run(lambda _: PLAIN, torch.bfloat16)
    assert row.distance is not None
    assert 1e-4 < row.distance < 1.5e-2


def test_another_network_has_no_speed() -> None:
    row = run(lambda _: replace(PLAIN, gate=lambda y, z, weight, size, eps: gate(z, y, weight, size, eps)))
    assert row.distance is not None
    assert row.distance > 0.1
    assert (row.peer_tokens_per_second, row.times_peer) == (None, None)
    assert row.note.startswith("the two do not agree")
    assert row.note in "\n".join(row.lines())


def test_peers_that_are_absent_or_fail_are_told_of() -> None:
    def absent(_: int) -> Parts:
        raise ModuleNotFoundError("No module named 'mamba_ssm'")

    def fails(_: int) -> Parts:
        raise RuntimeError("no such target\nand more")

    assert run(absent).note == "not installed"
    row = run(fails)
    assert row.note == "failed: RuntimeError: no such target"
    assert asdict(row)["tokens_per_second"] == 280.0


def test_the_models_are_those_that_people_run() -> None:
    sizes = {name: round(geometry.num_parameters / 1e6) for name, geometry in GEOMETRIES.items()}
    assert sizes == {"130m": 129, "2.7b": 2703, "7b": 7285}
    assert [load.documents * load.tokens for load in LOADS] == [65_472, 65_536, 65_536, 65_000]

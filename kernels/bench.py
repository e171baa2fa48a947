"""Check kernels, then time them. A check that fails prints no number: what is wrong has no speed.

Times are medians over launches queued one behind the other, all of an operator's launches counted, in nanoseconds a
token-head (time / (tokens x heads)), beside the limit of the chip for the same work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from longscan.kernels.layouts import Layout, packed
from longscan.kernels.segments import TILE
from longscan.kernels.ssd import ssd
from longscan.kernels.ssd.cases import MODELS, Inputs, Shape, make_inputs

BYTES_A_SECOND = 4.3e12
FLOPS_A_SECOND = 790e12
"""What one H200 was measured to copy, bytes read and written, and to multiply in bf16 (8192 x 8192 x 8192)."""
TOLERANCE = 3e-3
"""Relative error of outputs and states in bf16 that a timed kernel may have against float64."""
TOKENS = 65_536
LOADS = (
    packed("16 documents of 4096", [4096] * 16),
    packed("64 documents of 1000", [1000] * 64),
    packed("one document of 65536", [TOKENS]),
)

Operator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Timer = Callable[[Callable[[], object]], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One shape under one load. `ns_per_token_head` and what follows from it are None where the check failed."""

    operator: str
    shape: str
    load: str
    error_y: float
    error_state: float
    ns_per_token_head: float | None
    limit_ns_per_token_head: float
    ratio_to_limit: float | None
    device: str
    torch: str

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def bench_ssd(
    shapes: Sequence[Shape] = MODELS, loads: Sequence[Layout] = LOADS, *, operator: Operator | None = None, timer: Timer | None = None
) -> Iterator[Record]:
    """Check and time `operator`, the CUDA Tile kernels where it is None, on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = operator or _cutile
    for shape in shapes:
        for load in loads:
            inputs = make_inputs(shape, load, dtype=torch.bfloat16, device=device, poison=False)
            errors = ssd_errors(run, inputs)
            limit = ssd_limit(shape, load) / _token_heads(shape, load)
            nanoseconds = None
            if max(errors) <= TOLERANCE:
                arguments = inputs.arguments()
                seconds = (timer or time_on_gpu)(lambda arguments=arguments: run(**arguments))  # type: ignore[misc]
                nanoseconds = seconds * 1e9 / _token_heads(shape, load)
            yield Record(
                operator="ssd",
                shape=shape.name,
                load=load.name,
                error_y=errors[0],
                error_state=errors[1],
                ns_per_token_head=nanoseconds,
                limit_ns_per_token_head=limit * 1e9,
                ratio_to_limit=None if nanoseconds is None else nanoseconds / (limit * 1e9),
                device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
                torch=torch.__version__,
            )


def _cutile(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ssd(**arguments, backend="cutile")


def ssd_errors(run: Operator, inputs: Inputs) -> tuple[float, float]:
    """Relative errors of outputs and states against the reference in float64; infinite where a number is not finite."""
    y_THP, ssm_SHNP = run(**inputs.arguments())
    wide = {name: tensor.double() for name, tensor in inputs.tensors.items()}
    truth_THP, truth_SHNP = ssd(**Inputs(wide, inputs.dt_limit, inputs.segments).arguments(), backend="torch")
    rows = inputs.segments.real_rows().to(y_THP.device)
    return _error(y_THP[rows], truth_THP[rows]), _error(ssm_SHNP, truth_SHNP)


def _error(got: torch.Tensor, truth: torch.Tensor) -> float:
    error = float((got.double() - truth).norm() / truth.norm())
    return error if error == error else float("inf")


def ssd_limit(shape: Shape, load: Layout) -> float:
    """Seconds that the least bytes, or the products, of an SSD take: whichever is more.

    Bytes: x and y, B and C, time steps, once each in 16 bits, and the fp32 state of each entry that is read or kept.
    FLOPs: inside a tile C B^T once a group and its product with x once a head; the state's update and its reading.
    """
    H, P, G, N = shape.H, shape.P, shape.G, shape.N
    tokens = sum(entry.num_tokens for entry in load.entries)
    states = sum((entry.lane_in >= 0) + (entry.lane_out >= 0) for entry in load.entries)
    bytes_moved = tokens * (4 * H * P + 4 * G * N + 2 * H) + states * 4 * H * N * P
    flops = tokens * (G * N * (TILE + 1) + H * P * (TILE + 1) + 4 * H * P * N)
    return max(bytes_moved / BYTES_A_SECOND, flops / FLOPS_A_SECOND)


def _token_heads(shape: Shape, load: Layout) -> int:
    return sum(entry.num_tokens for entry in load.entries) * shape.H


def time_on_gpu(call: Callable[[], object], *, warmup: int = 3, repeats: int = 15) -> float:
    """Median seconds of a call, by the device's own clock."""
    for _ in range(warmup):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(sorted(begin.elapsed_time(end) for begin, end in events)[repeats // 2]) / 1e3

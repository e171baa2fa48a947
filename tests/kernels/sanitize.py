"""Run every kernel once, small, and compare: made to be run under NVIDIA's compute-sanitizer, which slows a kernel down a hundredfold.

    compute-sanitizer --tool memcheck  --error-exitcode 9 python tests/kernels/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/kernels/sanitize.py ssd logprob

Inputs are made and results compared on the CPU, in float64, so that next to nothing but the kernels runs on the GPU; each tensor
has an allocation of its own, so that a tool sees what is touched beside it. The exit code is 1 where a result is wrong.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read when torch first allocates on a GPU

import torch
from longscan.kernels.conv1d import causal_conv1d
from longscan.kernels.logprob import UNWANTED, logprob
from longscan.kernels.norm import gated_rms_norm, rms_norm
from longscan.kernels.pool import POOLINGS, PoolState, pool
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.kernels.ssd import ssd
from longscan.kernels.tuning import Setting, trying

FRONT: dict[str, Callable[..., Any]] = {
    "ssd": ssd,
    "causal_conv1d": causal_conv1d,
    "rms_norm": rms_norm,
    "gated_rms_norm": gated_rms_norm,
    "pool": pool,
    "logprob": logprob,
}
ENTRIES = (
    Entry(1, 130, lane_out=2),
    Entry(4, 1, position=64, lane_in=3, lane_out=3),
    Entry(5, 3, lane_in=1, lane_out=0, ends=True),
    Entry(7, 64, position=128, lane_in=4, ends=True),
)
TILES, SLOTS = 9, 6
EPS = 1e-5
BF16 = torch.bfloat16
Run = Callable[..., Any]
Error = tuple[str, float, float]
"""What is compared, its relative error, and what is allowed."""


def normal(*size: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error, in float64 on the CPU; inf where the shapes differ or something is not finite."""
    got, expected = got.cpu().double(), expected.double()
    if got.shape != expected.shape or not bool(got.isfinite().all()):
        return math.inf
    return float((got - expected).norm() / expected.norm())


def moved(value: Any, device: str) -> Any:
    """A copy: operators write to their tables in place."""
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def scan_entries(run: Run, device: str) -> Iterator[Error]:
    """SSD: two heads of a group in a block and one in each, whole and in spans; and with one launch before the scan."""
    for G, span_tiles, joined in ((1, None, 0), (1, 2, 0), (2, None, 0), (2, None, 1)):
        H, P, N, T = 2, 64, 128 // G, TILES * TILE
        given: dict[str, Any] = {
            "x_THP": normal(T, H, P),
            "dt_TH": normal(T, H, seed=1) - 3,
            "A_H": -1 - 15 * torch.rand(H, generator=torch.Generator().manual_seed(2)),
            "B_TGN": normal(T, G, N, seed=3),
            "C_TGN": normal(T, G, N, seed=4),
            "D_H": normal(H, dtype=torch.float32, seed=5),
            "dt_bias_H": normal(H, dtype=torch.float32, seed=6),
            "ssm_SHNP": normal(SLOTS, H, N, P, dtype=torch.float32, seed=7),
        }
        with trying("ssd.prepare", Setting({}, {"JOINED": joined})):
            found = run("ssd", **{k: moved(v, device) for k, v in given.items()}, segments=segments(device, span_tiles))
        truth = ssd(**{k: wide(v) for k, v in given.items()}, segments=segments("cpu"), backend="torch")
        rows = segments("cpu").real_rows()
        form = f"G {G}, spans {span_tiles}" + ", joined" * joined
        yield f"y, {form}", off(found[0].cpu()[rows], truth[0][rows]), 3e-3
        yield f"states, {form}", off(found[1], truth[1]), 3e-3


def convolve(run: Run, device: str) -> Iterator[Error]:
    for K in (4, 2):
        given = {"x_TC": normal(TILES * TILE, 256), "weight_CK": normal(256, K, seed=1), "bias_C": normal(256, seed=2)}
        given["tail_SKC"] = normal(SLOTS, K - 1, 256, seed=3)
        found = run("causal_conv1d", **{k: moved(v, device) for k, v in given.items()}, segments=segments(device), activation="silu")
        truth = FRONT["causal_conv1d"](**{k: wide(v) for k, v in given.items()}, segments=segments("cpu"), backend="torch")
        rows = segments("cpu").real_rows()
        yield f"y, K {K}", off(found[0].cpu()[rows], truth[0][rows]), 3e-3
        yield f"tails, K {K}", off(found[1], truth[1]), 0.0


def norms(run: Run, device: str) -> Iterator[Error]:
    x, z, weight, residual = normal(64, 256), normal(64, 256, seed=1), normal(256, seed=2), normal(64, 256, dtype=torch.float32, seed=3)
    given = {"x_TD": x, "weight_D": weight, "residual_TD": residual}
    found = run("rms_norm", **{k: moved(v.clone(), device) for k, v in given.items()}, eps=EPS, out_dtype=BF16)
    truth = rms_norm(**{k: wide(v.clone()) for k, v in given.items()}, eps=EPS, backend="torch")  # type: ignore[arg-type]
    yield "y", off(found[0], truth[0]), 3e-3
    yield "residual", off(found[1], truth[1]), 1e-6
    given = {"x_TI": x, "z_TI": z, "weight_I": weight}
    options: dict[str, Any] = {"groups": 2, "eps": EPS, "norm_before_gate": False}
    found = run("gated_rms_norm", **{k: moved(v, device) for k, v in given.items()}, **options)
    yield "gated y", off(found, gated_rms_norm(**{k: wide(v) for k, v in given.items()}, **options, backend="torch")), 3e-3


def pool_entries(run: Run, device: str) -> Iterator[Error]:
    hidden, options = normal(TILES * TILE, 128), {"poolings": POOLINGS, "window_tokens": 2 * TILE}
    tables = PoolState.new(SLOTS, 128, POOLINGS, 2 * TILE).tables
    tables = {name: normal(*table.shape, dtype=table.dtype, seed=n) for n, (name, table) in enumerate(tables.items())}
    on_device = PoolState({name: moved(table.clone(), device) for name, table in tables.items()})
    found, state = run("pool", moved(hidden, device), state=on_device, segments=segments(device), **options)
    truth, expected = pool(hidden, state=PoolState(tables), segments=segments("cpu"), **options, backend="torch")  # type: ignore[arg-type]
    for kind in ("documents", "windows"):
        for pooling in POOLINGS:
            yield f"{kind}, {pooling}", off(getattr(found, kind)[pooling], getattr(truth, kind)[pooling]), 1e-6
    for name in tables:
        yield f"table {name}", off(state.tables[name].clamp(min=-1e30), expected.tables[name].clamp(min=-1e30)), 1e-12


def score(run: Run, device: str) -> Iterator[Error]:
    hidden, weight = normal(130, 64), normal(300, 64, seed=1) * 0.3
    targets = torch.randint(300, (130,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    targets[::7] = UNWANTED
    found = run("logprob", moved(hidden, device), moved(weight, device), moved(targets, device)).cpu()
    wanted = targets != UNWANTED
    truth = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(1, targets.clamp(min=0)[:, None].long())[:, 0]
    yield "log-probabilities", off(found[wanted], truth[wanted]), 1e-5
    yield "rows without a target", float((found.isnan() == wanted).sum()), 0.0


CHECKS = {"ssd": scan_entries, "conv1d": convolve, "norm": norms, "pool": pool_entries, "logprob": score}


def segments(device: str, span_tiles: int | None = None) -> Segments:
    return Segments.pack(ENTRIES, TILES, device, span_tiles=span_tiles)


def on_gpu(operator: str, *values: Any, **named: Any) -> Any:
    return FRONT[operator](*values, **named, backend="cutile")


def main(names: Sequence[str], run: Run = on_gpu, device: str = "cuda") -> int:
    """Run the checks of the operators `names`, all where none is named. Returns the number of wrong results, 1 at most."""
    unknown = set(names) - set(CHECKS)
    if unknown:
        print(f"expected some of {', '.join(CHECKS)}, found {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    wrong = 0
    for name in names or CHECKS:
        began = time.monotonic()
        for what, error, allowed in CHECKS[name](run, device):
            wrong += not error <= allowed
            print(f"{'ok   ' if error <= allowed else 'WRONG'} {name}: {what}: relative error {error:.1e}, allowed {allowed:.0e}")
        print(f"      {name}: {time.monotonic() - began:.1f} s", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

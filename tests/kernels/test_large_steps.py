"""Steps of more than 2^31 elements: offsets that do not fit 32 bits. On a GPU; the tests' own logic, in small, on the emulator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from emulator import runtime
from fences import Fenced
from longscan.kernels.conv1d import causal_conv1d
from longscan.kernels.layouts import Layout, packed
from longscan.kernels.logprob import logprob
from longscan.kernels.norm import gated_rms_norm, rms_norm
from longscan.kernels.norm.cases import EPS
from longscan.kernels.pool import POOLINGS, PoolState, closed_windows, pool
from longscan.kernels.segments import TILE, Entry
from longscan.kernels.ssd import ssd
from longscan.kernels.ssd.cases import MODELS, Shape
from longscan.kernels.ssd.forms import check_form
from packings import assert_rows

BF16 = torch.bfloat16
TOLERANCE = 3e-3
SSD = runtime.load("ssd")
EMULATED = {
    "causal_conv1d": runtime.load("conv1d").causal_conv1d,
    "rms_norm": (NORM := runtime.load("norm")).rms_norm,
    "gated_rms_norm": NORM.gated_rms_norm,
    "pool": runtime.load("pool").pool,
    "logprob": runtime.load("logprob").logprob,
    "ssd": SSD.ssd,
}
ON_GPU = {
    "causal_conv1d": causal_conv1d,
    "rms_norm": rms_norm,
    "gated_rms_norm": gated_rms_norm,
    "pool": pool,
    "logprob": logprob,
    "ssd": ssd,
}


@dataclass(frozen=True)
class Place:
    """What runs the kernels, and what is large there."""

    name: str
    device: str
    large: int
    """Elements that each of the tensors has more of."""
    mixer: Shape
    wide: Shape
    width: int
    document: int
    """Tiles of each of a step's documents, but the last."""

    def run(self, operator: str, *values: Any, **named: Any) -> Any:
        """With poisoned memory, so that what is never written is found."""
        with Fenced():
            return ON_GPU[operator](*values, **named, backend="cutile") if self.device == "cuda" else EMULATED[operator](*values, **named)

    def step(self, columns: int) -> Layout:
        """Documents that go on, each from its lane: enough of them for `large` elements in `columns`, the last one of few tokens."""
        count = -(-self.large // (columns * self.document * TILE))
        layout = packed("large", [self.document * TILE] * count + [100])
        assert layout.num_tiles * TILE * columns > self.large
        return layout

    def normal(self, *size: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(size, generator=generator, dtype=BF16, device=self.device)


PLACES = (
    Place("emulated", "cpu", 1 << 14, Shape("small", H=8, P=32, G=1, N=16), Shape("small", H=8, P=32, G=8, N=16), 64, 1),
    Place("gpu", "cuda", 1 << 31, MODELS[2], MODELS[3], 4096, 64),
)


@pytest.fixture(params=[pytest.param(p, marks=[pytest.mark.gpu] * (p.device == "cuda"), id=p.name) for p in PLACES])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    found: Place = request.param
    if found.device == "cuda":
        torch.cuda.empty_cache()
    yield found
    if found.device == "cuda":
        torch.cuda.empty_cache()


def looked_at(layout: Layout, place: Place, columns: int) -> list[tuple[int, Entry]]:
    """The first document, the two in which offsets of `columns` a row pass half of `large` and all of it, and the last two."""
    rows = [0, place.large // 2 // columns, place.large // columns]
    passed = [next(e for e, entry in enumerate(layout.entries) if entry.rows.stop > row) for row in rows]
    chosen = sorted({*passed, len(layout.entries) - 2, len(layout.entries) - 1})
    return [(e, layout.entries[e]) for e in chosen]


def tiles_of(entry: Entry) -> slice:
    return slice(entry.first_tile * TILE, (entry.first_tile + entry.num_tiles) * TILE)


def alone(entry: Entry) -> Layout:
    """The entry as a step of its own, in lane 0."""
    return packed("alone", [entry.num_tokens])


def check_convolution(place: Place, layout: Layout, x_TC: torch.Tensor, columns: int) -> torch.Tensor:
    """Convolve, and look at some documents; returns all outputs."""
    C = x_TC.shape[1]
    weight_CK, bias_C = place.normal(C, 4, seed=1) / 2, place.normal(C, seed=2)
    tail_SKC = place.normal(layout.slots, 3, C, seed=3)
    table = tail_SKC.clone()
    y_TC, _ = place.run("causal_conv1d", x_TC, weight_CK, bias_C, tail_SKC=table, segments=layout.segments(place.device), activation="silu")
    for e, entry in looked_at(layout, place, columns):
        tail = tail_SKC[e : e + 1].double()
        inputs = (x_TC[tiles_of(entry)].double(), weight_CK.double(), bias_C.double())
        expected, tail = causal_conv1d(*inputs, tail_SKC=tail, segments=alone(entry).segments(place.device), backend="torch")
        assert_rows(f"convolution, document {e}", y_TC[entry.rows], expected[: entry.num_tokens], TOLERANCE, 2 * TOLERANCE)
        assert torch.equal(table[e].double(), tail[0]), f"tail of document {e}"
    assert bool(y_TC.isfinite().all()), "every row is written"
    result: torch.Tensor = y_TC
    return result


def check_gated_norm(place: Place, layout: Layout, x_TI: torch.Tensor, z_TI: torch.Tensor, groups: int, columns: int) -> None:
    weight_I = place.normal(x_TI.shape[1], seed=4)
    options: dict[str, Any] = {"groups": groups, "eps": EPS, "norm_before_gate": False}
    y_TI = place.run("gated_rms_norm", x_TI, z_TI, weight_I, **options)
    for e, entry in looked_at(layout, place, columns):
        inputs = (x_TI[entry.rows].double(), z_TI[entry.rows].double(), weight_I.double())
        assert_rows(
            f"gated norm, document {e}", y_TI[entry.rows], gated_rms_norm(*inputs, **options, backend="torch"), TOLERANCE, 2 * TOLERANCE
        )
    assert bool(y_TI.isfinite().all()), "every row is written"


def test_a_mixer_whose_projection_is_large(place: Place) -> None:
    """z, what is convolved and dt lie in one projection of [T, 2HP + 2GN + H], as in the network: each layer's operators in turn."""
    H, P, G, N = place.mixer.H, place.mixer.P, place.mixer.G, place.mixer.N
    sizes = [H * P, H * P + 2 * G * N, H]
    columns = sum(sizes)
    layout = place.step(columns)
    projected = place.normal(layout.num_tiles * TILE, columns)
    z_TI, xbc_TC, dt_TH = projected.split(sizes, dim=1)
    y_TC = check_convolution(place, layout, xbc_TC, columns)
    x_TI, B_TX, C_TX = y_TC.split([H * P, G * N, G * N], dim=1)
    generator = torch.Generator(place.device).manual_seed(5)
    time_H, rate_H, D_H = torch.rand(3, H, generator=generator, device=place.device).unbind(0)
    time_H = torch.exp(time_H * math.log(100.0) + math.log(0.001))
    per_head = {"A_H": -1 - 15 * rate_H, "D_H": D_H, "dt_bias_H": time_H + torch.log(-torch.expm1(-time_H))}
    of_tokens = {"x_THP": x_TI.unflatten(1, (H, P)), "dt_TH": dt_TH, "B_TGN": B_TX.unflatten(1, (G, N)), "C_TGN": C_TX.unflatten(1, (G, N))}
    ssm_SHNP = torch.randn(layout.slots, H, N, P, generator=generator, device=place.device)
    options: dict[str, Any] = {"z_THP": None, "dt_limit": (0.0, math.inf)}
    table = ssm_SHNP.clone()
    y_THP, _ = place.run("ssd", **of_tokens, **per_head, **options, ssm_SHNP=table, segments=layout.segments(place.device))
    for e, entry in looked_at(layout, place, columns):
        wide = {name: tensor[tiles_of(entry)].double() for name, tensor in of_tokens.items()}
        wide |= {name: tensor.double() for name, tensor in per_head.items()}
        state = ssm_SHNP[e : e + 1].double()
        expected, state = ssd(**wide, **options, ssm_SHNP=state, segments=alone(entry).segments(place.device), backend="torch")
        assert_rows(f"y of document {e}", y_THP[entry.rows], expected[: entry.num_tokens], 2 * TOLERANCE, 10 * TOLERANCE)
        assert_rows(f"state of document {e}", table[e].flatten(1), state[0].flatten(1), 2 * TOLERANCE, 10 * TOLERANCE)
    assert bool(y_THP.isfinite().all()), "every row is written"
    check_gated_norm(place, layout, y_THP.flatten(1), z_TI, G, columns)


def test_a_convolution_and_a_gated_norm_whose_outputs_are_large(place: Place) -> None:
    H, P, G, N = place.wide.H, place.wide.P, place.wide.G, place.wide.N
    layout = place.step(H * P)
    projected = place.normal(layout.num_tiles * TILE, 2 * H * P + 2 * G * N + H)
    z_TI, xbc_TC = projected[:, : H * P], projected[:, H * P : -H]
    y_TC = check_convolution(place, layout, xbc_TC, H * P + 2 * G * N)
    check_gated_norm(place, layout, y_TC[:, : H * P], z_TI, G, H * P)


def test_an_ssd_is_told_to_take_smaller_steps() -> None:
    """x, B and C keep the loads that int64 indices would cost; what does not fit is refused before anything is launched."""
    H, P, G, N = (getattr(MODELS[3], letter) for letter in "HPGN")
    table = torch.empty(1, H, N, P, device="meta")
    for rows, refused in ((2**31 // 10240 // TILE * TILE, False), ((2**31 // 10240 // TILE + 1) * TILE, True)):
        x_TI, B_TX, C_TX = torch.empty(rows, 10240, dtype=BF16, device="meta").split([H * P, G * N, G * N], dim=1)
        tensors = (x_TI.unflatten(1, (H, P)), B_TX.unflatten(1, (G, N)), C_TX.unflatten(1, (G, N)))
        if refused:
            with pytest.raises(ValueError, match=r"x_THP: expected less than 2\^31 elements .*; use smaller steps"):
                check_form(*tensors, None, table)
        else:
            check_form(*tensors, None, table)


def test_a_large_residual_stream(place: Place) -> None:
    layout, D = place.step(place.width), place.width
    T = layout.num_tiles * TILE
    x_TD, weight_D = place.normal(T, D), place.normal(D, seed=1)
    residual_TD = place.normal(T, D, seed=2).float()
    kept = {e: residual_TD[entry.rows].clone() for e, entry in looked_at(layout, place, D)}
    y_TD, total_TD = place.run("rms_norm", x_TD, weight_D, residual_TD=residual_TD, eps=EPS, out_dtype=BF16)
    for e, entry in looked_at(layout, place, D):
        total = kept[e] + x_TD[entry.rows].float()
        assert torch.equal(total_TD[entry.rows], total), f"residual of document {e}"
        wide = total.double()
        expected = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS) * weight_D.double()
        assert_rows(f"norm, document {e}", y_TD[entry.rows], expected, TOLERANCE, 2 * TOLERANCE)
    assert bool(y_TD.isfinite().all()), "every row is written"


def test_pooling_large_hidden_states(place: Place) -> None:
    """Documents that begin and end in the step, so that each has its vectors and its windows."""
    D, window = place.width, place.document * TILE // 2 if place.document > 1 else TILE
    going = place.step(D)
    layout = packed("large", [entry.num_tokens for entry in going.entries], lanes=False)
    hidden_TD = place.normal(layout.num_tiles * TILE, D)
    options: dict[str, Any] = {"poolings": POOLINGS, "window_tokens": window}
    segments = layout.segments(place.device)
    state = PoolState.new(1, D, POOLINGS, window, place.device)
    output, _ = place.run("pool", hidden_TD, state=state, segments=segments, **options)
    runs = closed_windows(segments, window)
    for e, entry in looked_at(layout, place, D):
        rows, one = hidden_TD[tiles_of(entry)], packed("alone", [entry.num_tokens], lanes=False)
        expected, _ = pool(rows, state=state, segments=one.segments(place.device), **options, backend="torch")
        mine = [w for w, run in enumerate(runs) if run.entry == e]
        for pooling in POOLINGS:
            torch.testing.assert_close(output.documents[pooling][e], expected.documents[pooling][0], rtol=2e-7, atol=1e-7)
            torch.testing.assert_close(output.windows[pooling][mine], expected.windows[pooling], rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("large", ["hidden", "logits"])
def test_scores_of_large_steps(place: Place, large: str) -> None:
    """Of large hidden states; and of small ones whose logits, which are nowhere, would be large."""
    emulated = place.device == "cpu"
    width, vocabulary = (place.width, 64 if emulated else 512) if large == "hidden" else (64, 320 if emulated else 50_288)
    layout = place.step(width if large == "hidden" else vocabulary)
    T = layout.num_tiles * TILE
    hidden_TD, weight_VD = place.normal(T, width), place.normal(vocabulary, width, seed=1) * 3 * width**-0.5
    targets_T = torch.randint(vocabulary, (T,), generator=torch.Generator(place.device).manual_seed(2), device=place.device)
    found_T = place.run("logprob", hidden_TD, weight_VD, targets_T)
    for e, entry in looked_at(layout, place, width if large == "hidden" else vocabulary):
        rows = slice(entry.rows.start, entry.rows.start + min(entry.num_tokens, 256))
        logits = hidden_TD[rows].double() @ weight_VD.double().T
        expected = torch.log_softmax(logits, -1).gather(1, targets_T[rows, None])[:, 0]
        torch.testing.assert_close(found_T[rows].double(), expected, rtol=1e-5, atol=1e-4, msg=lambda m, e=e: f"document {e}: {m}")
    assert bool(found_T.isfinite().all()), "every row is written"

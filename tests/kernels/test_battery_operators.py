"""conv1d, norm, pool and logprob on CUDA Tile in steps by the thousand, with poisoned memory; on a GPU, and a few on the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import packings
import pytest
import torch
from compare import assert_same_bits
from emulator import runtime
from fences import Fenced, bits
from longscan.kernels.conv1d import causal_conv1d
from longscan.kernels.conv1d.cases import Inputs as ConvInputs
from longscan.kernels.conv1d.cases import Shape as ConvShape
from longscan.kernels.conv1d.cases import make_inputs as make_convolution
from longscan.kernels.layouts import Layout
from longscan.kernels.logprob import UNWANTED, logprob
from longscan.kernels.logprob.cases import Case as LogprobCase
from longscan.kernels.logprob.cases import make as make_scores
from longscan.kernels.norm import gated_rms_norm, rms_norm
from longscan.kernels.norm.cases import EPS, make_rows
from longscan.kernels.norm.cases import Shape as NormShape
from longscan.kernels.pool import POOLINGS, PoolOutput, PoolState, pool
from longscan.kernels.segments import NO_LANE, Entry
from packings import assert_rows, at, elsewhere, every_length, joined, moved, pack, parts, to_be_told_apart

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 3e-3, FP16: 5e-4}
WINDOW = 128
EMULATED = {
    "causal_conv1d": runtime.load("conv1d").causal_conv1d,
    "rms_norm": (NORM := runtime.load("norm")).rms_norm,
    "gated_rms_norm": NORM.gated_rms_norm,
    "pool": runtime.load("pool").pool,
    "logprob": runtime.load("logprob").logprob,
}
ON_GPU = {"causal_conv1d": causal_conv1d, "rms_norm": rms_norm, "gated_rms_norm": gated_rms_norm, "pool": pool, "logprob": logprob}


@dataclass(frozen=True)
class Place(packings.Place):
    """What runs the kernels, and how much it can run."""

    width: int

    def run(self, operator: str, *values: Any, **named: Any) -> Any:
        """Between fences, with poisoned memory."""
        with Fenced() as fenced:
            result = ON_GPU[operator](*values, **named, backend="cutile") if self.device == "cuda" else EMULATED[operator](*values, **named)
        assert fenced.allocated, "outputs are poisoned"
        return result


PLACES = (
    Place("emulated", "cpu", 6, 4, 2, (1, 2, 3, 65), 32),
    Place("gpu", "cuda", 48, 1000, 50, tuple(range(1, 201)), 256),
)


@pytest.fixture(params=at(PLACES))
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    return found


CONVOLUTIONS = [(dtype, taps) for dtype in (BF16, FP16) for taps in (4, 3, 2)]


def check_convolution(place: Place, layouts: list[Layout], dtype: torch.dtype, taps: int, seed: int) -> None:
    """Each layout as a step of its own against the PyTorch path in float64: outputs, tails to the bit, and all else as it was."""
    shape = ConvShape("battery", C=3 * place.width, K=taps, stride=4 * place.width + 8)
    whole = joined(layouts)
    inputs = make_convolution(shape, whole, dtype=dtype, device=place.device, seed=seed)
    x_TC, before_SKC = inputs.tensors["x_TC"], inputs.tensors["tail_SKC"]
    x_before, table, outputs = bits(x_TC).clone(), before_SKC.clone(), []
    for layout, rows, slots in parts(layouts):
        outputs.append(convolve(place, inputs, x_TC[rows], table[slots], layout))
    y_TC = torch.cat(outputs)
    wide = {name: tensor.double() for name, tensor in inputs.tensors.items()}
    expected_TC, expected_SKC = causal_conv1d(**wide, segments=inputs.segments, backend="torch")
    real = inputs.segments.real_rows()
    assert y_TC.dtype == dtype
    assert_rows("y", y_TC[real], expected_TC[real], TOLERANCE[dtype], 2 * TOLERANCE[dtype])
    assert torch.equal(bits(table.nan_to_num(3.0)), bits(expected_SKC.to(dtype).nan_to_num(3.0))), "tails are the last inputs"
    assert torch.equal(bits(x_TC), x_before), "an input has changed"
    assert bool((y_TC[~whole.owned_rows()] == 0).all()), "rows that belong to nobody are zero"
    assert bool(y_TC.isfinite().all()), "rows of padding are finite"
    for n, (layout, rows, slots) in enumerate(parts(layouts)):
        for entry in to_be_told_apart(layout, n, len(layouts)):
            alone = elsewhere(entry, place.tiles)
            tails = torch.full_like(before_SKC[:16], torch.nan)
            if entry.lane_in != NO_LANE:
                tails[alone.lane_in] = before_SKC[slots][entry.lane_in]
            step = Layout("alone", (alone,), place.tiles, len(tails))
            other_TC = convolve(place, inputs, moved(x_TC[rows], entry, alone, place.tiles), tails, step)
            assert_same_bits(f"y of {entry}", other_TC[alone.rows], y_TC[rows][entry.rows])
            if entry.lane_out != NO_LANE:
                assert_same_bits(f"tail of {entry}", tails[alone.lane_out], table[slots][entry.lane_out])


def convolve(place: Place, inputs: ConvInputs, x_TC: torch.Tensor, tail_SKC: torch.Tensor, layout: Layout) -> torch.Tensor:
    segments = pack(layout, place.device)
    taps = (inputs.tensors["weight_CK"], inputs.tensors["bias_C"])
    y_TC: torch.Tensor = place.run("causal_conv1d", x_TC, *taps, tail_SKC=tail_SKC, segments=segments, activation="silu")[0]
    return y_TC


@pytest.mark.parametrize(("dtype", "taps"), CONVOLUTIONS, ids=[f"K{taps}-{dtype}" for dtype, taps in CONVOLUTIONS])
def test_convolution(place: Place, dtype: torch.dtype, taps: int) -> None:
    """Every length, and a share of the random packings."""
    check_convolution(place, [every_length(place.lengths)], dtype, taps, seed=0)
    for first, layouts in place.random_groups(f"convolution {taps} {dtype}", -(-place.packings // len(CONVOLUTIONS))):
        check_convolution(place, layouts, dtype, taps, seed=first)


def pool_inputs(layout: Layout, place: Place, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, PoolState]:
    """Hidden states, NaN where nobody's, and tables that hold what came before where something did, NaN elsewhere."""
    generator = torch.Generator(place.device).manual_seed(seed)
    hidden_TD = 0.5 + torch.randn(layout.num_tiles * 64, place.width, generator=generator, device=place.device)
    hidden_TD[~layout.owned_rows()] = torch.nan
    state = PoolState.new(layout.slots, place.width, POOLINGS, WINDOW, place.device)
    for name, table in state.tables.items():
        begun = [entry for entry in layout.entries if entry.position % (WINDOW if name.startswith("window_") else 1 << 62)]
        slots = sorted({entry.lane_in for entry in begun} - {NO_LANE})
        values = 100 * torch.randn(table.shape, generator=generator, dtype=table.dtype, device=place.device)
        table.fill_(torch.nan)
        table[slots] = values[slots]
    return hidden_TD.to(dtype), state


def run_pool(place: Place, hidden_TD: torch.Tensor, tables: dict[str, torch.Tensor], layout: Layout) -> PoolOutput:
    options: dict[str, Any] = {"poolings": POOLINGS, "window_tokens": WINDOW, "segments": pack(layout, place.device)}
    output: PoolOutput = place.run("pool", hidden_TD, state=PoolState(tables), **options)[0]
    return output


def check_pool(place: Place, layouts: list[Layout], dtype: torch.dtype, seed: int) -> None:
    """Each layout as a step of its own against the PyTorch path: vectors, tables, and all else as it was."""
    whole = joined(layouts)
    hidden_TD, state = pool_inputs(whole, place, dtype, seed)
    before = {name: table.clone() for name, table in state.tables.items()}
    tables = {name: table.clone() for name, table in state.tables.items()}
    outputs = []
    for layout, rows, slots in parts(layouts):
        outputs.append(run_pool(place, hidden_TD[rows], {name: table[slots] for name, table in tables.items()}, layout))
    options: dict[str, Any] = {"poolings": POOLINGS, "window_tokens": WINDOW, "backend": "torch"}
    expected, _ = pool(hidden_TD, state=state, segments=whole.segments(place.device), **options)
    for kind in ("documents", "windows"):
        for pooling, vectors in getattr(expected, kind).items():
            found = torch.cat([getattr(output, kind)[pooling] for output in outputs])
            torch.testing.assert_close(found, vectors, rtol=2e-7, atol=1e-6)
    others = torch.ones(whole.slots, dtype=torch.bool)
    others[[entry.lane_out for entry in whole.entries if entry.lane_out != NO_LANE]] = False
    for name, table in tables.items():
        torch.testing.assert_close(table, state.tables[name], rtol=1e-12, atol=1e-9, equal_nan=True)
        assert torch.equal(bits(table[others]), bits(before[name][others])), f"{name}: a slot that nobody writes has changed"
    for n, (layout, rows, slots) in enumerate(parts(layouts)):
        entry = layout.entries[n % len(layout.entries)]
        pooled_alone(place, hidden_TD[rows], {name: table[slots] for name, table in before.items()}, layout, entry, outputs[n])


def pooled_alone(
    place: Place, hidden_TD: torch.Tensor, before: dict[str, torch.Tensor], layout: Layout, entry: Entry, together: PoolOutput
) -> None:
    """`entry` alone at another place has the bits of the vectors that it had in company."""
    alone = elsewhere(entry, place.tiles)
    tables = {name: torch.full_like(table[:16], torch.nan) for name, table in before.items()}
    for name, table in tables.items():
        if entry.lane_in != NO_LANE:
            table[alone.lane_in] = before[name][entry.lane_in]
    step = Layout("alone", (alone,), place.tiles, 16)
    output = run_pool(place, moved(hidden_TD, entry, alone, place.tiles), tables, step)
    index = sum(other.ends for other in layout.entries[: layout.entries.index(entry)])
    for pooling in POOLINGS:
        if entry.ends:
            assert_same_bits(f"{pooling} of {entry}", output.documents[pooling][0], together.documents[pooling][index])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_pool(place: Place, dtype: torch.dtype) -> None:
    """Every length, and half of the random packings."""
    check_pool(place, [every_length(place.lengths)], dtype, seed=0)
    for first, layouts in place.random_groups(f"pool {dtype}", place.packings // 2):
        check_pool(place, layouts, dtype, seed=first)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_norms_of_every_number_of_rows(place: Place, dtype: torch.dtype) -> None:
    """A row is as true among 200, and has the same bits among fewer."""
    plain, gated, most = NormShape("plain", 4 * place.width), NormShape("gated", 8 * place.width, 2), max(place.lengths)
    rows = make_rows(plain, most, dtype=dtype, device=place.device)
    total_TD = rows["residual"] + rows["x"].float()
    wide_TD = total_TD.double()
    expected_TD = wide_TD * torch.rsqrt(wide_TD.square().mean(1, keepdim=True) + EPS) * rows["weight"].double()
    given = make_rows(gated, most, dtype=dtype, device=place.device)
    inner_TGJ = (given["x"].double() * torch.nn.functional.silu(given["z"].double())).unflatten(1, (2, -1))
    scaled_TGJ = inner_TGJ * torch.rsqrt(inner_TGJ.square().mean(2, keepdim=True) + EPS)
    expected_TI = scaled_TGJ.flatten(1) * given["weight"].double()
    whole: list[torch.Tensor] = []
    for count in sorted(place.lengths, reverse=True):
        residual = rows["residual"].clone()
        y_TD, residual_TD = place.run("rms_norm", rows["x"][:count], rows["weight"], residual_TD=residual[:count], eps=EPS, out_dtype=dtype)
        options: dict[str, Any] = {"groups": 2, "eps": EPS, "norm_before_gate": False}
        y_TI = place.run("gated_rms_norm", given["x"][:count], given["z"][:count], given["weight"], **options)
        assert_same_bits("residual", residual_TD, total_TD[:count])
        assert torch.equal(residual[count:], rows["residual"][count:]), "rows behind the last have changed"
        whole = whole or [y_TD, y_TI]
        assert_same_bits(f"y of {count} rows", y_TD, whole[0][:count])
        assert_same_bits(f"gated y of {count} rows", y_TI, whole[1][:count])
    assert_rows("y", whole[0], expected_TD, TOLERANCE[dtype], 2 * TOLERANCE[dtype])
    assert_rows("gated y", whole[1], expected_TI, TOLERANCE[dtype], 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_logprob_of_every_number_of_rows(place: Place, dtype: torch.dtype) -> None:
    """A row is as true among 200, and has the same bits among fewer, where rows behind the last have no say."""
    most = max(place.lengths)
    inputs = make_scores(LogprobCase("battery", most, place.width // 2, 1003), place.device, dtype)
    targets_T = inputs.targets_T.to(torch.int32)
    logits_TV = inputs.hidden_TD.double() @ inputs.weight_VD.double().T
    expected_T = torch.log_softmax(logits_TV, -1).gather(1, inputs.targets_T.clamp(min=0)[:, None])[:, 0]
    wanted_T = targets_T != UNWANTED
    whole_T = place.run("logprob", inputs.hidden_TD, inputs.weight_VD, targets_T)
    assert torch.equal(whole_T.isnan(), ~wanted_T)
    torch.testing.assert_close(whole_T.double()[wanted_T], expected_T[wanted_T], rtol=1e-5, atol=1e-4)
    for count in place.lengths:
        found_T = place.run("logprob", inputs.hidden_TD[:count], inputs.weight_VD, targets_T[:count])
        assert torch.equal(bits(found_T.nan_to_num(1.0)), bits(whole_T[:count].nan_to_num(1.0))), f"{count} rows"

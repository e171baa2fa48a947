"""conv1d, norm, pool and logprob on CUDA Tile: their very source over the emulator, in bf16, against definition or PyTorch path."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from compare import assert_close, assert_same_bits
from emulator import runtime
from fences import bits
from longscan.kernels import tuning
from longscan.kernels.conv1d import causal_conv1d
from longscan.kernels.conv1d.cases import Shape as ConvShape
from longscan.kernels.conv1d.cases import make_inputs
from longscan.kernels.layouts import EDGES, Layout, names
from longscan.kernels.logprob import UNWANTED, logprob
from longscan.kernels.logprob.cases import Case as LogprobCase
from longscan.kernels.logprob.cases import make as make_scores
from longscan.kernels.norm import gated_rms_norm, rms_norm
from longscan.kernels.norm.cases import EPS, make_rows
from longscan.kernels.norm.cases import Shape as NormShape
from longscan.kernels.pool import POOLINGS, PoolState, pool
from longscan.kernels.pool.cases import CASES as POOL_CASES
from longscan.kernels.pool.cases import Case as PoolCase
from longscan.kernels.pool.cases import grouped
from longscan.kernels.pool.cases import make as make_pool
from longscan.kernels.segments import MOST_ROWS, NO_LANE, TILE, Entry, Segments
from longscan.kernels.tuning import Setting

BF16 = torch.bfloat16
ROUNDING = 3e-3
CONV1D, NORM, POOL, LOGPROB = (runtime.load(operator) for operator in ("conv1d", "norm", "pool", "logprob"))

CONVOLUTIONS = (ConvShape("K4", C=96, K=4, stride=160), ConvShape("K3", C=48, K=3, stride=56), ConvShape("K2", C=32, K=2, stride=32))


@pytest.mark.parametrize("layout", EDGES, ids=names(EDGES))
def test_convolution(layout: Layout) -> None:
    check_convolution(layout, CONVOLUTIONS[0], "silu")


@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=lambda shape: shape.name)
def test_convolution_without_activation(shape: ConvShape) -> None:
    check_convolution(EDGES[0], shape, None)


def check_convolution(layout: Layout, shape: ConvShape, activation: str | None) -> None:
    inputs = make_inputs(shape, layout, dtype=BF16)
    given: dict[str, Any] = inputs.arguments(activation=activation)
    before = inputs.tensors["tail_SKC"]
    y_TC, tail_SKC = CONV1D.causal_conv1d(**given)
    written = set()
    for entry in layout.entries:
        past = None if entry.lane_in == NO_LANE else before[entry.lane_in]
        y, tail = oracle.causal_conv(given["x_TC"][entry.rows], given["weight_CK"], given["bias_C"], past, activation=activation)
        assert_close(f"y of {entry}", y_TC[entry.rows], y, ROUNDING, dtype=BF16)
        if entry.lane_out != NO_LANE:
            assert_close(f"tail of {entry}", tail_SKC[entry.lane_out], tail, 0.0, dtype=BF16)
            written.add(entry.lane_out)
    for slot in set(range(len(before))) - written:
        assert torch.equal(tail_SKC[slot].view(torch.int16), before[slot].view(torch.int16)), f"slot {slot} is as it was"
    assert not bool(y_TC[~layout.owned_rows()].any()), "rows of nobody are zero"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_convolution_has_the_same_bits_where_zero_is_chosen_at_the_end(device: str) -> None:
    """Tiles of nobody, which hold NaN, are computed as well then."""
    inputs = make_inputs(CONVOLUTIONS[0], EDGES[0], dtype=BF16, device=device)
    run = CONV1D.causal_conv1d if device == "cpu" else partial(causal_conv1d, backend="cutile")
    expected = run(**inputs.arguments(activation="silu"))
    with tuning.trying("conv1d.convolve", Setting({}, {"SELECT": 1})):
        found = run(**inputs.arguments(activation="silu"))
    assert not bool(found[0][~EDGES[0].owned_rows()].any()), "rows of nobody are zero"
    assert_same_bits("y", found[0], expected[0])
    written = [entry.lane_out for entry in EDGES[0].entries if entry.lane_out != NO_LANE]
    assert_same_bits("tails", found[1][written], expected[1][written])


def test_convolution_has_the_same_bits_where_an_entry_begins() -> None:
    """The first rows of an entry come from a launch of their own: a document in one entry or in two must not show it."""
    whole = Layout("whole", (Entry(0, 200, 0, NO_LANE, 0),), 4, slots=1)
    halves = [
        Layout("first", (Entry(0, TILE, 0, NO_LANE, 0),), 1, slots=1),
        Layout("second", (Entry(0, 136, TILE, 0, 0),), 3, slots=1),
    ]
    inputs = make_inputs(CONVOLUTIONS[0], whole, dtype=BF16)
    given = inputs.arguments(activation="silu")
    y_TC, _ = CONV1D.causal_conv1d(**given)
    tail, parts, row = given["tail_SKC"].clone(), [], 0
    for half in halves:
        rows = slice(row, row + half.num_tiles * TILE)
        part, tail = CONV1D.causal_conv1d(**{**given, "x_TC": given["x_TC"][rows], "tail_SKC": tail, "segments": half.segments()})
        parts.append(part)
        row = rows.stop
    assert_same_bits("y", torch.cat(parts)[:200], y_TC[:200])


@pytest.mark.parametrize("shape", [NormShape("G1", 96), NormShape("G2", 96, 2), NormShape("G8", 1024, 8)], ids=lambda shape: shape.name)
@pytest.mark.parametrize("num_rows", [64, 192])
def test_norms(num_rows: int, shape: NormShape) -> None:
    given = make_rows(shape, num_rows, dtype=BF16)
    total = given["residual"] + given["x"].float()
    y, residual = NORM.rms_norm(given["x"], given["weight"], residual_TD=given["residual"].clone(), eps=EPS, out_dtype=BF16)
    assert_close("y", y, oracle.rms_norm(total, given["weight"], EPS), ROUNDING, dtype=BF16)
    assert_same_bits("residual", residual, total)
    y, residual = NORM.rms_norm(given["x"], given["weight"], residual_TD=None, eps=EPS, out_dtype=BF16)
    assert_same_bits("residual of the first layer", residual, given["x"].float())
    stream = total.clone()
    y, residual = NORM.rms_norm(stream, given["weight"], residual_TD=None, eps=EPS, out_dtype=BF16)
    assert_close("y of the stream", y, oracle.rms_norm(total, given["weight"], EPS), ROUNDING, dtype=BF16)
    assert residual is stream
    assert_same_bits("stream", stream, total)
    for norm_first in (False, True):
        y = NORM.gated_rms_norm(given["x"], given["z"], given["weight"], groups=shape.groups, eps=EPS, norm_before_gate=norm_first)
        expected = oracle.gated_rms_norm(given["x"], given["z"], given["weight"], groups=shape.groups, eps=EPS, norm_before_gate=norm_first)
        assert_close("gated y", y, expected, ROUNDING, dtype=BF16)


@pytest.mark.parametrize("case", POOL_CASES, ids=lambda case: case.name)
def test_pool(case: PoolCase) -> None:
    wanted, found = make_pool(case, dtype=BF16), make_pool(case, dtype=BF16)
    arguments = {"poolings": case.poolings, "window_tokens": case.window_tokens}
    expected, expected_state = pool(wanted.hidden_TD, state=wanted.state, segments=wanted.segments, backend="torch", **arguments)
    output, state = POOL.pool(found.hidden_TD, state=found.state, segments=found.segments, **arguments)
    for kind in ("documents", "windows"):
        vectors, others = getattr(output, kind), getattr(expected, kind)
        assert set(vectors) == set(others)
        for name in vectors:
            torch.testing.assert_close(vectors[name], others[name], rtol=1e-6, atol=1e-7)
    for name, table in state.tables.items():
        torch.testing.assert_close(table, expected_state.tables[name], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_pool_hides_no_number_that_is_none(value: float, device: str) -> None:
    """A token that has blown up shows in every vector it is in, the maximum too, as on the PyTorch path, and in no other."""
    case = grouped(4, 5 * TILE)
    arguments: dict[str, Any] = {"poolings": case.poolings, "window_tokens": case.window_tokens}
    run = POOL.pool if device == "cpu" else partial(pool, backend="cutile")
    found, expected = [], []
    for results, pooled, on in ((found, run, device), (expected, partial(pool, backend="torch"), "cpu")):
        inputs = make_pool(case, on, dtype=BF16)
        longest = max(inputs.segments.entries, key=lambda entry: entry.num_tokens)
        inputs.hidden_TD[longest.rows.start + 70, 3] = value
        output, state = pooled(inputs.hidden_TD, state=inputs.state, segments=inputs.segments, **arguments)
        results += [output.documents[name] for name in case.poolings] + [output.windows[name] for name in case.poolings]
        results += [state.tables[name] for name in sorted(state.tables)]
    assert sum(int(numbers.isfinite().logical_not().sum()) for numbers in expected) > 0
    for numbers, others in zip(found, expected, strict=True):
        torch.testing.assert_close(numbers.cpu(), others, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("window_tokens", [None, TILE, 5 * TILE])
def test_pool_has_the_same_bits_however_many_tiles_are_read_at_once(window_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tile by tile is how they are added: also where a window closes inside a group, and where a group goes past an entry's end."""
    case = grouped(4, window_tokens)
    found = []
    for ahead in (1, 4):
        monkeypatch.setattr(POOL, "AHEAD", ahead)
        inputs = make_pool(case, dtype=BF16)
        arguments = {"poolings": case.poolings, "window_tokens": case.window_tokens}
        output, state = POOL.pool(inputs.hidden_TD, state=inputs.state, segments=inputs.segments, **arguments)
        windows = {f"windows, {name}": vectors for name, vectors in output.windows.items()}
        found.append({**output.documents, **windows, **{f"table {name}": table for name, table in state.tables.items()}})
    one_by_one, in_groups = found
    assert set(one_by_one) == set(in_groups)
    for name, numbers in one_by_one.items():
        assert numbers.numel()
        assert torch.equal(bits(in_groups[name]), bits(numbers)), name


SCORES = (
    LogprobCase("ragged_with_gaps", 320, 96, 1003),
    LogprobCase("T1", 1, 64, 320, wanted=1.0),
    LogprobCase("T65", 65, 64, 257),
    LogprobCase("none_wanted", 64, 32, 300, wanted=0.0),
    LogprobCase("sharp", 128, 64, 512, spread=30.0),
)


@pytest.mark.parametrize("case", SCORES, ids=lambda case: case.name)
def test_logprob(case: LogprobCase) -> None:
    inputs = make_scores(case, dtype=BF16)
    logits = inputs.hidden_TD.double() @ inputs.weight_VD.double().T
    expected = torch.log_softmax(logits, -1).gather(1, inputs.targets_T.clamp(min=0)[:, None])[:, 0]
    found = LOGPROB.logprob(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T)
    assert torch.equal(found.isnan(), inputs.targets_T == UNWANTED)
    wanted = inputs.targets_T != UNWANTED
    torch.testing.assert_close(found.double()[wanted], expected[wanted], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_probability_is_above_one(device: str) -> None:
    """Of tokens that are certain: the target's logit and the largest are summed in two orders, and differ in their last bits."""
    inputs = make_scores(LogprobCase("certain", 128, 256, 300, wanted=1.0, spread=60.0), device, BF16)
    run = LOGPROB.logprob if device == "cpu" else partial(logprob, backend="cutile")
    likeliest = (inputs.hidden_TD.float() @ inputs.weight_VD.float().T).argmax(1)
    found = run(inputs.hidden_TD, inputs.weight_VD, likeliest)
    assert bool((found <= 0).all())
    assert int((found == 0).sum()) > 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logprob_of_no_number_is_none(device: str) -> None:
    """A hidden state that has blown up gives NaN, as on the PyTorch path, and not a certainty; rows beside it keep their bits."""
    inputs = make_scores(LogprobCase("blown_up", 65, 64, 257, wanted=1.0), device, BF16)
    run = LOGPROB.logprob if device == "cpu" else partial(logprob, backend="cutile")
    before = run(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T)
    blown_up = [3, 20, 64]
    inputs.hidden_TD[blown_up, 5] = torch.tensor([math.nan, math.inf, -math.inf], dtype=BF16, device=device)
    found = run(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T)
    assert found.isnan().nonzero()[:, 0].tolist() == blown_up
    expected = logprob(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T, backend="torch")
    assert torch.equal(found.isnan(), expected.isnan())
    rest = torch.ones(65, dtype=torch.bool)
    rest[blown_up] = False
    assert torch.equal(found[rest], before[rest])


@pytest.mark.parametrize(
    ("far", "device"),
    [(-math.inf, "cpu"), (-1e17, "cpu"), pytest.param(-math.inf, "cuda", marks=pytest.mark.gpu)],
    ids=["infinite", "finite", "infinite_cuda"],
)
@pytest.mark.parametrize("vocabulary", [1, 256, 300])
def test_logprob_where_all_logits_are_far_down(vocabulary: int, far: float, device: str) -> None:
    """All -inf, they are none. All alike, below -1e30, they are uniform, save on a GPU, whose fused product leaves no digit of them."""
    inputs = make_scores(LogprobCase("far_down", 65, 64, vocabulary, wanted=1.0), device, BF16)
    run = LOGPROB.logprob if device == "cpu" else partial(logprob, backend="cutile")
    inputs.hidden_TD[:, 5], inputs.weight_VD[:, 5] = 0, 1e15
    before = run(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T)
    if far == -math.inf:
        inputs.hidden_TD[3, 5] = far
    else:
        inputs.hidden_TD[3] = torch.where(torch.arange(64, device=device) == 5, far, 0.0).to(BF16)
    found = run(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T)
    expected = logprob(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T, backend="torch")
    torch.testing.assert_close(found[3], expected[3], rtol=1e-5, atol=1e-4, equal_nan=True)
    rest = torch.arange(65, device=device) != 3
    assert torch.equal(found[rest], before[rest])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_norms_of_rows_that_are_nearly_zero(device: str) -> None:
    """Whose squares are less than eps, in most of them."""
    shape = NormShape("G2", 96, 2)
    given = {name: tensor.to(device) for name, tensor in make_rows(shape, 64, dtype=BF16).items()}
    x, stream = given["x"] * 1e-3, given["residual"] * 1e-3
    add = NORM.rms_norm if device == "cpu" else partial(rms_norm, backend="cutile")
    gate = NORM.gated_rms_norm if device == "cpu" else partial(gated_rms_norm, backend="cutile")
    expected = oracle.rms_norm(stream.cpu() + x.cpu().float(), given["weight"].cpu(), EPS)
    y, _ = add(x, given["weight"], residual_TD=stream, eps=EPS, out_dtype=BF16)
    assert_close("y", y.cpu(), expected, ROUNDING, dtype=BF16)
    options: dict[str, Any] = {"groups": shape.groups, "eps": EPS, "norm_before_gate": True}
    expected = oracle.gated_rms_norm(x.cpu(), given["z"].cpu(), given["weight"].cpu(), **options)
    assert_close("gated y", gate(x, given["z"], given["weight"], **options).cpu(), expected, ROUNDING, dtype=BF16)


def test_steps_without_rows_launch_nothing() -> None:
    """A launch needs a block."""
    none = Layout("none", (), 0, slots=1)
    y_TC, _ = CONV1D.causal_conv1d(**make_inputs(CONVOLUTIONS[0], none, dtype=BF16).arguments(activation="silu"))
    rows, weight = torch.zeros(0, 96, dtype=BF16), torch.ones(96)
    y_TD, _ = NORM.rms_norm(rows, weight, residual_TD=None, eps=EPS, out_dtype=BF16)
    y_TI = NORM.gated_rms_norm(rows, rows, weight, groups=2, eps=EPS, norm_before_gate=False)
    scores = LOGPROB.logprob(rows, torch.ones(9, 96, dtype=BF16), torch.zeros(0, dtype=torch.int64))
    for slots in (0, 4):
        segments, state = Segments.pack((), 0, slots=slots), PoolState.new(1, 96, POOLINGS, TILE)
        output, _ = POOL.pool(rows, state=state, poolings=POOLINGS, segments=segments, window_tokens=TILE)
        assert {tuple(vectors.shape) for vectors in (*output.documents.values(), *output.windows.values())} == {(0, 96)}
    assert [tuple(found.shape) for found in (y_TC, y_TD, y_TI, scores)] == [(0, 96)] * 3 + [(0,)]


def test_convolutions_that_the_kernels_do_not_take() -> None:
    for taps in (1, 5):
        shape = ConvShape("taps", C=96, K=taps, stride=96)
        with pytest.raises(ValueError, match=f"weight_CK: expected 2 to 4 taps on cutile, got {taps}; use the torch backend"):
            CONV1D.causal_conv1d(**make_inputs(shape, EDGES[0], dtype=BF16).arguments(activation="silu"))
    with pytest.raises(ValueError, match="x_TC: expected channels that are a multiple of 16 on cutile, got 40; use the torch backend"):
        CONV1D.causal_conv1d(**make_inputs(ConvShape("C40", C=40, K=4, stride=40), EDGES[0], dtype=BF16).arguments(activation="silu"))


def test_a_step_of_more_rows_than_a_launch_has_blocks_for_is_told() -> None:
    inputs = make_inputs(CONVOLUTIONS[2], EDGES[0], dtype=BF16)
    x_TC = torch.empty(MOST_ROWS + TILE, 32, dtype=BF16, device="meta")
    with pytest.raises(ValueError, match=rf"x_TC: expected at most {MOST_ROWS} rows on cutile, got {MOST_ROWS + TILE}; use smaller steps"):
        CONV1D.causal_conv1d(**inputs.arguments(activation="silu", x_TC=x_TC))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: NORM.rms_norm(torch.zeros(64, 40), torch.ones(40), residual_TD=None, eps=EPS, out_dtype=BF16), "width"),
        (lambda: LOGPROB.logprob(torch.zeros(64, 40), torch.zeros(9, 40), torch.zeros(64, dtype=torch.int64)), "hidden_TD"),
    ],
    ids=["norm", "logprob"],
)
def test_widths_that_no_tile_covers_are_told(call: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*torch backend"):
        call()

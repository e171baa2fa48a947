"""SSD on CUDA Tile against the float64 recurrence: on a CPU over the emulator, and (`-m gpu`) on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import oracle
import pytest
import torch
from compare import assert_same_bits, relative_error
from emulator import runtime
from fences import Fenced
from longscan.kernels import tuning
from longscan.kernels.layouts import EDGES, Layout, names, one
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments
from longscan.kernels.ssd import ssd
from longscan.kernels.ssd.cases import MODELS, Inputs, Shape, make_inputs
from longscan.kernels.ssd.spans import cut
from longscan.kernels.tuning import Setting

Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
"""Of y and of states, relative: three roundings to x's dtype on the way."""
RAGGED = EDGES[0]
SHAPES = (
    Shape("G1", H=8, P=64, G=1, N=128),
    Shape("G8", H=8, P=64, G=8, N=64),
    Shape("P32_N256", H=8, P=32, G=4, N=256),
    Shape("P128", H=8, P=128, G=2, N=64),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "gate": {"gate": True},
    "bounded_time_steps": {"dt_limit": (0.01, 0.05)},
    "fp16": {"dtype": torch.float16},
}
EMULATED = runtime.load("ssd")


def on_emulator(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = {"D_H": None, "dt_bias_H": None, "z_THP": None, **arguments}
    result: tuple[torch.Tensor, torch.Tensor] = EMULATED.ssd(**given)
    return result


def on_gpu(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ssd(**arguments, backend="cutile")


@dataclass(frozen=True)
class Place:
    """What runs the kernels, the device of its tensors, and a shape of its size with two heads a block."""

    run: Run
    device: str
    pairs: Shape

    def inputs(self, layout: Layout = RAGGED, **options: Any) -> Inputs:
        return make_inputs(self.pairs, layout, **{"dtype": torch.bfloat16, "device": self.device, **options})


PLACES = {
    "emulated": Place(on_emulator, "cpu", Shape("small", H=8, P=32, G=2, N=16)),
    "gpu": Place(on_gpu, "cuda", Shape("large", H=8, P=64, G=2, N=128)),
}


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    return PLACES[request.param]


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Off by at most `tolerance`, and no row by ten times that of its own size (of the mean size, where it is smaller)."""
    assert got.shape == expected.shape
    error = relative_error(got, expected)
    assert error <= tolerance, f"{name}: relative error {error:.2e}, allowed {tolerance:.0e}"
    difference, sizes = ((t.flatten(0, -2).norm(dim=-1)) for t in (got.double() - expected, expected))
    worst = float((difference / sizes.maximum(sizes.square().mean().sqrt())).max())
    assert worst <= 10 * tolerance, f"{name}: a row is off by {worst:.2e}"


def with_spans(inputs: Inputs, span_tiles: int) -> Inputs:
    s = inputs.segments
    segments = Segments.pack(s.entries, s.num_tiles, s.first_tile.device, span_tiles=span_tiles)
    return Inputs(inputs.tensors, inputs.dt_limit, segments)


def check(run: Run, inputs: Inputs) -> None:
    """All real rows and all states together; what belongs to nobody is zero, and slots that nobody writes are as they were."""
    tensors, entries = inputs.tensors, inputs.segments.entries
    dtype = tensors["x_THP"].dtype
    y_THP, ssm_SHNP = run(**inputs.arguments())
    outputs, states = [], []
    for entry in entries:
        of_tokens = [tensors[name][entry.rows] for name in ("x_THP", "dt_TH", "B_TGN", "C_TGN")]
        y, state = oracle.ssd_recurrence(
            *of_tokens[:2],
            tensors["A_H"],
            *of_tokens[2:],
            None if entry.lane_in == NO_LANE else tensors["ssm_SHNP"][entry.lane_in],
            D_H=tensors.get("D_H"),
            dt_bias_H=tensors.get("dt_bias_H"),
            z_LHP=tensors["z_THP"][entry.rows] if "z_THP" in tensors else None,
            dt_limit=inputs.dt_limit,
        )
        outputs.append(y)
        states.append(state)
    rows = torch.cat([torch.arange(entry.rows.start, entry.rows.stop) for entry in entries])
    assert y_THP.dtype == dtype
    assert_close("y", y_THP.cpu()[rows], torch.cat(outputs), TOLERANCE[dtype])
    kept = [e for e, entry in enumerate(entries) if entry.lane_out != NO_LANE]
    written = [entries[e].lane_out for e in kept]
    if kept:
        assert_close("states", ssm_SHNP.cpu()[written], torch.stack([states[e] for e in kept]), TOLERANCE[dtype])
    others = sorted(set(range(len(ssm_SHNP))) - set(written))
    before = inputs.tensors["ssm_SHNP"][others]
    assert torch.equal(ssm_SHNP[others].view(torch.int32), before.view(torch.int32)), "a slot that nobody writes has changed"
    owned = inputs.segments.tile_entry.repeat_interleave(TILE) >= 0
    assert bool((y_THP[~owned] == 0).all()), "rows that belong to nobody are zero"
    assert bool(y_THP.isfinite().all()), "rows of padding are finite"


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.slow] * (layout.num_tiles > 40)) for layout in EDGES], ids=names(EDGES)
)
def test_ssd(place: Place, layout: Layout) -> None:
    check(place.run, place.inputs(layout))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_ssd_of_other_shapes(place: Place, shape: Shape) -> None:
    check(place.run, make_inputs(shape, RAGGED, dtype=torch.bfloat16, device=place.device))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_ssd_at_the_size_of_a_model(shape: Shape) -> None:
    check(on_gpu, make_inputs(shape, RAGGED, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_ssd_with_options(place: Place, options: dict[str, Any]) -> None:
    check(place.run, place.inputs(**options))


def test_ssd_without_skip_and_bias(place: Place) -> None:
    inputs = place.inputs()
    del inputs.tensors["D_H"], inputs.tensors["dt_bias_H"]
    check(place.run, inputs)


def test_zeros_are_made_only_for_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are a launch of their own in every layer."""
    made: list[tuple[int, ...]] = []

    def zeros(*size: int, **options: Any) -> torch.Tensor:
        made.append(size)
        return torch.zeros(*size, **options)

    monkeypatch.setattr(EMULATED.torch, "zeros", zeros, raising=False)
    inputs = PLACES["emulated"].inputs()
    on_emulator(**inputs.arguments())
    assert made == []
    del inputs.tensors["D_H"]
    on_emulator(**inputs.arguments())
    assert made == [(8,)]


def test_small_and_large_time_steps_keep_their_digits(place: Place) -> None:
    """Raw time steps from -12 to 12: softplus near e^raw and near raw, decays from none to all at once."""
    inputs = place.inputs()
    steps = torch.linspace(-12, 12, inputs.tensors["dt_TH"].numel(), device=place.device)
    order = torch.randperm(len(steps), generator=torch.Generator().manual_seed(1))
    inputs.tensors["dt_TH"] = steps[order.to(place.device)].view_as(inputs.tensors["dt_TH"]).bfloat16()
    del inputs.tensors["dt_bias_H"]
    check(place.run, inputs)


@pytest.mark.parametrize(("low", "high"), [(-14, -12), (-22, -18)])
def test_time_steps_that_are_all_small_keep_their_digits(place: Place, low: float, high: float) -> None:
    """e^raw of some millionths and of billionths, where 1 + e^raw has a digit of it left and none; nothing else is there to hide it."""
    inputs = place.inputs()
    steps = torch.linspace(low, high, inputs.tensors["dt_TH"].numel(), device=place.device)
    inputs.tensors["dt_TH"] = steps.view_as(inputs.tensors["dt_TH"]).bfloat16()
    inputs.tensors["ssm_SHNP"] *= math.exp(high)
    del inputs.tensors["dt_bias_H"], inputs.tensors["D_H"]
    check(place.run, inputs)


@pytest.mark.parametrize("largest", [9e5, 4e6])
def test_products_of_b_and_c_that_are_large(place: Place, largest: float) -> None:
    """Up to a million they keep their digits on the way through fp16; beyond, outputs are finite and states what they are."""
    inputs = place.inputs(one("T130", 130), poison=False)
    B_TGN, C_TGN = inputs.tensors["B_TGN"], inputs.tensors["C_TGN"]
    products = torch.einsum("agn,bgn->gab", C_TGN.double(), B_TGN.double())
    factor = (largest / float(products.abs().max())) ** 0.5
    inputs.tensors["B_TGN"], inputs.tensors["C_TGN"] = B_TGN * factor, C_TGN * factor
    if largest < 1e6:
        check(place.run, inputs)
        return
    (entry,) = inputs.segments.entries
    y_THP, ssm_SHNP = place.run(**inputs.arguments())
    _, plain_SHNP = ssd(**inputs.arguments(), backend="torch")
    assert bool(y_THP[entry.rows].isfinite().all())
    assert relative_error(ssm_SHNP[entry.lane_out], plain_SHNP[entry.lane_out].double()) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("span_tiles", [None, 2])
@pytest.mark.parametrize("name", ["dt_TH", "B_TGN"])
def test_a_number_that_is_none_shows_from_its_token_on(place: Place, name: str, span_tiles: int | None) -> None:
    """In every output that follows and in the state, as on the PyTorch path; the other documents keep their bits."""
    inputs = alone(place.inputs(poison=False), list(RAGGED.entries), span_tiles)
    before = place.run(**inputs.arguments())
    first, *others = RAGGED.entries
    inputs.tensors[name] = inputs.tensors[name].clone()
    inputs.tensors[name][first.rows.start + 70] = math.nan
    y_THP, ssm_SHNP = place.run(**inputs.arguments())
    assert y_THP[first.rows].isnan().any(2).any(1).nonzero()[:, 0].tolist() == list(range(70, first.num_tokens))
    assert bool(ssm_SHNP[first.lane_out].isnan().any())
    for entry in others:
        assert_same_bits(f"y of {entry}", y_THP[entry.rows], before[0][entry.rows])
        if entry.lane_out != NO_LANE:
            assert_same_bits(f"state of {entry}", ssm_SHNP[entry.lane_out], before[1][entry.lane_out])


@pytest.mark.parametrize("span_tiles", [1, 2, 3, 100])
def test_spans(place: Place, span_tiles: int) -> None:
    check(place.run, with_spans(place.inputs(), span_tiles))


def test_spans_change_the_last_bits_of_states_and_no_more(place: Place) -> None:
    """A state before a span is added to the span's own, where one pass goes from tile to tile: so a run keeps to one form."""
    inputs = place.inputs(one("T1000", 1000))
    (y_THP, ssm_SHNP), (spanned_THP, spanned_SHNP) = (place.run(**given.arguments()) for given in (inputs, with_spans(inputs, 2)))
    (entry,) = inputs.segments.entries
    state, spanned = ssm_SHNP[entry.lane_out], spanned_SHNP[entry.lane_out]
    assert relative_error(spanned, state) <= 1e-5
    assert relative_error(spanned_THP[entry.rows], y_THP[entry.rows]) <= 1e-3
    if place.device == "cpu":
        assert not torch.equal(spanned, state), "were they equal, a run could change its form at any step"


SPANNED = Layout(
    "spanned",
    (
        Entry(0, 570, lane_in=NO_LANE, lane_out=0),  # nine tiles from zero, and kept
        Entry(9, 250, position=128, lane_in=1, lane_out=NO_LANE, ends=True),  # four from a lane, and not kept
        Entry(13, 60, lane_in=NO_LANE, lane_out=NO_LANE, ends=True),  # begins and ends in one span
        Entry(14, 64, position=64, lane_in=2, lane_out=NO_LANE, ends=True),
        Entry(15, 128, lane_in=NO_LANE, lane_out=3),
    ),
    num_tiles=17,
    slots=4,
)
SETTINGS = {
    "one_at_a_time": ("ssd.span_starts", Setting({"occupancy": 4}, {"SPANS": 1, "ROWS": 8})),
    "eight_at_once": ("ssd.span_starts", Setting({"occupancy": 4}, {"SPANS": 8})),
    "wide_blocks": ("ssd.span_starts", Setting({"occupancy": 4}, {"SPANS": 2, "ROWS": 32})),
    "two_heads": ("ssd.span_ends", Setting({"occupancy": 1}, {"HEADS": 2, "LATENCY": 4})),
}


@pytest.mark.parametrize(("kernel", "tried"), SETTINGS.values(), ids=list(SETTINGS))
def test_spans_have_the_same_bits_whatever_the_setting(place: Place, kernel: str, tried: Setting) -> None:
    inputs = with_spans(place.inputs(SPANNED), 1)
    expected = place.run(**inputs.arguments())
    tuning.asked.discard(kernel)
    with Fenced(), tuning.trying(kernel, tried):
        y_THP, ssm_SHNP = place.run(**inputs.arguments())
    assert kernel in tuning.asked
    assert_same_bits("y", y_THP, expected[0])
    assert_same_bits("states", ssm_SHNP[[0, 3]], expected[1][[0, 3]])


def test_time_steps_have_the_same_bits_for_all_heads_in_a_block(place: Place) -> None:
    inputs = make_inputs(Shape("H24", H=24, P=32, G=1, N=16), one("T130", 130), dtype=torch.bfloat16, device=place.device)
    expected = place.run(**inputs.arguments())
    with Fenced(), tuning.trying("ssd.time_steps", Setting({}, {"BLOCKS": 3})):
        y_THP, ssm_SHNP = place.run(**inputs.arguments())
    check(place.run, inputs)
    assert_same_bits("y", y_THP, expected[0])
    assert_same_bits("state", ssm_SHNP[0], expected[1][0])


@pytest.mark.parametrize("groups", [1, 2])
def test_what_comes_before_the_scan_is_the_same_in_one_launch(place: Place, groups: int) -> None:
    """Bit for bit, save on a GPU with two groups: blocks of four heads instead of eight add up time steps in another order there."""
    inputs = make_inputs(Shape("H24", H=24, P=32, G=groups, N=16), SPANNED, dtype=torch.bfloat16, device=place.device)
    expected = place.run(**inputs.arguments())
    with tuning.trying("ssd.prepare", Setting({}, {"JOINED": 1})):
        with Fenced():
            y_THP, ssm_SHNP = place.run(**inputs.arguments())
        check(place.run, inputs)
    if groups == 1 or place.device == "cpu":
        assert_same_bits("y", y_THP, expected[0])
        assert_same_bits("states", ssm_SHNP, expected[1])


def test_states_of_spans_that_nobody_needs_are_neither_made_nor_read() -> None:
    spans = cut(Segments.pack(SPANNED.entries, SPANNED.num_tiles, span_tiles=2))
    assert spans.first_span.tolist()[:5] == [0, 5, 7, 8, 9]
    assert spans.source.tolist() == [NO_LANE, 1, 2, 3, 4, 5, 6, NO_LANE, 8, NO_LANE, *[NO_LANE] * 6]
    assert [tokens > 0 for tokens in spans.wanted.tolist()] == [True] * 5 + [True, False, False, False, True] + [False] * 6


def test_spans_end_at_the_documents_own_positions() -> None:
    """Wherever in the step, and in the document, an entry begins."""
    spans = cut(Segments.pack([Entry(1, 300, position=3 * TILE), Entry(7, 64, position=64)], 8, span_tiles=2))
    assert spans.first_tile.tolist()[:4] == [1, 2, 4, 7]
    assert spans.num_tokens.tolist()[:5] == [64, 128, 108, 64, 0]
    assert spans.num_spans.tolist()[:2] == [3, 1]


def alone(inputs: Inputs, entries: list[Entry], span_tiles: int | None) -> Inputs:
    """The same tensors, for `entries` only."""
    s = inputs.segments
    return Inputs(inputs.tensors, inputs.dt_limit, Segments.pack(entries, s.num_tiles, s.first_tile.device, span_tiles=span_tiles))


@pytest.mark.parametrize("span_tiles", [None, 2])
def test_a_document_has_the_same_bits_alone_as_in_company(place: Place, span_tiles: int | None) -> None:
    inputs = place.inputs()
    together = place.run(**alone(inputs, list(RAGGED.entries), span_tiles).arguments())
    for entry in RAGGED.entries:
        y_THP, ssm_SHNP = place.run(**alone(inputs, [entry], span_tiles).arguments())
        assert_same_bits(f"y of {entry}", y_THP[entry.rows], together[0][entry.rows])
        if entry.lane_out != NO_LANE:
            assert_same_bits(f"state of {entry}", ssm_SHNP[entry.lane_out], together[1][entry.lane_out])


@pytest.mark.parametrize(("span_tiles", "cuts"), [(None, (0, 3, 4, 10, 16)), (2, (0, 4, 6, 16))], ids=["one_pass", "spans"])
def test_a_document_has_the_same_bits_whole_as_in_parts(place: Place, span_tiles: int | None, cuts: tuple[int, ...]) -> None:
    layout = one("T1000", 1000)
    inputs = place.inputs(layout)
    whole = layout.entries[0]
    y_THP, ssm_SHNP = place.run(**alone(inputs, [whole], span_tiles).arguments())
    table = inputs.tensors["ssm_SHNP"].clone()
    source = whole.lane_in
    for first, last in pairwise(cuts):
        tokens = min(last * TILE, whole.num_tokens) - first * TILE
        part = Entry(whole.first_tile + first, tokens, whole.position + first * TILE, lane_in=source, lane_out=whole.lane_out)
        y, table = place.run(**alone(inputs, [part], span_tiles).arguments(ssm_SHNP=table))
        assert_same_bits(f"y of tiles {first} to {last}", y[part.rows], y_THP[part.rows])
        source = whole.lane_out
    assert_same_bits("state", table[whole.lane_out], ssm_SHNP[whole.lane_out])


def test_slots_past_the_entries_do_nothing(place: Place) -> None:
    inputs = place.inputs()
    s = inputs.segments
    check(place.run, Inputs(inputs.tensors, inputs.dt_limit, Segments.pack(s.entries, s.num_tiles, place.device, slots=12)))
    check(place.run, Inputs(inputs.tensors, inputs.dt_limit, Segments.pack(s.entries, s.num_tiles, place.device, slots=12, span_tiles=2)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": torch.float32}, "x_THP: expected bfloat16 or float16 on cutile, got torch.float32; use the torch backend"),
        ({"shape": Shape("P16", H=8, P=16, G=1, N=64)}, r"x_THP: expected a last axis of \(32, 64, 128\) on cutile, got 16"),
        ({"shape": Shape("N32", H=8, P=64, G=1, N=32)}, r"B_TGN: expected a last axis of \(16, 64, 128, 256\) on cutile, got 32"),
        ({"shape": Shape("H3", H=3, P=64, G=1, N=64)}, r"x_THP: expected strides \(a multiple of 8, 64, 1\)"),
    ],
    ids=["fp32", "P", "N", "strides"],
)
def test_what_the_kernels_do_not_take(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"shape": PLACES["emulated"].pairs, "layout": one("T64", 64), "dtype": torch.bfloat16, **changed}
    with pytest.raises(ValueError, match=message):
        on_emulator(**make_inputs(**given).arguments())


def test_a_table_that_is_not_contiguous() -> None:
    inputs = PLACES["emulated"].inputs(one("T64", 64))
    with pytest.raises(ValueError, match="ssm_SHNP: expected a contiguous table"):
        on_emulator(**inputs.arguments(ssm_SHNP=inputs.tensors["ssm_SHNP"].transpose(2, 3)))

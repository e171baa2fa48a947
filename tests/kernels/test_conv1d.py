"""The convolution: right against the definition, its tail above all, and the same bits however a document is cut."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from compare import assert_close, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from longscan.kernels.conv1d import causal_conv1d
from longscan.kernels.conv1d.cases import MODELS, SMALL, Inputs, Shape, make_inputs
from longscan.kernels.layouts import EDGES, Layout, names, one, packed
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments
from threads import torch_threads

RAGGED = EDGES[0]
BY_NAME = {shape.name: shape for shape in SMALL}


def check_against_truth(inputs: Inputs, tolerance: float, **options: Any) -> None:
    given = inputs.arguments(**options)
    y_TC, tail_SKC = causal_conv1d(**given, backend="torch")
    assert bool(y_TC.isfinite().all()), "rows of padding and of nobody are finite"
    before = inputs.tensors["tail_SKC"]
    written = set()
    for entry in inputs.segments.entries:
        past = None if entry.lane_in == NO_LANE else before[entry.lane_in]
        y, tail = oracle.causal_conv(
            given["x_TC"][entry.rows], given["weight_CK"], given["bias_C"], past, activation=options.get("activation", "silu")
        )
        assert_close(f"y of {entry}", y_TC[entry.rows], y, tolerance, dtype=before.dtype)
        if entry.lane_out != NO_LANE:
            assert_close(f"tail of {entry}", tail_SKC[entry.lane_out], tail, 0.0, dtype=before.dtype)
            written.add(entry.lane_out)
    for slot in set(range(len(before))) - written:
        assert torch.equal(tail_SKC[slot].view(torch.uint8), before[slot].view(torch.uint8)), f"slot {slot} is as it was"


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
@pytest.mark.parametrize("layout", EDGES, ids=names(EDGES))
def test_causal_conv1d(layout: Layout, shape: Shape) -> None:
    check_against_truth(make_inputs(shape, layout), 1e-6)


def test_causal_conv1d_at_the_size_of_a_model() -> None:
    check_against_truth(make_inputs(MODELS[1], RAGGED), 1e-6)


def test_causal_conv1d_in_bfloat16() -> None:
    check_against_truth(make_inputs(BY_NAME["K4"], RAGGED, dtype=torch.bfloat16), 3e-3)


@pytest.mark.gpu
def test_causal_conv1d_in_pytorch_on_a_gpu() -> None:
    check_against_truth(make_inputs(BY_NAME["K4"], RAGGED, device="cuda"), 1e-6)


def test_causal_conv1d_with_one_tap() -> None:
    """K = 1: nothing is carried, and the tail has no rows."""
    check_against_truth(make_inputs(Shape("K1", C=32, K=1, stride=32), RAGGED), 1e-6)


def test_causal_conv1d_without_bias_and_activation() -> None:
    check_against_truth(make_inputs(BY_NAME["K4"], RAGGED), 1e-6, bias_C=None, activation=None)


def test_what_padding_holds_changes_nothing() -> None:
    inputs = make_inputs(BY_NAME["K4"], RAGGED)
    real = inputs.segments.real_rows()
    garbage = inputs.tensors["x_TC"].clone()
    garbage[RAGGED.owned_rows() & ~real] = 1e4
    y_TC, tail_SKC = causal_conv1d(**inputs.arguments(), backend="torch")
    y2_TC, tail2_SKC = causal_conv1d(**inputs.arguments(x_TC=garbage), backend="torch")
    assert_same_bits("y", y2_TC[real], y_TC[real])
    assert torch.equal(tail2_SKC.view(torch.int32), tail_SKC.view(torch.int32))


def run(inputs: Inputs, rows: torch.Tensor, cuts: list[list[int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run documents rows[d] cut at cuts[d] (tokens), in step i those that have an i-th piece. Returns each one's y, and the tails."""
    tail_SKC = torch.zeros(len(rows), *inputs.tensors["tail_SKC"].shape[1:])
    outputs: list[list[torch.Tensor]] = [[] for _ in cuts]
    for step in range(max(len(edges) for edges in cuts) - 1):
        entries, parts, tile = [], [], 0
        for d, edges in enumerate(cuts):
            if step + 1 < len(edges):
                start, end = edges[step], edges[step + 1]
                entries.append(Entry(tile, end - start, position=start, lane_in=d if step else NO_LANE, lane_out=d))
                parts.append(rows[d, start : start + entries[-1].num_tiles * TILE])
                tile += entries[-1].num_tiles
        given = inputs.arguments(x_TC=torch.cat(parts), tail_SKC=tail_SKC, segments=Segments.pack(entries, tile))
        y_TC, tail_SKC = causal_conv1d(**given, backend="torch")
        for entry in entries:
            d = entry.lane_out
            outputs[d].append(y_TC[entry.rows])
    return [torch.cat(parts) for parts in outputs], tail_SKC


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    borders=st.lists(st.integers(1, 4), max_size=3, unique=True),
    shape=st.sampled_from(SMALL),
    threads=st.sampled_from([1, 2, 3]),
)
def test_bits_do_not_depend_on_cuts_or_company(lengths: list[int], borders: list[int], shape: Shape, threads: int) -> None:
    inputs = make_inputs(shape, packed("unused", [64]))
    rows = torch.randn(len(lengths), 320, shape.C, generator=torch.Generator().manual_seed(1))
    cut = [[0, *sorted(TILE * border for border in borders if TILE * border < length), length] for length in lengths]
    with torch_threads(threads):
        together, tails = run(inputs, rows, cut)
    with torch_threads(1):
        for d, length in enumerate(lengths):
            (alone,), tail = run(inputs, rows[d : d + 1], [[0, length]])
            assert_same_bits(f"y of document {d}", together[d], alone)
            assert_same_bits(f"tail of document {d}", tails[d], tail[0])


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_a_last_piece_of_few_tokens(last: int) -> None:
    inputs = make_inputs(BY_NAME["K4"], packed("unused", [64]))
    rows = torch.randn(1, 192, 96, generator=torch.Generator().manual_seed(2))
    (y,), tail = run(inputs, rows, [[0, 64, 128, 128 + last]])
    expected, expected_tail = oracle.causal_conv(rows[0, : 128 + last], inputs.tensors["weight_CK"], inputs.tensors["bias_C"])
    assert_close("y", y, expected, 1e-6, dtype=torch.float32)
    assert_close("tail", tail[0], expected_tail, 0.0, dtype=torch.float32)


def test_gradients_reach_every_input() -> None:
    entries = (Entry(0, 66, lane_in=0, lane_out=1), Entry(2, 2, lane_in=NO_LANE, lane_out=2))
    inputs = make_inputs(Shape("tiny", C=2, K=3, stride=2), Layout("two", entries, 3, slots=3), dtype=torch.float64, poison=False)

    def run_with(x_TC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor, tail_SKC: torch.Tensor) -> tuple[torch.Tensor, ...]:
        changed = {"x_TC": x_TC, "weight_CK": weight_CK, "bias_C": bias_C, "tail_SKC": tail_SKC}
        return causal_conv1d(**inputs.arguments(**changed), backend="torch")

    leaves = [inputs.tensors[name].clone().requires_grad_() for name in ("x_TC", "weight_CK", "bias_C", "tail_SKC")]
    assert torch.autograd.gradcheck(run_with, leaves)


def test_recording_gradients_changes_no_result_and_not_the_table() -> None:
    inputs = make_inputs(BY_NAME["K4"], RAGGED)
    y_TC, tail_SKC = causal_conv1d(**inputs.arguments(), backend="torch")
    given = inputs.arguments(weight_CK=inputs.tensors["weight_CK"].clone().requires_grad_())
    y2_TC, tail2_SKC = causal_conv1d(**given, backend="torch")
    assert_close("y", y2_TC, y_TC, 1e-6, dtype=torch.float32)
    assert torch.equal(tail2_SKC.view(torch.int32), tail_SKC.view(torch.int32))
    assert torch.equal(given["tail_SKC"].view(torch.int32), inputs.tensors["tail_SKC"].view(torch.int32))
    y2_TC.square().sum().backward()
    assert bool(given["weight_CK"].grad.isfinite().all()), "the NaN of tiles that belong to nobody reaches no gradient"


def test_the_table_is_updated_in_place() -> None:
    given = make_inputs(BY_NAME["K4"], one("T65", 65)).arguments()
    _, tail_SKC = causal_conv1d(**given, backend="torch")
    assert tail_SKC is given["tail_SKC"]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("rows", {"x_TC": torch.zeros(64, 96)}, r"x_TC: expected shape \[192, 96\], got \[64, 96\]"),
    ("taps", {"weight_CK": torch.zeros(96, 3)}, r"tail_SKC: expected shape \[3, 2, 96\], got \[3, 3, 96\]"),
    ("bias", {"bias_C": torch.zeros(1)}, r"bias_C: expected shape \[96\], got \[1\]"),
    ("tail", {"tail_SKC": torch.zeros(3, 3, 96, dtype=torch.bfloat16)}, "tail_SKC: expected dtype torch.float32, got torch.bfloat16"),
    ("lanes", {"tail_SKC": torch.zeros(2, 3, 96)}, "tail_SKC: expected more than 2 slots .*, got 2"),
    ("no_channels", {"x_TC": torch.zeros(192, 0)}, r"x_TC: expected C to be at least 1, got shape \[192, 0\]"),
    ("segments", {"segments": one("T64", 64).segments("meta")}, "segments: expected device cpu, as tail_SKC, got meta"),
    ("activation", {"activation": "relu"}, "activation: expected 'silu' or None, got 'relu'"),
    ("no_gpu", {"backend": "cutile"}, "backend: expected 'torch' for tensors on cpu, got 'cutile'"),
]


@pytest.mark.parametrize(("changed", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_does_not_fit_is_named(changed: dict[str, Any], message: str) -> None:
    inputs = make_inputs(BY_NAME["K4"], one("T64", 64))
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**inputs.arguments(**{"backend": "torch", **changed}))


@pytest.mark.parametrize("length", range(60, 70))
def test_the_tail_is_the_last_inputs(length: int) -> None:
    inputs = make_inputs(BY_NAME["K4"], packed("unused", [64]))
    rows = torch.randn(1, 192, 96, generator=torch.Generator().manual_seed(3))
    _, tail = run(inputs, rows, [[0, length]])
    assert torch.equal(tail[0], rows[0, length - 3 : length])

"""SSD: right against the recurrence, and the same bits however a document is cut and whoever is beside it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import oracle
import pytest
import torch
from compare import assert_close, assert_same_bits, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from longscan.kernels.layouts import EDGES, Layout, names, one, packed
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments
from longscan.kernels.ssd import ssd
from longscan.kernels.ssd.cases import MODELS, SMALL, Inputs, Shape, make_inputs
from threads import torch_threads

RAGGED = EDGES[0]
TINY = Shape("tiny", H=2, P=8, G=1, N=4)
OF_TOKENS = ("x_THP", "dt_TH", "B_TGN", "C_TGN", "z_THP")


def truth(inputs: Inputs, entry: Entry) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = inputs.tensors
    x, dt, B, C = (tensors[name][entry.rows] for name in OF_TOKENS[:4])
    return oracle.ssd_recurrence(
        x,
        dt,
        tensors["A_H"],
        B,
        C,
        None if entry.lane_in == NO_LANE else tensors["ssm_SHNP"][entry.lane_in],
        D_H=tensors.get("D_H"),
        dt_bias_H=tensors.get("dt_bias_H"),
        z_LHP=tensors["z_THP"][entry.rows] if "z_THP" in tensors else None,
        dt_limit=inputs.dt_limit,
    )


def check_against_truth(inputs: Inputs, tolerance: float) -> None:
    y_THP, ssm_SHNP = ssd(**inputs.arguments(), backend="torch")
    assert bool(y_THP.isfinite().all()), "rows of padding and of nobody are finite"
    written = set()
    for entry in inputs.segments.entries:
        y, state = truth(inputs, entry)
        assert_close(f"y of {entry}", y_THP[entry.rows], y, tolerance, dtype=inputs.tensors["x_THP"].dtype)
        if entry.lane_out != NO_LANE:
            assert_close(f"state of {entry}", ssm_SHNP[entry.lane_out], state, tolerance, dtype=torch.float32)
            written.add(entry.lane_out)
    kept = [slot for slot in range(len(ssm_SHNP)) if slot not in written]
    assert torch.equal(ssm_SHNP[kept].view(torch.int32), inputs.tensors["ssm_SHNP"][kept].view(torch.int32)), "other slots are as they were"


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
@pytest.mark.parametrize("layout", EDGES, ids=names(EDGES))
def test_ssd(layout: Layout, shape: Shape) -> None:
    check_against_truth(make_inputs(shape, layout), 1e-5)


@pytest.mark.parametrize("shape", MODELS[:2], ids=lambda shape: shape.name)
def test_ssd_at_the_size_of_a_model(shape: Shape) -> None:
    check_against_truth(make_inputs(shape, RAGGED), 1e-5)


def test_ssd_with_a_gate() -> None:
    check_against_truth(make_inputs(SMALL[1], RAGGED, gate=True), 1e-5)


def test_ssd_with_bounded_time_steps() -> None:
    check_against_truth(make_inputs(SMALL[1], RAGGED, dt_limit=(0.01, 0.05)), 1e-5)


def test_ssd_without_skip_and_bias() -> None:
    inputs = make_inputs(SMALL[1], RAGGED)
    del inputs.tensors["D_H"], inputs.tensors["dt_bias_H"]
    check_against_truth(inputs, 1e-5)


@pytest.mark.parametrize("raw", [-60.0, -30.0, 12.0, 60.0])
def test_ssd_with_extreme_time_steps(raw: float) -> None:
    """Nothing decays, or everything at once: exponents of hundreds either way end in no inf and no NaN."""
    inputs = make_inputs(SMALL[0], RAGGED)
    inputs.tensors["dt_TH"] = inputs.tensors["dt_TH"] + raw
    check_against_truth(inputs, 1e-5)


def test_ssd_keeps_its_digits_after_strong_decay() -> None:
    """Tiles whose first rows decay by e^-800 and the others hardly at all: what counts are small differences of large sums."""
    inputs = make_inputs(SMALL[0], one("T1000", 1000))
    dt_TH = torch.full_like(inputs.tensors["dt_TH"], 0.005).expm1().log()
    dt_TH[torch.arange(len(dt_TH)) % TILE < 16] = 3.0
    inputs.tensors["dt_TH"] = dt_TH
    inputs.tensors["A_H"] = torch.full_like(inputs.tensors["A_H"], -16.0)
    del inputs.tensors["dt_bias_H"], inputs.tensors["D_H"]
    check_against_truth(inputs, 1e-6)


def test_ssd_in_bfloat16_keeps_its_state_in_float32() -> None:
    check_against_truth(make_inputs(SMALL[1], RAGGED, dtype=torch.bfloat16, gate=True), 4e-3)
    inputs = make_inputs(SMALL[1], RAGGED, dtype=torch.bfloat16)
    _, ssm_SHNP = ssd(**inputs.arguments(), backend="torch")
    for entry in inputs.segments.entries:
        if entry.lane_out != NO_LANE:
            assert relative_error(ssm_SHNP[entry.lane_out], truth(inputs, entry)[1]) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)], ids=["float32", "bfloat16"])
def test_ssd_in_pytorch_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    check_against_truth(make_inputs(SMALL[1], RAGGED, dtype=dtype, device="cuda", gate=True), tolerance)


def test_what_padding_holds_changes_nothing() -> None:
    inputs = make_inputs(SMALL[1], RAGGED, gate=True)
    real = inputs.segments.real_rows()
    padding = RAGGED.owned_rows() & ~real
    garbage = {name: inputs.tensors[name].clone() for name in OF_TOKENS}
    for tensor in garbage.values():
        tensor[padding] = 1e4 * torch.randn_like(tensor[padding])
    y_THP, ssm_SHNP = ssd(**inputs.arguments(), backend="torch")
    y2_THP, ssm2_SHNP = ssd(**inputs.arguments(**garbage), backend="torch")
    assert_same_bits("y", y2_THP[real], y_THP[real])
    assert torch.equal(ssm2_SHNP.view(torch.int32), ssm_SHNP.view(torch.int32))


class Document:
    """Rows of one document, to be packed in pieces and in company."""

    def __init__(self, length: int, shape: Shape, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.inputs = make_inputs(shape, packed("document", [length]), seed=seed, dtype=dtype, gate=True)
        self.length = length

    def rows(self, name: str, start: int, tokens: int) -> torch.Tensor:
        tiles = -(-tokens // TILE)
        return self.inputs.tensors[name][start : start + tiles * TILE]

    def cut(self, borders: list[int]) -> list[tuple[int, int]]:
        """(start, tokens) of the pieces between `borders`, given in tiles."""
        edges = [0, *sorted({TILE * border for border in borders if TILE * border < self.length}), self.length]
        return [(start, end - start) for start, end in pairwise(edges)]


def run(documents: list[Document], pieces: list[list[tuple[int, int]]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run each document's pieces, in step i those that have an i-th piece. Returns each document's y, and the states."""
    shared = documents[0].inputs
    ssm_SHNP = torch.cat([document.inputs.tensors["ssm_SHNP"] for document in documents])
    outputs: list[list[torch.Tensor]] = [[] for _ in documents]
    for step in range(max(len(cuts) for cuts in pieces)):
        here = [(d, *cuts[step]) for d, cuts in enumerate(pieces) if step < len(cuts)]
        entries, tile = [], 0
        for d, start, tokens in here:
            entries.append(Entry(tile, tokens, position=start, lane_in=d, lane_out=d))
            tile += entries[-1].num_tiles
        step_inputs = {name: torch.cat([documents[d].rows(name, start, tokens) for d, start, tokens in here]) for name in OF_TOKENS}
        segments = Segments.pack(entries, tile)
        y_THP, ssm_SHNP = ssd(**shared.arguments(**step_inputs, ssm_SHNP=ssm_SHNP, segments=segments), backend="torch")
        for entry, (d, _, _) in zip(entries, here, strict=True):
            outputs[d].append(y_THP[entry.rows])
    return [torch.cat(parts) for parts in outputs], ssm_SHNP


def check_same_bits(documents: list[Document], borders: list[list[int]], threads: int) -> None:
    """Whole and alone with one thread, against cut and in company with `threads`."""
    pieces = [document.cut(cuts) for document, cuts in zip(documents, borders, strict=True)]
    with torch_threads(threads):
        together, states = run(documents, pieces)
    with torch_threads(1):
        for d, document in enumerate(documents):
            (alone,), state = run([document], [document.cut([])])
            assert_same_bits(f"y of document {d}", together[d], alone)
            assert_same_bits(f"state of document {d}", states[d], state[0])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    cuts=st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=5, max_size=5),
    shape=st.sampled_from([TINY, *SMALL]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_cuts_or_company(
    lengths: list[int], cuts: list[list[int]], shape: Shape, dtype: torch.dtype, threads: int, seed: int
) -> None:
    documents = [Document(length, shape, seed + d, dtype) for d, length in enumerate(lengths)]
    # One mixer, so that documents differ in their tokens alone.
    check_same_bits([with_mixer_of(documents[0], document) for document in documents], cuts[: len(lengths)], threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_bits_do_not_depend_on_cuts_or_company_at_the_size_of_a_model(threads: int) -> None:
    shape = MODELS[1]
    documents = [Document(length, shape, d) for d, length in enumerate((1000, 65, 3, 700))]
    check_same_bits([with_mixer_of(documents[0], document) for document in documents], [[1, 5, 6], [], [], [4]], threads)


def with_mixer_of(first: Document, document: Document) -> Document:
    for name in ("A_H", "D_H", "dt_bias_H"):
        document.inputs.tensors[name] = first.inputs.tensors[name]
    return document


def test_whole_and_split_agree_with_the_recurrence() -> None:
    document = Document(1000, SMALL[1], 0)
    entry = Entry(0, 1000, lane_in=0, lane_out=0)
    y, state = truth(document.inputs, entry)
    for border in (1, 2, 8, 15):
        (got,), states = run([document], [document.cut([border])])
        assert_close("y", got, y, 1e-5, dtype=torch.float32)
        assert_close("state", states[0], state, 1e-5, dtype=torch.float32)


def test_gradients_reach_every_input() -> None:
    """Against finite differences in float64: two documents, one from a state, with padding and a border between tiles."""
    shape = Shape("tiny", H=2, P=2, G=1, N=2)
    entries = (Entry(0, 66, lane_in=0, lane_out=1), Entry(2, 2, lane_in=NO_LANE, lane_out=NO_LANE))
    inputs = make_inputs(shape, Layout("two", entries, num_tiles=3, slots=2), dtype=torch.float64, gate=True, poison=False)
    wanted = list(inputs.tensors)
    # Every row would take minutes: the rows at the borders stand for the others.
    rows = [0, 1, 62, 63, 64, 65, 128, 129]
    small = {name: inputs.tensors[name][rows] if name in OF_TOKENS else inputs.tensors[name] for name in wanted}

    def run_with(*values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        changed: dict[str, Any] = dict(zip(wanted, values, strict=True))
        for name in OF_TOKENS:
            changed[name] = inputs.tensors[name].index_copy(0, torch.tensor(rows), changed[name])
        y_THP, ssm_SHNP = ssd(**inputs.arguments(**changed), backend="torch")
        return y_THP[inputs.segments.real_rows()], ssm_SHNP

    leaves = [tensor.clone().requires_grad_() for tensor in small.values()]
    with torch_threads(1):
        assert torch.autograd.gradcheck(run_with, leaves, atol=1e-6, rtol=1e-4)


def test_recording_gradients_changes_no_result_and_not_the_table() -> None:
    inputs = make_inputs(SMALL[1], RAGGED, gate=True)
    y_THP, ssm_SHNP = ssd(**inputs.arguments(), backend="torch")
    given = inputs.arguments(x_THP=inputs.tensors["x_THP"].clone().requires_grad_())
    y2_THP, ssm2_SHNP = ssd(**given, backend="torch")
    assert_close("y", y2_THP, y_THP, 1e-6, dtype=torch.float32)
    lanes = [entry.lane_out for entry in RAGGED.entries if entry.lane_out != NO_LANE]
    assert_close("states", ssm2_SHNP[lanes], ssm_SHNP[lanes], 1e-6, dtype=torch.float32)
    assert torch.equal(given["ssm_SHNP"].view(torch.int32), inputs.tensors["ssm_SHNP"].view(torch.int32))
    y2_THP[inputs.segments.real_rows()].square().sum().backward()
    assert bool(given["x_THP"].grad.isfinite().all())


def test_the_table_is_updated_in_place() -> None:
    given = make_inputs(SMALL[0], one("T65", 65)).arguments()
    _, ssm_SHNP = ssd(**given, backend="torch")
    assert ssm_SHNP is given["ssm_SHNP"]


def test_a_step_without_entries() -> None:
    inputs = make_inputs(SMALL[0], Layout("empty", (), num_tiles=2, slots=1))
    y_THP, _ = ssd(**inputs.arguments(), backend="torch")
    assert torch.equal(y_THP, torch.zeros_like(y_THP))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("rows", {"x_THP": torch.zeros(64, 8, 16)}, r"x_THP: expected shape \[192, 8, 16\], got \[64, 8, 16\]"),
    ("axes", {"B_TGN": torch.zeros(192, 16)}, r"B_TGN: expected 3 axes \[T, G, N\], got shape \[192, 16\]"),
    ("groups", {"B_TGN": torch.zeros(192, 3, 16), "C_TGN": torch.zeros(192, 3, 16)}, "B_TGN: expected .* divides the 8 heads, got 3"),
    ("heads", {"A_H": torch.zeros(1)}, r"A_H: expected shape \[8\], got \[1\]"),
    ("integers", {"x_THP": torch.zeros(192, 8, 16, dtype=torch.int32)}, "x_THP: expected a floating-point dtype, got torch.int32"),
    ("dtype", {"C_TGN": torch.zeros(192, 1, 16, dtype=torch.float64)}, "C_TGN: expected dtype torch.float32, got torch.float64"),
    ("state", {"ssm_SHNP": torch.zeros(3, 8, 16, 16, dtype=torch.bfloat16)}, "ssm_SHNP: expected dtype torch.float32, got torch.bfloat16"),
    ("transposed", {"ssm_SHNP": torch.zeros(3, 8, 16, 8)}, r"ssm_SHNP: expected shape \[3, 8, 16, 16\], got \[3, 8, 16, 8\]"),
    ("lanes", {"ssm_SHNP": torch.zeros(2, 8, 16, 16)}, "ssm_SHNP: expected more than 2 slots .*, got 2"),
    ("no_heads", {"x_THP": torch.zeros(192, 0, 16)}, r"x_THP: expected H to be at least 1, got shape \[192, 0, 16\]"),
    ("segments", {"segments": one("T64", 64).segments("meta")}, "segments: expected device cpu, as ssm_SHNP, got meta"),
    ("limit", {"dt_limit": (0.1, 0.01)}, r"dt_limit: expected 0 <= low <= high, got \(0.1, 0.01\)"),
    ("device", {"D_H": torch.zeros(8, device="meta")}, "D_H: expected device cpu, got meta"),
    ("backend", {"backend": "triton"}, "backend: expected one of .*, got 'triton'"),
    ("no_gpu", {"backend": "cutile"}, "backend: expected 'torch' for tensors on cpu, got 'cutile'"),
]


@pytest.mark.parametrize(("changed", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_does_not_fit_is_named(changed: dict[str, Any], message: str) -> None:
    inputs = make_inputs(SMALL[0], one("T64", 64))
    with pytest.raises(ValueError, match=message):
        ssd(**inputs.arguments(**{"backend": "torch", **changed}))


def test_no_decay_reaches_the_state_from_padding() -> None:
    """The state after T tokens is the state after T tokens in a longer tile: rows of padding neither decay nor write it."""
    inputs = make_inputs(SMALL[0], one("T3_shorter_than_conv", 3))
    _, ssm_SHNP = ssd(**inputs.arguments(dt_limit=(0.5, math.inf)), backend="torch")
    entry = inputs.segments.entries[0]
    limited = Inputs(inputs.tensors, (0.5, math.inf), inputs.segments)
    assert_close("state", ssm_SHNP[entry.lane_out], truth(limited, entry)[1], 1e-5, dtype=torch.float32)

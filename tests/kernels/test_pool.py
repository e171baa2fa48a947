"""pool: vectors of documents and windows against NumPy in float64, and the same bits however a document is cut and whoever is beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from longscan.kernels.checks import Backend
from longscan.kernels.pool import POOLINGS, PoolState, closed_windows, pool
from longscan.kernels.pool.cases import CASES, Case, Inputs, make
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments

Array = npt.NDArray[np.float64]
WIDTH = 20


def carried(name: str, inputs: Inputs, entry: Entry, tokens: int) -> Array | None:
    """What the lane held, None where `tokens` says that nothing came before."""
    return inputs.state.tables[name][entry.lane_in].double().numpy().copy() if tokens else None


def expected_totals(rows: Array, tokens: int, before: dict[str, Array | None]) -> dict[str, Array]:
    """Totals of a window that had `tokens` tokens and gets `rows`."""
    weights = tokens + 1 + np.arange(len(rows))
    totals = {"mean": rows.sum(0), "weighted_mean": weights @ rows, "max": rows.max(0), "last": rows[-1]}
    for pooling, value in before.items():
        if value is not None:
            totals[pooling] = np.maximum(totals[pooling], value) if pooling == "max" else totals[pooling] + value
    return totals


def as_vector(pooling: str, total: Array, tokens: int) -> Array:
    return total / {"mean": tokens, "weighted_mean": tokens * (tokens + 1) / 2}.get(pooling, 1)


@dataclass(frozen=True)
class Expected:
    documents: list[dict[str, Array]]
    windows: list[dict[str, Array]]
    tables: dict[str, dict[int, Array]]
    """By name and slot: what the tables hold afterwards where an entry leaves its state."""


def expect(case: Case, inputs: Inputs) -> Expected:
    """The definition in NumPy, entry by entry and window by window; inputs on the CPU."""
    hidden = inputs.hidden_TD.double().numpy()
    kept = [pooling for pooling in case.poolings if pooling != "last"]
    found = Expected([], [], {name: {} for name in inputs.state.tables})
    for entry in inputs.segments.entries:
        rows, stop = hidden[entry.rows], entry.position + entry.num_tokens
        totals = expected_totals(rows, entry.position, {p: carried(p, inputs, entry, entry.position) for p in kept})
        if entry.ends:
            found.documents.append({p: as_vector(p, totals[p], stop) for p in case.poolings})
        elif entry.lane_out != NO_LANE:
            for pooling in kept:
                found.tables[pooling][entry.lane_out] = totals[pooling]
        size, at = case.window_tokens, entry.position
        while size and at < stop:
            begun, end = at % size, min(stop, at - at % size + size)
            before = {p: carried(f"window_{p}", inputs, entry, begun) for p in kept}
            totals = expected_totals(rows[at - entry.position : end - entry.position], begun, before)
            full = end % size == 0
            if full or (entry.ends and end == stop):
                found.windows.append({p: as_vector(p, totals[p], begun + end - at) for p in case.poolings})
            if end == stop and entry.lane_out != NO_LANE:
                for pooling in kept:
                    empty = np.full(case.width, -np.inf if pooling == "max" else 0.0)
                    found.tables[f"window_{pooling}"][entry.lane_out] = empty if full else totals[pooling]
            at = end
    return found


def check(case: Case, dtype: torch.dtype, device: str = "cpu", backend: Backend = "torch") -> None:
    expected, inputs = expect(case, make(case, dtype=dtype)), make(case, device, dtype)
    output, state = pool(
        inputs.hidden_TD,
        state=inputs.state,
        poolings=case.poolings,
        segments=inputs.segments,
        window_tokens=case.window_tokens,
        backend=backend,
    )
    assert state is inputs.state
    assert set(output.documents) == set(case.poolings)
    assert bool(output.windows) == (case.window_tokens is not None)
    for found, wanted in ((output.documents, expected.documents), (output.windows, expected.windows)):
        for pooling, vectors in found.items():
            assert vectors.dtype == torch.float32
            assert tuple(vectors.shape) == (len(wanted), case.width)
            if wanted:
                np.testing.assert_allclose(vectors.cpu().numpy(), np.stack([w[pooling] for w in wanted]), rtol=2e-7, atol=1e-7)
    for name, lanes in expected.tables.items():
        for lane, total in lanes.items():
            np.testing.assert_allclose(state.tables[name][lane].cpu().numpy(), total, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vectors_and_state(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "cutile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vectors_and_state_on_a_gpu(case: Case, dtype: torch.dtype, backend: Backend) -> None:
    check(case, dtype, "cuda", backend)


def stream(
    documents: Sequence[torch.Tensor], steps: Sequence[Sequence[tuple[int, int, int]]], window_tokens: int | None
) -> tuple[dict[int, dict[str, torch.Tensor]], dict[tuple[int, int], dict[str, torch.Tensor]]]:
    """Pool `documents` over `steps`, each a list of (document, first token, number of tokens); vectors by document and by window."""
    state = PoolState.new(len(documents), WIDTH, POOLINGS, window_tokens)
    for table in state.tables.values():
        table.fill_(torch.nan)
    ended: dict[int, dict[str, torch.Tensor]] = {}
    closed: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for step in steps:
        entries: list[Entry] = []
        tile = 0
        for document, start, count in step:
            ends = start + count == len(documents[document])
            lanes = (document if start else NO_LANE, NO_LANE if ends else document)
            entries.append(Entry(tile, count, start, *lanes, ends))
            tile += entries[-1].num_tiles
        hidden = torch.full(((tile + 1) * TILE, WIDTH), torch.nan)
        hidden[: tile * TILE] = 1e4
        for (document, start, count), entry in zip(step, entries, strict=True):
            hidden[entry.rows] = documents[document][start : start + count]
        segments = Segments.pack(entries, tile + 1)
        output, state = pool(hidden, state=state, poolings=POOLINGS, segments=segments, window_tokens=window_tokens, backend="torch")
        for i, document in enumerate(document for (document, _, _), entry in zip(step, entries, strict=True) if entry.ends):
            ended[document] = {pooling: vectors[i] for pooling, vectors in output.documents.items()}
        for i, run in enumerate(closed_windows(segments, window_tokens) if window_tokens else []):
            closed[step[run.entry][0], run.window] = {pooling: vectors[i] for pooling, vectors in output.windows.items()}
    return ended, closed


def random_documents(lengths: Sequence[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, WIDTH, generator=generator) for length in lengths]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert set(a) == set(b) == set(POOLINGS)
    for pooling, vector in a.items():
        assert not vector.isnan().any()
        assert torch.equal(vector, b[pooling]), pooling


def cuts(length: int, draw: st.DrawFn) -> Iterator[tuple[int, int]]:
    start = 0
    while start < length:
        count = min(length - start, TILE * draw(st.integers(1, 9)))
        yield start, count
        start += count


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int, int]]], int]:
    """Lengths of documents, and steps in which every document's pieces come in order, one a step, beside those of others."""
    lengths = draw(st.lists(st.integers(1, 900), min_size=1, max_size=6))
    left = {document: list(cuts(length, draw)) for document, length in enumerate(lengths)}
    steps: list[list[tuple[int, int, int]]] = []
    while left:
        chosen = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        steps.append([(document, *left[document].pop(0)) for document in chosen])
        left = {document: pieces for document, pieces in left.items() if pieces}
    return lengths, steps, draw(st.sampled_from([64, 128, 192, 1024]))


@settings(max_examples=60, deadline=None)
@given(packings(), st.integers(0, 99))
def test_alone_and_whole_equals_cut_anywhere_in_any_company(
    packing: tuple[list[int], list[list[tuple[int, int, int]]], int], seed: int
) -> None:
    lengths, steps, window_tokens = packing
    documents = random_documents(lengths, seed)
    ended, closed = stream(documents, steps, window_tokens)
    assert set(ended) == set(range(len(documents)))
    for d, document in enumerate(documents):
        alone, windows = stream([document], [[(0, 0, len(document))]], window_tokens)
        same_bits(ended[d], alone[0])
        assert (
            sorted(w for _, w in windows)
            == sorted(w for other, w in closed if other == d)
            == list(range(-(-len(document) // window_tokens)))
        )
        for _, w in windows:
            same_bits(closed[d, w], windows[0, w])


def test_a_window_is_pooled_like_a_document_of_its_own() -> None:
    (document,) = random_documents([500], 1)
    _, windows = stream([document], [[(0, 0, 256)], [(0, 256, 244)]], 192)
    for w in range(3):
        part = document[192 * w : 192 * (w + 1)]
        alone, _ = stream([part], [[(0, 0, len(part))]], None)
        same_bits(windows[0, w], alone[0])


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    documents = random_documents([5000, 700], 2)
    steps = [[(0, 0, 5000), (1, 0, 700)]]
    usual = stream(documents, steps, 128)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        other = stream(documents, steps, 128)
    finally:
        torch.set_num_threads(before)
    for found, wanted in zip(other, usual, strict=True):
        for key, vectors in found.items():
            same_bits(vectors, wanted[key])


def test_a_document_that_starts_from_a_shared_prefix_takes_nothing_of_it() -> None:
    hidden = torch.randn(TILE, WIDTH)
    state = PoolState.new(2, WIDTH, POOLINGS, 64)
    for table in state.tables.values():
        table.fill_(torch.nan)
    segments = Segments.pack([Entry(0, 10, 0, lane_in=1, lane_out=NO_LANE, ends=True)], 1)
    output, _ = pool(hidden, state=state, poolings=POOLINGS, segments=segments, window_tokens=64, backend="torch")
    for vectors in (output.documents, output.windows):
        torch.testing.assert_close(vectors["mean"][0], hidden[:10].mean(0))


def test_the_state_of_a_document_that_ends_is_kept_where_a_lane_is_given() -> None:
    (document,) = random_documents([100], 3)
    state = PoolState.new(1, WIDTH, ("mean",), 128)
    segments = Segments.pack([Entry(0, 100, 0, NO_LANE, lane_out=0, ends=True)], 2)
    hidden = torch.cat([document, torch.zeros(28, WIDTH)])
    pool(hidden, state=state, poolings=("mean",), segments=segments, window_tokens=128, backend="torch")
    for name in ("mean", "window_mean"):
        torch.testing.assert_close(state.tables[name][0], document.double().sum(0))


def test_rows_with_a_stride_are_read_as_they_lie() -> None:
    inputs = make(CASES[0])
    wide = torch.full((inputs.hidden_TD.shape[0], 100), torch.nan)
    wide[:, 10:58] = inputs.hidden_TD
    keywords = {"poolings": POOLINGS, "segments": inputs.segments, "window_tokens": 192, "backend": "torch"}
    dense, _ = pool(inputs.hidden_TD, state=make(CASES[0]).state, **keywords)  # type: ignore[arg-type]
    strided, _ = pool(wide[:, 10:58], state=inputs.state, **keywords)  # type: ignore[arg-type]
    same_bits(dense.documents, strided.documents)


def test_a_step_of_nobody_gives_nothing() -> None:
    state = PoolState.new(1, WIDTH, POOLINGS, 64)
    hidden = torch.full((TILE, WIDTH), torch.nan)
    output, _ = pool(hidden, state=state, poolings=POOLINGS, segments=Segments.pack([], 1), window_tokens=64, backend="torch")
    assert {tuple(vectors.shape) for vectors in (*output.documents.values(), *output.windows.values())} == {(0, WIDTH)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_TD": torch.zeros(65, WIDTH)}, r"hidden_TD: expected shape \[64, 20\], got \[65, 20\]"),
        ({"hidden_TD": torch.zeros(64, WIDTH, dtype=torch.int32)}, "hidden_TD: expected a floating-point dtype"),
        ({"poolings": ["median"]}, "poolings: expected some of mean, last, max, weighted_mean"),
        ({"poolings": ["mean", "mean"]}, "each once"),
        ({"poolings": []}, "poolings: expected some of"),
        ({"window_tokens": 100}, "window_tokens: expected a multiple of 64 or None, got 100"),
        ({"window_tokens": None}, r"state: expected the tables \['mean'\]"),
        ({"state": PoolState.new(1, WIDTH + 1, ["mean"], 64)}, r"state.tables\['mean'\]: expected shape \[1, 20\], got \[1, 21\]"),
        (
            {"state": PoolState({"mean": torch.zeros(1, WIDTH), "window_mean": torch.zeros(1, WIDTH)})},
            r"\['mean'\]: expected dtype torch.float64",
        ),
        ({"segments": Segments.pack([Entry(0, 64, 0, NO_LANE, 1)], 1)}, r"state.tables\['mean'\]: expected more than 1 slots"),
        ({"backend": "cutile"}, "backend: expected 'torch' for tensors on cpu"),
        ({"backend": "numpy"}, "backend: expected one of"),
    ],
)
def test_what_does_not_fit_is_told_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "hidden_TD": torch.zeros(64, WIDTH),
        "state": PoolState.new(1, WIDTH, ["mean"], 64),
        "poolings": ["mean"],
        "segments": Segments.pack([Entry(0, 64, 0, NO_LANE, 0)], 1),
        "window_tokens": 64,
        "backend": "torch",
    }
    with pytest.raises(ValueError, match=message):
        pool(**(arguments | change))  # type: ignore[arg-type]

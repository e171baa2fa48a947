"""States that the engine hands over: of the right place, few at a time, and all that a longer document needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from collecting import SEGMENT, Collecting, going_on, printed, rows_of, task
from fake_model import CountingModel, document, engine_of
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateForward
from longscan.pipeline.records import Carry, Cut, DocumentRow, Outcome, Prefix, TokenBlock, TokenStream

TASK = task(window_tokens=192)
PREFIX = Prefix(1, "of nothing")
IDS = np.random.default_rng(0).integers(0, 11, (8, 4000)).astype(np.int32)


def tokens(ordinal: int, length: int, loose: int = 0, carry: Carry | None = None, block: int = 100) -> TokenStream:
    """The first tokens of document `ordinal`, the last `loose` of them not settled; from its carry on."""

    def blocks() -> Iterator[TokenBlock]:
        settled = length - loose
        edges = [*range(0, settled, block), *range(settled, length, block), length]
        for start, stop in pairwise(edges):
            places = np.arange(start, stop, dtype=np.int64)
            yield TokenBlock(IDS[ordinal, start:stop], 3 * places, 3 * places + 2, Cut(stop, stop, stop), settled=stop <= settled)

    whole = TokenStream(document(ordinal), blocks(), 3 * length, length, PREFIX)
    return going_on(whole, carry)


def run(streams: Iterable[TokenStream], keeper: Collecting, **sizes: Any) -> dict[int, list[Outcome]]:
    return rows_of(streams, TASK, keeper, **sizes)


def check_growth(grown: Sequence[tuple[int, int, int]], *, lanes: int, block: int, **where: Any) -> None:
    """grown: of each document the length before, how many of these tokens are not settled, and how many came since.

    where: of the engine, other than on a CPU.
    """
    first, second, undisturbed = Collecting(), Collecting(), Collecting()
    run(
        (tokens(n, length, min(loose, length), block=block) for n, (length, loose, _) in enumerate(grown)),
        first,
        lanes=lanes,
        **where,
    )
    expected = {n: max(length - loose - 1, 0) // SEGMENT * SEGMENT for n, (length, loose, _) in enumerate(grown)}
    assert {n: carry.position for n, carry in first.kept.items()} == {n: at for n, at in expected.items() if at}
    for carry in first.kept.values():
        assert carry.cut.token <= carry.position < carry.cut.token + block
        assert carry.host.position == carry.position
    longer = [(n, length + more) for n, (length, _, more) in enumerate(grown)]
    again = run((tokens(n, length, 0, first.kept.get(n), block) for n, length in longer), second, lanes=lanes, **where)
    whole = run((tokens(n, length, 0) for n, length in longer), undisturbed, **where)
    for n, rows in whole.items():
        after = first.kept[n].position if n in first.kept else 0
        assert printed(again[n]) == printed(rows, after), f"document {n}, from token {after}"
    assert {n: carry.position for n, carry in second.kept.items()} == {n: carry.position for n, carry in undisturbed.kept.items()}
    for n, carry in second.kept.items():
        assert replace(carry.host) == replace(undisturbed.kept[n].host)
        for name, tensor in undisturbed.kept[n].tensors().items():
            assert carry.tensors()[name].equal(tensor), name


@settings(max_examples=25, deadline=None)
@given(
    grown=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 300), st.integers(0, 500)), min_size=1, max_size=5),
    lanes=st.integers(1, 4),
    block=st.sampled_from([30, 64, 100, 1000]),
)
def test_a_longer_document_goes_on_from_what_was_kept(grown: list[tuple[int, int, int]], lanes: int, block: int) -> None:
    check_growth(grown, lanes=lanes, block=block)


@pytest.mark.parametrize(
    "where", [pytest.param({"forward": LateForward}, id="late"), pytest.param({"device": "cuda"}, id="gpu", marks=pytest.mark.gpu)]
)
def test_a_longer_document_goes_on_from_what_was_kept_a_step_behind(where: dict[str, Any]) -> None:
    check_growth([(700, 10, 500), (129, 0, 1), (64, 0, 300), (1000, 300, 900), (65, 1, 65)], lanes=3, block=100, **where)


@pytest.mark.parametrize("most", [2, 3])
def test_few_states_are_in_memory_at_a_time(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight documents come to their ends in one step: each waits until those before it are put away."""
    sizes = {"lanes": 8, "step_tokens": 1024, "segment_tokens": SEGMENT}
    with engine_of(CountingModel(), TASK, **sizes) as engine:
        one = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in engine.carry_layout.values())
    monkeypatch.setattr("longscan.pipeline.engine.engine.KEPT_BYTES", most * one)
    keeper = Collecting()
    rows = run((tokens(n, 100 + SEGMENT, 0) for n in range(8)), keeper, **sizes)
    assert len(keeper.kept) == len(rows) == 8
    assert keeper.most == most


def test_nothing_is_copied_for_a_caller_that_keeps_nothing_or_asks_for_nothing() -> None:
    keeper = Collecting()
    plain = run((replace(tokens(n, 300), prefix=None) for n in range(3)), keeper)
    assert not keeper.kept
    with engine_of(CountingModel(), TASK, lanes=3, step_tokens=256, segment_tokens=SEGMENT, context_id=3) as engine:
        rows = list(engine.process(tokens(n, 300) for n in range(3)))
    assert sum(isinstance(row, DocumentRow) for row in rows) == len(plain)


def test_a_caller_that_leaves_gives_its_states_up() -> None:
    """Documents that are dropped while theirs are copied take no room from those after them."""
    keeper = Collecting()
    with engine_of(CountingModel(), TASK, lanes=3, step_tokens=256, segment_tokens=SEGMENT, context_id=3) as engine:
        for _ in range(5):
            outcomes = engine.process((tokens(n, 200) for n in range(6)), Collecting())
            next(outcomes)
            outcomes.close()
        rows = list(engine.process((tokens(n, 200) for n in range(6)), keeper))
    assert len(keeper.kept) == 6
    assert sum(isinstance(row, DocumentRow) for row in rows) == 6

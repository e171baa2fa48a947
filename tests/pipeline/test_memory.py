"""Memory that is short: fewer lanes at the start, a step that is run again, fewer lanes on the way; and the same bits in the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from collecting import going_on
from fake_model import CountingModel, engine_of, settings_of, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateForward
from longscan.kernels.segments import NO_LANE, Segments
from longscan.pipeline.config import EmbeddingConfig, ScoreConfig, TaskConfig
from longscan.pipeline.engine.engine import Engine, EngineFailed
from longscan.pipeline.engine.forward import Forward
from longscan.pipeline.engine.lanes import Lanes
from longscan.pipeline.engine.memory import is_out_of_memory
from longscan.pipeline.engine.opened import Caller
from longscan.pipeline.engine.slots import Slots
from longscan.pipeline.errors import ConfigError
from longscan.pipeline.plan.resolve import Choice
from longscan.pipeline.plan.sizes import Sizes
from longscan.pipeline.records import Carry, DocumentRow, Outcome, Reached, TokenBlock, TokenStream
from longscan.pipeline.worker.build import fitting, with_fewer_lanes

LENGTHS = [1, 900, 64, 1500, 65, 700, 2000, 129, 640, 3, 1100]
TASK = TaskConfig(
    "embed_score",
    EmbeddingConfig(pooling=["mean", "max"], normalize=False, window_tokens=192),
    ScoreConfig(per_token=True),
)


class ShortModel(CountingModel):
    """Finds no memory in some steps, after it has overwritten whatever a step may write."""

    def __init__(self, fails: Collection[int] = (), *, late: bool = False) -> None:
        """fails: numbers of the calls that do, the context's first. late: behind the network, where its states are all written."""
        super().__init__()
        self.fails, self.late = fails, late
        self.calls = -1
        self.slots: list[int] = []

    def new_state(self, slots: int) -> torch.Tensor:
        self.slots.append(slots)
        return super().new_state(slots)

    def step(self, ids_T: torch.Tensor, segments: Segments, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        found = super().step(ids_T, segments, state)
        if self.calls in self.fails and not self.late:
            for entry in segments.entries:
                if entry.lane_out != NO_LANE:
                    state[entry.lane_out] = torch.nan
            raise torch.OutOfMemoryError("Tried to allocate 3.14 GiB")
        return found

    def logprobs(self, hidden_TD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        if self.late and len(hidden_TD) > 64 and self.calls in self.fails:
            raise torch.OutOfMemoryError("Tried to allocate 3.14 GiB")
        return super().logprobs(hidden_TD, targets_T)


def engine(model: CountingModel, **settings: Any) -> Engine:
    sizes = {"lanes": 8, "step_tokens": 512, "segment_tokens": 64, "context_id": 3} | settings
    return engine_of(model, TASK, **sizes)


def rows_of(one: Engine, lengths: Collection[int] = LENGTHS) -> dict[int, Any]:
    """Vectors and scores of all documents, as bits."""
    ids = [np.random.default_rng(n).integers(0, 11, length) for n, length in enumerate(lengths)]
    rows: dict[int, Any] = {}
    for row in one.process(stream(n, of_document, block=100) for n, of_document in enumerate(ids)):
        if isinstance(row, DocumentRow):
            vectors = {name: None if vector is None else vector.tobytes() for name, vector in row.vectors.items()}
            rows[row.document.ordinal] = (row.num_tokens, vectors, row.log_likelihood)
    return rows


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Any]:
    with engine(CountingModel()) as one:
        return rows_of(one)


@pytest.mark.parametrize("late", [False, True], ids=["in the network", "behind it"])
@pytest.mark.parametrize(
    ("fails", "lanes"),
    [({1}, [8]), ({4}, [8]), ({2, 5, 9}, [8]), ({3, 4}, [8, 4]), ({3, 4, 5}, [8, 4, 2]), ({3, 4, 9, 10}, [8, 4, 2])],
    ids=["first", "once", "three times", "twice in a row", "thrice in a row", "twice in a row, again"],
)
def test_a_step_without_memory_is_run_again(
    fails: set[int], lanes: list[int], late: bool, undisturbed: dict[int, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """In steps of two segments, so that two lanes are always enough for one."""
    model = ShortModel(fails, late=late)
    with caplog.at_level(logging.WARNING), engine(model, step_tokens=128) as one:
        assert rows_of(one) == undisturbed
    assert len([r for r in caplog.records if "found no memory" in r.message]) == len(fails)
    context, spare = 1, 2
    assert model.slots == [most + context + spare for most in lanes]


@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=12),
    fails=st.sets(st.integers(1, 24), max_size=8),
    lanes=st.integers(1, 9),
    step=st.integers(1, 6),
    late=st.booleans(),
    reset=st.sampled_from([None, 128]),
    forward=st.sampled_from([Forward, LateForward]),
)
@settings(max_examples=40, deadline=None)
def test_the_bits_do_not_depend_on_where_memory_was_short(
    lengths: list[int], fails: set[int], lanes: int, step: int, late: bool, reset: int | None, forward: type[Forward]
) -> None:
    with engine(CountingModel(), reset_tokens=reset) as one:
        expected = rows_of(one, lengths)
    with engine(ShortModel(fails, late=late), lanes=lanes, step_tokens=64 * step, reset_tokens=reset, forward=forward) as one:
        found: Any = None
        with suppress(EngineFailed):
            found = rows_of(one, lengths)
        if found is None:  # nothing was left to be given back
            assert any(n + 1 in fails for n in fails)
        else:
            assert found == expected


def test_memory_that_never_comes_ends_the_engine() -> None:
    with engine(ShortModel(range(2, 100))) as one, pytest.raises(EngineFailed, match=r"3\.14 GiB"):
        rows_of(one)


def test_a_step_that_overwrote_what_it_began_from_is_not_run_again() -> None:
    """Where the tables have no spare slots, or too few."""
    caller, lanes = Caller(), Lanes(settings_of(TASK, lanes=2, step_tokens=128, segment_tokens=64), Slots(2, has_context=False))
    opened = lanes.admit(caller, stream(0, [1]).document, None)
    lanes.push(opened, [TokenBlock(np.arange(200, dtype=np.int32))], complete=False)
    first, second = lanes.next_step(), None
    lanes.push(opened, [TokenBlock(np.arange(200, dtype=np.int32))], complete=False)
    second = lanes.next_step()
    assert first is not None
    assert second is not None
    assert (first.repeatable, second.repeatable) == (True, False)


@pytest.mark.parametrize("forward", [Forward, LateForward])
def test_documents_that_are_set_aside_go_on_after_a_stop(forward: type[Forward], caplog: pytest.LogCaptureFixture) -> None:
    """Lanes fall from 4 to 2 in the middle of four documents; what is kept at a stop leads to the same rows."""
    carries: dict[int, Carry] = {}

    class Keeping:
        checkpoint_tokens = 1 << 40

        def reserve(self) -> bool:
            return True

        def forget(self) -> None:
            raise AssertionError("none was reserved")

        def keep(self, news: Sequence[Outcome | Carry | Reached]) -> list[Outcome]:
            for one in news:
                if isinstance(one, Carry):
                    tensors = dict(one.tensors())  # the engine's own, until it is gone
                    carries[one.ordinal] = replace(one, tensors=partial(dict, tensors))
            return [one for one in news if not isinstance(one, Carry | Reached)]

    def documents(carries: Mapping[int, Carry]) -> Iterator[TokenStream]:
        for n in range(4):
            whole = stream(n, np.random.default_rng(n).integers(0, 11, 3000), block=64)
            whole = replace(whole, estimated_tokens=0)  # so that the feed opens all of them
            yield going_on(whole, carries.get(n))

    def vectors(one: Engine, carries: Mapping[int, Carry]) -> dict[int, Any]:
        rows = [row for row in one.process(documents(carries)) if isinstance(row, DocumentRow)]
        return {
            row.document.ordinal: (row.vectors["mean"].tobytes(), row.log_likelihood) for row in rows if row.vectors["mean"] is not None
        }

    done: list[int] = []

    def on_tokens(tokens: int, _: int) -> None:
        done.append(tokens)
        if len(done) == 10:
            one.stop(0)

    sizes = {"lanes": 4, "step_tokens": 128}
    with engine(CountingModel(), **sizes) as one:
        expected = vectors(one, {})
    short = engine(ShortModel({5, 6}), on_tokens=on_tokens, forward=forward, **sizes)
    with short as one, pytest.raises(EngineFailed, match="was stopped"):
        list(one.process(documents({}), Keeping()))
    assert "2 lanes from now on, 4 before" in caplog.text
    assert len(carries) > 2, "more documents are in flight than there are lanes"
    assert sum(carry.position for carry in carries.values()) == sum(done)
    with engine(CountingModel(), **sizes) as one:
        assert vectors(one, carries) == expected


def test_lanes_become_fewer_until_they_fit() -> None:
    tried: list[int] = []

    def make(most: int) -> Callable[[int], Any]:
        def of(lanes: int) -> str:
            tried.append(lanes)
            if lanes > most:
                raise torch.OutOfMemoryError("no")
            return f"engine of {lanes}"

        return of

    assert with_fewer_lanes(make(30), 200) == "engine of 25"  # type: ignore[comparison-overlap]
    assert tried == [200, 100, 50, 25]
    with pytest.raises(torch.OutOfMemoryError):
        with_fewer_lanes(make(0), 4)
    with pytest.raises(ConfigError, match="does not fit into the memory"), fitting(CHOICE, Sizes(4, 512, 1)):
        with_fewer_lanes(make(0), 4)


CHOICE = Choice("m", "cuda", "torch", "bfloat16", None, 11)


def test_other_errors_are_not_taken_for_memory() -> None:
    def fails(_: int) -> Engine:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"), fitting(CHOICE, Sizes(4, 512, 1)):
        with_fewer_lanes(fails, 4)
    assert not is_out_of_memory(ValueError("out of memory"))
    assert is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"))


@pytest.mark.parametrize("late", [False, True])
def test_a_rehearsal_finds_out_before_any_document(late: bool, undisturbed: dict[int, Any]) -> None:
    """At the third try: the context's step and the rehearsal are each engine's first two."""
    models: list[ShortModel] = []

    def make(lanes: int) -> Engine:
        models.append(ShortModel({1} if len(models) < 2 else (), late=late))
        return engine(models[-1], lanes=lanes, constant_shape=True, rehearse=True)

    with with_fewer_lanes(make, 8) as one:
        assert rows_of(one) == undisturbed
    assert [model.slots for model in models] == [[8 + 9], [4 + 9], [2 + 9]]

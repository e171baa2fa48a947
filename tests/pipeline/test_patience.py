"""How long a step that is not full waits for its callers: never beside tokens that come, and never for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from fake_model import CountingModel, engine_of, settings_of, stream
from longscan.jobs.bench_fake import SleepingForward, SleepingModel
from longscan.kernels.segments import Segments
from longscan.pipeline.config import EmbeddingConfig, TaskConfig
from longscan.pipeline.engine import engine as engine_module
from longscan.pipeline.engine.engine import PATIENCE_S, Engine, EngineFailed
from longscan.pipeline.engine.forward import Forward
from longscan.pipeline.records import DocumentRow, ErrorRow, TokenStream
from waiting import HANG_S, until

LONG_S = 10 * HANG_S
"""Who waits for so long has hung."""
STEP, PARTS = 1024, 4
SIZES = {"lanes": 4, "step_tokens": STEP, "segment_tokens": 256, "context_id": None}
EMBED = TaskConfig("embed", EmbeddingConfig(pooling=["mean"], normalize=False))


class Told(SleepingModel):
    """Of no time at all unless it is given one; says which tokens its steps had."""

    def __init__(self, seconds: float = 0.001) -> None:
        super().__init__(STEP / seconds, 8)
        self.tokens: list[int] = []
        self.stepped = threading.Event()

    def step(self, ids_T: torch.Tensor, segments: Segments, state: None) -> tuple[torch.Tensor, None]:
        self.tokens.append(sum(entry.num_tokens for entry in segments.entries))
        self.stepped.set()
        return super().step(ids_T, segments, state)


def engine(model: Any, **asked: Any) -> Engine:
    return engine_of(model, EMBED, **({"constant_shape": True, "forward": SleepingForward} | SIZES | asked))


def as_if_a_step_took(seconds: float, monkeypatch: pytest.MonkeyPatch, most: float = LONG_S) -> None:
    """Whatever the steps of the device take."""
    monkeypatch.setattr(Forward, "step_seconds", property(lambda _: seconds, lambda *_: None), raising=False)
    monkeypatch.setattr(engine_module, "MOST_PATIENCE_S", most)


def parts(*, pause_s: float = 0.0, before_second: threading.Event | None = None) -> Iterator[TokenStream]:
    """A step's tokens, as documents that come one by one."""
    for part in range(PARTS):
        if part == 1 and before_second is not None:
            assert before_second.wait(HANG_S)
        elif part:
            time.sleep(pause_s)
        yield stream(part, [1] * (STEP // PARTS))


def test_tokens_that_come_within_a_step_s_time_fill_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_a_step_took(LONG_S, monkeypatch)
    model = Told()
    with engine(model) as one:
        assert len(list(one.process(parts(pause_s=2 * PATIENCE_S)))) == PARTS
    assert model.tokens == [STEP]


def test_a_device_that_sleeps_gets_its_first_step_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a step takes is known of it before there was one; here it is done at once nevertheless."""

    class Done(Told):
        def step(self, ids_T: torch.Tensor, segments: Segments, state: None) -> tuple[torch.Tensor, None]:
            found = super().step(ids_T, segments, state)
            self.busy_until = 0.0
            return found

    monkeypatch.setattr(engine_module, "MOST_PATIENCE_S", LONG_S)
    model = Done(seconds=LONG_S)
    with engine(model) as one:
        assert len(list(one.process(parts(pause_s=2 * PATIENCE_S)))) == PARTS
    assert model.tokens == [STEP]


def test_documents_that_end_short_of_a_tile_fill_a_step_by_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no room for more of them, so it does not wait for the tokens that it would have room for."""
    as_if_a_step_took(LONG_S, monkeypatch)
    model = Told()

    def short() -> Iterator[TokenStream | ErrorRow]:
        for n in range(STEP // 64):
            yield stream(n, [1, 2, 3])
        yield ErrorRow(100, None, "corpus.parquet", 100, "read", "InputError", "null text")  # what comes before it is handed over alone
        assert model.stepped.wait(HANG_S)
        yield stream(101, [1, 2, 3])

    with engine(model) as one:
        assert len(list(one.process(short()))) == STEP // 64 + 2
    assert model.tokens == [3 * STEP // 64, 3]


@pytest.mark.parametrize(
    ("seconds", "most", "constant_shape"),
    [(0.1, LONG_S, True), (LONG_S, 0.1, True), (0.0, LONG_S, False)],
    ids=["a step's time", "the most", "steps of any shape"],
)
def test_a_caller_that_stalls_holds_a_step_back_no_longer_than(
    seconds: float, most: float, constant_shape: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_a_step_took(seconds, monkeypatch, most)
    model = Told()
    with engine(model, constant_shape=constant_shape) as one:
        assert len(list(one.process(parts(before_second=model.stepped)))) == PARTS
    assert model.tokens[0] == STEP // PARTS
    assert sum(model.tokens) == STEP


def test_who_has_brought_all_is_not_waited_for_while_it_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_a_step_took(LONG_S, monkeypatch)

    class Gated(CountingModel):
        def step(self, ids_T: torch.Tensor, segments: Segments, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            until(lambda: all(caller.fed for caller in one._callers))
            return super().step(ids_T, segments, state)

    model = Gated()
    with engine(model, forward=Forward) as one:
        rows = one.process([stream(0, [1] * STEP), stream(1, [1] * 64)])
        assert isinstance(next(rows), DocumentRow)
        until(lambda: len(model.steps) == 2)
        assert len(list(rows)) == 1


def test_who_has_brought_all_is_not_waited_for_where_its_last_document_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_a_step_took(LONG_S, monkeypatch)
    model = Told()
    with engine(model) as one:
        rows = one.process([stream(0, [1] * STEP, block=100, fails_at=STEP // 2), stream(1, [1] * 64)])
        assert isinstance(next(rows), ErrorRow)
        until(lambda: model.tokens == [64])
        assert [row.document.ordinal for row in rows if isinstance(row, DocumentRow)] == [1]


@pytest.mark.parametrize("how", ["stop", "close", "give_up"])
def test_nothing_that_ends_the_engine_waits_for_a_step_to_be_filled(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_a_step_took(LONG_S, monkeypatch)
    model, resume = Told(), threading.Event()
    failed: list[EngineFailed] = []

    def call(rows: Iterable[Any]) -> None:
        try:
            list(rows)
        except EngineFailed as error:
            failed.append(error)

    with engine(model) as one:
        caller = threading.Thread(target=call, args=(one.process(parts(before_second=resume)),))
        caller.start()
        try:
            until(lambda: one._lanes.ready_rows)
            began = time.monotonic()
            if how == "stop":
                assert one.stop(HANG_S)
            elif how == "close":
                one.close()
            else:
                one.give_up(RuntimeError("left behind"))
                one._thread.join(HANG_S)
            assert time.monotonic() - began < HANG_S / 2
        finally:
            resume.set()
            caller.join()
    assert len(failed) == 1
    assert model.tokens == []


def whole() -> list[TokenStream]:
    return [stream(0, [1] * STEP)]


def test_how_long_a_step_takes_is_learnt_from_each() -> None:
    forward = SleepingForward(model := Told(seconds=0.05), settings_of(EMBED, constant_shape=True, **SIZES))
    assert forward.step_seconds == pytest.approx(0.05), "from the beginning"
    with engine(model) as one:
        one._forward.step_seconds = 0.0
        list(one.process(whole()))
        assert one._forward.step_seconds >= 0.05


@pytest.mark.parametrize("constant_shape", [True, False])
def test_it_is_known_on_a_cpu_where_steps_have_one_shape(constant_shape: bool) -> None:
    with engine(CountingModel(), forward=Forward, constant_shape=constant_shape) as one:
        assert one._forward.step_seconds == 0
        list(one.process(whole()))
        assert (one._forward.step_seconds > 0) == constant_shape


STEP_CYCLES, COMPILE_S = 250_000_000, 0.5
"""Of a GPU's clock, which stays below 3 GHz: 83 ms at least."""


@pytest.mark.gpu
def test_it_is_known_from_the_rehearsal_on_a_gpu() -> None:
    """Though the first time the host is busy with what comes behind the network for longer than the network takes."""

    class Slow(CountingModel):
        def step(self, ids_T: torch.Tensor, segments: Segments, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            torch.cuda._sleep(STEP_CYCLES)
            return super().step(ids_T, segments, state)

    class Compiled(Forward):
        compiled = False

        def _pool(self, *given: Any) -> Any:
            if not self.compiled:
                time.sleep(COMPILE_S)
                self.compiled = True
            return super()._pool(*given)

    with engine(Slow(device="cuda"), forward=Compiled, device="cuda") as one:
        assert 0.08 <= one._forward.step_seconds < COMPILE_S
        one._forward.step_seconds = 0.0
        list(one.process(whole()))
        assert one._forward.step_seconds > 0

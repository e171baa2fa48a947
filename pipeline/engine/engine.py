"""The engine: token streams in, finished documents out, for any number of callers at once.

    caller's thread   process(): pulls its streams, hands their tokens over (`feed`), reads its rows
    engine's thread   books a step (`lanes`, `schedule`), queues it on the device (`forward`), cuts what comes back into that of
                      its entries (`results`), makes rows of it (`rows`) and hands these to their callers (`delivery`)

One lock guards the book and the callers' news; steps, tokenization and rows are made without it. On a GPU the next step
is launched before the results of the one before are read. The engine's thread waits for nobody's reading: a caller that
does not read does not feed either, so its rows stay few while others go on. It keeps its lanes, though, until it reads
on or closes its iterator, and as long as it has more to bring, steps that others do not fill wait for it as long as one takes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from types import TracebackType

import torch
from longscan.pipeline.engine.delivery import hand_over, hand_over_carry, tell
from longscan.pipeline.engine.feed import Feed
from longscan.pipeline.engine.forward import Forward
from longscan.pipeline.engine.lanes import Lanes
from longscan.pipeline.engine.memory import drop_caches, in_a_line, is_out_of_memory
from longscan.pipeline.engine.opened import Caller, Keeper
from longscan.pipeline.engine.pool import check_width
from longscan.pipeline.engine.results import EntryResult, Launched
from longscan.pipeline.engine.rows import RowMaker
from longscan.pipeline.engine.settings import EngineSettings
from longscan.pipeline.engine.stepmodel import StepModel
from longscan.pipeline.engine.steps import Step, StepTotals
from longscan.pipeline.meter import Meter
from longscan.pipeline.records import Carry, ErrorRow, Kept, Outcome, Reached, TokenStream

log = logging.getLogger(__name__)

KEPT_BYTES = 1 << 28
"""Of states that are copied for a caller to keep and not put away yet; two, if they are larger."""

PATIENCE_S = 0.02
"""How long, at least, a step that is not full waits on an idle device for callers that are still bringing tokens."""

MOST_PATIENCE_S = 5.0
"""At most, however long the step before took: it may have waited itself, for a graph to be recorded or for others on its GPU."""

POLL_S = 0.001
"""How often it is looked whether the device is done, while the next step is still without tokens."""


class EngineFailed(RuntimeError):
    """The engine's thread has ended: by an error, which is the cause of this one, or because it was stopped or closed."""


class Engine:
    """A model on a device, and the documents that stream through it."""

    def __init__(
        self,
        model: StepModel,
        settings: EngineSettings,
        *,
        on_tokens: Callable[[int, int], None] | None = None,
        meter: Meter | None = None,
        forward: Callable[[StepModel, EngineSettings, Meter], Forward] = Forward,
    ) -> None:
        """
        on_tokens: called after each step, in the engine's thread, with the tokens that went through, and what a plan takes these for.
        meter: charged with the stages feed, idle (a caller that waits), schedule, pack, copy, launch, wait, device and rows, and with what
            the device waits before its first step and between two.
        forward: makes what runs the steps.

        Raises ConfigError where the model is narrower than the vectors asked for, and what torch does where memory is short.
        """
        if settings.task.pools:
            check_width(settings.task.embedding, model.width)
        self.width = model.width
        self._vocab_size = settings.vocab_size
        self._meter = meter or Meter()
        self._forward = forward(model, settings, self._meter)
        if settings.rehearses:
            self._forward.rehearse()
        carry_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.carry_layout.values())
        self._lanes = Lanes(settings, self._forward.slots, most_kept=max(2, KEPT_BYTES // max(1, carry_bytes)))
        self._maker = RowMaker(settings)
        self._on_tokens = on_tokens or (lambda *_: None)
        # Re-entrant: a caller's generator may be closed by the garbage collector, in whatever thread it runs.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        """What the engine's thread waits for."""
        self._news = threading.Condition(self._lock)
        """What callers wait for."""
        self._callers: list[Caller] = []
        """In the order in which they began."""
        self._delivered = 0
        """Tokens of the steps whose results are in."""
        self._closed = self._given_up = self._stopping = self._stopped = False
        self._failure: BaseException | None = None
        self.ready_at = time.monotonic()
        """What the device waits for from then on is part of a worker's time."""
        self._thread = threading.Thread(target=self._run, name="longscan-engine", daemon=True)
        self._thread.start()

    def process(self, streams: Iterable[TokenStream | ErrorRow], keeper: Keeper | None = None) -> Generator[Outcome, None, None]:
        """Rows of all documents in `streams`: any order between documents, in order within one, its document row last.

        A DocumentError from a stream's blocks makes an error row of that document; rows of its windows and tokens may have
        come before it. What else the streams raise ends this call alone. Raises EngineFailed where the engine does.
        Closing the iterator gives its documents up.

        keeper: hears of rows before they are given here, and of carries, so that a stopped call can be gone on with.
        """
        caller = Caller(keeper)
        feed = Feed(caller, iter(streams), self._lanes, self._maker, self._vocab_size)
        with self._lock:
            self._callers.append(caller)
        try:
            yield from self._pump(caller, feed)
        finally:
            with self._lock:
                for document in list(caller.documents):
                    self._lanes.drop(document)
                self._callers.remove(caller)
                self._work.notify()
            feed.close()

    @property
    def totals(self) -> StepTotals:
        """Steps, tokens and rows so far, and with them the share of rows that held no token."""
        return self._lanes.totals

    @property
    def under_way(self) -> tuple[int, int]:
        """Tokens of steps that are booked and have no results yet, and tokens of those that have."""
        with self._lock:
            return self._lanes.totals.tokens - self._delivered, self._delivered

    def give_up(self, error: Exception) -> None:
        """Fail, by `error`, without waiting for the engine's thread: whatever it is at, it is left behind."""
        with self._lock:
            self._failure, self._given_up = self._failure or error, True
            self._work.notify_all()
            self._news.notify_all()

    @property
    def carry_layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each tensor of a carry."""
        return {name: (view.dtype, tuple(view.shape)) for name, view in self._forward.lane(0).items()}

    def stop(self, timeout_s: float) -> bool:
        """End the engine's thread after the steps that run, with a carry of each document for its caller's keeper.

        Calls of `process` give the rows that are there, and raise EngineFailed. Returns whether it came to that in time.
        The carries' tensors are the tables' own: the engine must not be gone before they are read.
        """
        with self._lock:
            self._stopping = True
            self._work.notify_all()
            return self._news.wait_for(lambda: self._stopped or self._closed or self._failure is not None, timeout_s) and self._stopped

    def close(self) -> None:
        """End the engine's thread after the step that runs. Calls of `process` that are not done raise EngineFailed."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._news.notify_all()
            given_up = self._given_up
        if not given_up:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _pump(self, caller: Caller, feed: Feed) -> Generator[Outcome, None, None]:
        """Read rows and feed, turn and turn about, until nothing is left of either."""
        while True:
            with self._lock:
                self._check_alive()
                news = list(caller.news)
                caller.news.clear()
                pull = None if self._stopped else feed.choose(self._bringing_before(caller))
                if pull is None and not news:
                    if feed.done:
                        return
                    if self._stopped:
                        raise EngineFailed("the engine was stopped")
                    self._await_news(caller)
                    continue
            if caller.keeper is not None:
                yield from caller.keeper.keep(news)
                self._put_away(caller, sum(isinstance(item, Kept) for item in news))
            else:
                yield from (row for row in news if not isinstance(row, Carry | Kept | Reached))
            if pull is not None:
                with self._meter("feed"):
                    pulled = pull()
                    with self._lock:
                        feed.give(pulled)
                        self._work.notify()

    def _bringing_before(self, caller: Caller) -> int:
        """Callers that began before this one and still have tokens to bring."""
        return sum(not before.fed for before in self._callers[: self._callers.index(caller)])

    def _put_away(self, caller: Caller, states: int) -> None:
        """The caller has so many states no longer in memory: others may be copied for it."""
        if states:
            with self._lock:
                caller.keeping -= states
                self._work.notify()

    def _check_alive(self) -> None:
        if self._failure is not None:
            message = f"the engine stopped at a step: {type(self._failure).__name__}: {self._failure}"
            raise EngineFailed(message) from self._failure
        if self._closed:
            raise EngineFailed("the engine is closed")

    def _await_news(self, caller: Caller) -> None:
        caller.idle = True
        self._work.notify()
        with self._meter("idle"):
            self._news.wait()

    def _announce(self) -> None:
        """Wake the callers: there may be rows to read, or room for more tokens."""
        for caller in self._callers:
            caller.idle = False
        self._news.notify_all()

    def _run(self) -> None:
        try:
            self._steps()
        except BaseException as error:  # whatever it is, callers must not wait for ever
            with self._lock:
                self._failure = error
        with self._lock:
            self._news.notify_all()

    def _steps(self) -> None:
        """Book, queue and settle steps, until the engine is closed or stopped. The steps that are queued and not settled are in order."""
        launched: deque[tuple[Step, Launched]] = deque()
        while True:
            step = self._next_step(launched[0][1] if launched else None)
            if self._closed or self._given_up:
                return
            if step is not None:
                launched.append(self._launch(step, launched))
            elif self._stopping and not launched:
                self._hand_over_carries()
                return
            if launched and (step is None or len(launched) > self._forward.steps_behind):
                self._settle(*launched.popleft())

    def _settle(self, step: Step, results: Launched) -> None:
        """Wait for a step, and give what came of it."""
        found = self._forward.collect(results)
        with self._meter("rows"):
            self._deliver(step, found)

    def _launch(self, step: Step, before: deque[tuple[Step, Launched]]) -> tuple[Step, Launched]:
        """Launch a step; where the device's memory is short, again, behind the steps `before` and with what can be given back.

        Raises what torch does where that is not enough, or where the step has overwritten what it began from.
        """
        tries = 0
        while True:
            try:
                return step, self._forward.launch(step)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not step.repeatable:
                    raise
                short = error.with_traceback(None)  # whose frames hold what the step had allocated
            while before:
                self._settle(*before.popleft())
            step = self._make_room(step, short, tries)
            tries += 1

    def _make_room(self, step: Step, short: Exception, tries: int) -> Step:
        """Give memory back: what caches hold, then half of the lanes. Returns the step to be run; raises `short` where that is all."""
        drop_caches()
        if not tries:
            log.warning("a step found no memory (%s): it is run again, without what caches held", in_a_line(short))
            return step
        with self._lock:
            before, lowered = self._lanes.slots.lanes, self._lanes.lower(step, self._forward.read_lane)
            if lowered is None:
                raise short
            step, moved = lowered
            self._forward.resize(self._lanes.slots, moved)
        log.warning("a step found no memory (%s): %d lanes from now on, %d before", in_a_line(short), self._lanes.slots.lanes, before)
        return step

    def _next_step(self, running: Launched | None) -> Step | None:
        """The next step, booked. None if the engine closes, or where none has come until `running`, the step on the device, is done."""
        # Where steps have one shape, any costs what a full one does. To wait as long as that for it to be full costs at most twice what
        # would have been best, whenever the tokens come.
        patience_s = max(PATIENCE_S, min(self._forward.step_seconds, MOST_PATIENCE_S))
        deadline = time.monotonic() + patience_s
        with self._lock:
            while not (self._closed or self._given_up or self._stopping):
                ready, left = self._lanes.ready_rows, deadline - time.monotonic()
                more_to_come = ready < self._lanes.step_tokens and any(caller.bringing for caller in self._callers)
                patient = more_to_come and (left > 0 or running is not None)
                step = None if patient else self._book()
                if step is not None:
                    self._announce()
                    return step
                if running is not None:
                    if self._forward.finished(running):
                        return None
                    self._work.wait(POLL_S)
                    continue
                self._work.wait(left if ready and patient else None)
                if not ready:
                    deadline = time.monotonic() + patience_s
        return None

    def _book(self) -> Step | None:
        with self._meter("schedule"):
            return self._lanes.next_step()

    def _deliver(self, step: Step, results: list[EntryResult]) -> None:
        """Make rows of a step and put them where their callers find them."""
        told = [tell(e, result, self._maker) for e, result in zip(step.entries, results, strict=True)]
        with self._lock:
            for of_entry in told:
                hand_over(of_entry, self._lanes)
            self._delivered += step.num_tokens
            self._announce()
        self._on_tokens(step.num_tokens, step.estimated_tokens)

    def _hand_over_carries(self) -> None:
        """Nothing runs any more: what every lane holds is its document's carry."""
        with self._lock:
            for document, tokens in self._lanes.at_risk():
                hand_over_carry(document, tokens, self._forward.read_lane)
            self._stopped = True
            self._announce()

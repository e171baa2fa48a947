"""The engine: token streams in, finished documents out, for any number of callers at once.

    caller's thread   process(): pulls its streams, hands tokens over, reads its rows        (feed.py)
    engine's thread   books a step (lanes.py, schedule.py), runs it (forward.py), makes rows of it (rows.py)

One lock guards the book and the callers' rows; steps, tokenization and rows are made without it. On a GPU the next step
is launched before the results of the one before are read. The engine's thread waits for nobody's reading: a caller that
does not read does not feed either, so its rows stay few while others go on. It keeps its lanes, though, until it reads
on or closes its iterator.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType

import torch
from longscan.kernels.checks import Backend
from longscan.pipeline.classify import Head
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.errors import DocumentError
from longscan.pipeline.feed import Feed
from longscan.pipeline.forward import Forward, Launched, StepModel
from longscan.pipeline.lanes import Caller, Lanes, OpenDocument, Step, StepTotals
from longscan.pipeline.meter import Meter
from longscan.pipeline.pool import check_width
from longscan.pipeline.records import ErrorRow, Outcome, TokenStream
from longscan.pipeline.rows import EntryResult, RowMaker, error_row
from longscan.pipeline.schedule import check_sizes
from longscan.pipeline.tokenize.prompt import Prompt

PATIENCE_S = 0.02
"""How long a step that is not full waits for callers that are still bringing tokens."""


class EngineFailed(RuntimeError):
    """The engine's thread has ended: by an error, which is the cause of this one, or because it was closed."""


class Engine:
    """A model on a device, and the documents that stream through it."""

    def __init__(
        self,
        model: StepModel,
        task: TaskConfig,
        *,
        lanes: int,
        step_tokens: int,
        segment_tokens: int,
        device: torch.device | str,
        backend: Backend,
        span_tiles: int | None = None,
        context_id: int | None = None,
        prompt: Prompt | None = None,
        reset_tokens: int | None = None,
        heads: Sequence[Head] = (),
        vocab_size: int | None = None,
        constant_shape: bool | None = None,
        on_tokens: Callable[[int], None] | None = None,
        meter: Meter | None = None,
        forward: Callable[..., Forward] = Forward,
    ) -> None:
        """
        lanes, step_tokens, segment_tokens: numbers; ConfigError where they do not fit each other.
        span_tiles: of the spans in which documents are scanned (`Segments.span_tiles`).
        context_id: token given to every document as context before its first (`score.context_token`), None for none.
        prompt: tokens that come before every document, behind the context token; in no count, and in no pool unless asked for.
        reset_tokens: a document starts afresh, state and context, at every multiple of it; poolings and sums go on.
        heads: of a task that classifies.
        vocab_size: ids from here on become error rows; None trusts the streams.
        constant_shape: every step has step_tokens rows. Default: on a GPU, where results would depend on the shape.
        on_tokens: called after each step, in the engine's thread, with the tokens that went through.
        meter: charged with the stages feed, idle (a caller that waits), schedule, pack, copy, launch, wait, device and rows.
        forward: makes what runs the steps.
        """
        check_sizes(lanes=lanes, step_tokens=step_tokens, segment_tokens=segment_tokens)
        if task.pools:
            check_width(task.embedding, model.width)
        device = torch.device(device)
        constant_shape = device.type == "cuda" if constant_shape is None else constant_shape
        self.width = model.width
        self._meter = meter or Meter()
        self._forward = forward(
            model,
            task,
            lanes=lanes,
            step_tokens=step_tokens,
            device=device,
            backend=backend,
            span_tiles=span_tiles,
            context_id=context_id,
            constant_shape=constant_shape,
            meter=self._meter,
            reset_tokens=reset_tokens,
            prompt=prompt,
        )
        self._lanes = Lanes(
            lanes,
            step_tokens=step_tokens,
            segment_tokens=segment_tokens,
            first_lane=self._forward.first_lane,
            constant_shape=constant_shape,
            reset_tokens=reset_tokens,
            keep_lanes=task.state_norm,
        )
        self._maker = RowMaker(task, segment_tokens=segment_tokens, context_id=context_id, reset_tokens=reset_tokens, heads=heads)
        self._vocab_size = vocab_size
        self._on_tokens = on_tokens or (lambda _: None)
        # Re-entrant: a caller's generator may be closed by the garbage collector, in whatever thread it runs.
        lock = threading.RLock()
        self._work, self._news = threading.Condition(lock), threading.Condition(lock)
        self._lock = lock
        self._callers: set[Caller] = set()
        self._delivered = 0
        """Tokens of the steps whose results are in."""
        self._closed = self._given_up = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="longscan-engine", daemon=True)
        self._thread.start()

    def process(self, streams: Iterable[TokenStream | ErrorRow]) -> Generator[Outcome, None, None]:
        """Rows of all documents in `streams`: any order between documents, in order within one, its document row last.

        A DocumentError from a stream's blocks makes an error row of that document; rows of its windows and tokens may have
        come before it. What else the streams raise ends this call alone. Raises EngineFailed where the engine does.
        Closing the iterator gives its documents up.
        """
        caller = Caller()
        feed = Feed(caller, iter(streams), self._lanes, self._maker, self._vocab_size)
        with self._lock:
            self._callers.add(caller)
        try:
            yield from self._pump(caller, feed)
        finally:
            with self._lock:
                for document in list(caller.documents):
                    self._lanes.drop(document)
                self._callers.discard(caller)
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
                rows = list(caller.rows)
                caller.rows.clear()
                pull = feed.choose()
                if pull is None and not rows:
                    if feed.done:
                        return
                    self._await_news(caller)
                    continue
            yield from rows
            if pull is not None:
                with self._meter("feed"):
                    pulled = pull()
                    with self._lock:
                        feed.give(pulled)
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
        launched: deque[tuple[Step, Launched]] = deque()
        while True:
            step = self._next_step(wait=not launched)
            if self._closed or self._given_up:
                return
            if step is not None:
                launched.append((step, self._forward.launch(step)))
            if launched and (step is None or len(launched) > self._forward.steps_behind):
                done, results = launched.popleft()
                found = self._forward.collect(results)
                with self._meter("rows"):
                    self._deliver(done, found)

    def _next_step(self, *, wait: bool) -> Step | None:
        """The next step, booked. None if the engine closes, or where `wait` is not set and none is due yet."""
        deadline = time.monotonic() + PATIENCE_S
        with self._lock:
            while not self._closed:
                ready, left = self._lanes.ready_tokens, deadline - time.monotonic()
                more_to_come = ready < self._lanes.step_tokens and not all(caller.idle for caller in self._callers)
                patient = more_to_come and (left > 0 or not wait)
                step = None if patient else self._book()
                if step is not None:
                    self._announce()
                    return step
                if not wait:
                    return None
                self._work.wait(left if ready and patient else None)
                if not ready:
                    deadline = time.monotonic() + PATIENCE_S
        return None

    def _book(self) -> Step | None:
        with self._meter("schedule"):
            return self._lanes.next_step()

    def _deliver(self, step: Step, results: list[EntryResult]) -> None:
        """Make rows of a step and put them where their callers find them."""
        made = []
        for e, result in zip(step.entries, results, strict=True):
            document, ends = e.document, e.entry.ends
            if document.gone:
                continue
            rows: list[Outcome]
            try:
                rows = self._maker.advance(document.document, document.carry, e.taken, result, ends=ends, num_bytes=document.num_bytes)
            except DocumentError as error:
                rows, ends = [error_row(document.document, error)], True
            made.append((document, rows, ends))
        with self._lock:
            for document, rows, ends in made:
                self._hand_over(document, rows, ends)
            self._delivered += step.num_tokens
            self._announce()
        self._on_tokens(step.num_tokens)

    def _hand_over(self, document: OpenDocument, rows: list[Outcome], finished: bool) -> None:
        if not document.gone:
            document.caller.rows.extend(rows)
            if finished:
                self._lanes.drop(document)

"""How far a run is, in tokens, with the time left: one line that moves on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from longscan.pipeline.shards import ShardReport
from longscan.pipeline.wording import clock_time, count, plural

log = logging.getLogger(__name__)

TERMINAL_S = 0.5
LOG_S = 10.0
FIRST_S = 1.0
"""Tokens that are told of within it after the first may be of the same step."""


class Progress:
    """Counts tokens from any thread. As a context: a thread of its own shows the line until it is left."""

    def __init__(
        self,
        estimated_tokens: int,
        num_shards: int,
        *,
        kept_tokens: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        every_s: float | None = None,
    ) -> None:
        """estimated_tokens, num_shards: of the shards that are left to do. kept_tokens: of these, what earlier starts have done.

        stream: where the line goes; standard error by default.
        every_s: how often a line is shown; by default more often on a terminal.
        """
        self._left, self._num_shards, self._kept = estimated_tokens, num_shards, kept_tokens
        self._ended = 0
        """Of the estimate, what the shards had that are done."""
        self._continued = 0
        """Tokens of these that earlier runs had computed (input.state_path)."""
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._began = clock()
        self._tokens = self._estimated = self._documents = self._errors = self._shards = 0
        self._done_tokens = 0
        self._first: float | None = None
        """When tokens first came: before that workers start, which says nothing of the time that is left."""
        self._since = self._began, kept_tokens, 0
        """When the first of them had come, what was done then, and what computed."""
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._terminal = self._stream.isatty()
        self._every_s = every_s if every_s is not None else TERMINAL_S if self._terminal else LOG_S
        self._thread = threading.Thread(target=self._show, name="longscan-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        log.info("%s", self.line())

    def add_tokens(self, tokens: int, estimated: int) -> None:
        """Tokens that went through the model, and how many of the estimate these are."""
        with self._lock:
            self._tokens += tokens
            self._estimated += estimated
            self._came()

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model so far."""
        return self._tokens

    def set_tokens(self, tokens: int, estimated: int) -> None:
        """The same where they are counted elsewhere."""
        with self._lock:
            if tokens > self._tokens:
                self._tokens, self._estimated = tokens, estimated
                self._came()

    def add_shard(self, report: ShardReport, estimated_tokens: int) -> None:
        """A shard is committed. What its tokens were, against their estimate, scales the estimate of the rest."""
        with self._lock:
            self._shards += 1
            self._documents += report.num_documents
            self._errors += report.num_errors
            self._done_tokens += report.num_tokens
            self._continued += report.carried.continued_tokens
            self._left -= estimated_tokens
            self._ended += estimated_tokens

    def _came(self) -> None:
        """Tokens came. Asks for the lock."""
        now = self._clock()
        self._first = now if self._first is None else self._first
        if now - self._first < FIRST_S:
            self._since = now, *self._counted()

    def _counted(self) -> tuple[int, int]:
        """Tokens that are done, and of these, that this start computed. Asks for the lock."""
        done = max(self._kept + self._tokens, self._done_tokens)
        return done, max(self._tokens, done - self._kept - self._continued)

    def line(self) -> str:
        """`812.0 k of about 1.3 M tokens, 62 %, 45.1 k tokens/s, 0:11 left; 3 of 6 shards, 1 document, 0 errors`"""
        with self._lock:
            now = self._clock()
            seconds = max(now - self._began, 1e-9)
            done, computed = self._counted()
            # Of shards that are done it is known; until there are some, by what went through.
            known, of = (self._done_tokens, self._ended) if self._done_tokens else (self._tokens, self._estimated)
            scale = known / of if known and of else 1.0
            total = max(self._done_tokens + round(self._left * scale), done)
            finished = self._shards == self._num_shards
            share = 100 if finished else min(99, 100 * done // max(total, 1))
            since, done_then, computed_then = self._since
            under_way = not finished and now > since and done > done_then
            speed = (computed - computed_then) / (now - since) if under_way else computed / seconds
            left = ""
            if under_way and done < total:  # by what is done, also where no start of this run had to compute it
                left = f", {clock_time((total - done) / (done - done_then) * (now - since))} left"
            kept = f" beside {count(done - computed)} kept" if done > computed else ""
            about = (
                f"{count(computed)} {'token' if computed == 1 else 'tokens'} in {clock_time(seconds)}{kept}"
                if finished
                else f"{count(done)} of about {count(total)} tokens, {share} %"
            )
            return (
                f"{about}, {count(speed)} tokens/s{left}; {self._shards} of {plural(self._num_shards, 'shard')}, "
                f"{plural(self._documents, 'document')}, {plural(self._errors, 'error')}"
            )

    def _show(self) -> None:
        while not self._end.wait(self._every_s):
            if self._terminal:
                self._stream.write(f"\r\x1b[K{self.line()}")
                self._stream.flush()
            else:
                log.info("%s", self.line())

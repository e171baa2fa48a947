"""A worker: it has the journey's tools built once and sends shards through them, several at once, in every cluster mode."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from longscan.pipeline.commit.ledger import NOTHING, Late, attempts, begin_attempt, end_attempt, losses, report_of
from longscan.pipeline.engine.engine import EngineFailed
from longscan.pipeline.errors import LongscanError, Stopped
from longscan.pipeline.journey import process_shard
from longscan.pipeline.keep.leftover import leftover
from longscan.pipeline.shards import Shard
from longscan.pipeline.worker.build import build_tools
from longscan.pipeline.worker.job import Chain, Job, Result, Usage
from longscan.pipeline.worker.suspects import History, Unfit, process_carefully
from longscan.pipeline.worker.turns import Turns
from longscan.pipeline.worker.watchdog import Watchdog

log = logging.getLogger(__name__)

SWITCH_S = 0.0005
COLLECT_AT = (5_000, 20, 100)
"""Objects more than there were; collections of these, and of those that outlived one, before older ones are looked through too."""
LATE_S = 600.0
"""How long a late attempt waits for the report of the newer one."""
TRIES = 3
"""Of a shard in one worker, before it is reported as failed: a file or the network may be away for a moment."""


class Worker:
    """Tools for one run on one device. As a context: everything is closed when it is left."""

    def __init__(self, job: Job, *, cores: int, on_tokens: Callable[[int, int], None] | None = None) -> None:
        """cores: of the worker.

        Raises ConfigError where the device's memory does not hold the model and the states.
        """
        self._stopped = threading.Event()
        self.tools = build_tools(job, cores=cores, on_tokens=on_tokens)
        self.output = self.tools.writer.output
        self._job = job
        self._put_back = _share_the_interpreter()
        self._turns = Turns()
        self._watchdog = Watchdog(self.tools.engine, job.config.cluster.hang_s)
        self._told = Usage()
        self._telling = threading.Lock()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop. Shards under way end with an error, and nothing of them is committed."""
        self._stopped.set()
        self._put_back()
        self._watchdog.close()
        self.tools.engine.close()
        self.tools.keeper.close()
        self.tools.tokenizer.close()
        self.tools.reader.close()

    def flush(self) -> None:
        """Stop in good order, within `cluster.grace_s`: documents in flight have their carries then, those that cost most first."""
        self._stopped.set()
        end = time.monotonic() + self._job.config.cluster.grace_s
        stopped = self.tools.engine.stop(self._job.config.cluster.grace_s)
        if not stopped or not self.tools.keeper.flush(max(end - time.monotonic(), 0.0)):
            log.warning("not all documents in flight could be kept within cluster.grace_s; the next start goes back to their last carries")

    def run_shard(self, shard: Shard) -> Result:
        """Send one shard on its journey, unless it is committed already; try again what may pass.

        Raises Stopped where the engine has failed, and every further shard would: the worker is of no use then.
        """
        for left in reversed(range(TRIES)):
            try:
                done = report_of(self.output, shard.index)
                return self._attempt(shard) if done is None else Result(shard.index, done)
            except Late as error:
                log.warning("%s", error)
                return self._await_newer(shard, str(error))
            except (LongscanError, OSError) as error:
                if isinstance(error, Stopped):
                    raise
                message = f"{type(error).__name__}: {error}"
                if not left or self._stopped.is_set() or self._stopped.wait(TRIES - left):
                    return Result(shard.index, None, message)
                log.warning("shard %d: %s; trying again", shard.index, message)
            except EngineFailed as error:
                if self._stopped.is_set():
                    return Result(shard.index, None, str(error))
                self._stopped.set()
                raise Stopped(f"shard {shard.index}: {error}") from error
            except Exception as error:  # a fault of the program, or of the device: the run says so, other shards go on
                if not self._stopped.is_set():
                    log.exception("shard %d failed", shard.index)
                return Result(shard.index, None, f"{type(error).__name__}: {error}")
        raise AssertionError("the last try returns")

    def _attempt(self, shard: Shard) -> Result:
        """One attempt at a shard; alone in this worker, and with care, where it was lost too often."""
        job, in_driver = self._job, self._job.config.cluster.mode == "inprocess"
        mark = leftover(self.output, shard.index).mark if attempts(self.output, shard.index) else NOTHING
        found = losses(self.output, shard.index, start=job.start, mark=mark)
        history = History(found, job.config.cluster.max_attempts, job.start)
        if history.hopeless:
            why = f"its worker died {len(history.losses)} times, and none of its documents was found to be the cause"
            return Result(shard.index, None, why)
        with self._turns.alone() if history.careful else self._turns.together():
            attempt = begin_attempt(self.output, shard.index, start=job.start, in_driver=in_driver, mark=mark)
            try:
                if history.careful:
                    return Result(shard.index, process_carefully(shard, self.tools, history, attempt))
                return Result(shard.index, process_shard(shard, self.tools, attempt))
            except BaseException as error:
                cause = error.__cause__ if isinstance(error, Unfit) else error
                if not isinstance(cause, EngineFailed) or cause.__cause__ is None:
                    end_attempt(self.output, shard.index, attempt)
                raise

    def _await_newer(self, shard: Shard, why: str) -> Result:
        """What became of a shard of which somebody else has begun a newer attempt, if it is told before long."""
        end = time.monotonic() + LATE_S
        while time.monotonic() < end and not self._stopped.wait(1):
            with suppress(LongscanError, OSError):
                done = report_of(self.output, shard.index)
                if done is not None:
                    return Result(shard.index, done)
        return Result(shard.index, None, why)

    def run_chain(self, chain: Chain) -> list[Result]:
        """Shards that read on in one row group, one after the other; none any more once the worker is stopped."""
        results: list[Result] = []
        for shard in chain:
            if self._stopped.is_set():
                break
            results.append(replace(self.run_shard(shard), usage=self._usage()))
        return results

    def _usage(self) -> Usage:
        """What has been done since the last call."""
        with self._telling:
            seconds = time.monotonic() - self.tools.engine.ready_at
            now = Usage(seconds, self.tools.engine.totals, self.tools.meter.costs(), workers=1, longest=seconds)
            before, self._told = self._told, now
        return now.minus(before)


def _share_the_interpreter() -> Callable[[], None]:
    """Have the engine's thread wait less for the others. Returns what puts the interpreter back as it was.

    A thread that wants Python's lock gets it from one that computes only when an interval is over: by default 5 ms, a tenth of a small
    model's step, and the engine wants it many times a step. Garbage is collected in whatever thread makes the next object, with the lock:
    what is there by now is not looked through any more, not even once, which took a quarter of a second; and documents on their way, which
    no cycle keeps, are looked through once when they come, and not all together again and again.
    """
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    gc.set_threshold(*COLLECT_AT)

    def put_back() -> None:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)

    return put_back

"""A worker: it builds the journey's tools once and sends shards through them, several at once, in every cluster mode."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
import torch
from longscan.pipeline.classify import head_file, read_heads
from longscan.pipeline.config import JobConfig
from longscan.pipeline.engine import Engine, EngineFailed
from longscan.pipeline.errors import ConfigError, LongscanError, OutputError, Stopped
from longscan.pipeline.fetch import fetch_model
from longscan.pipeline.graphs import with_graphs
from longscan.pipeline.journey import Tools, process_shard
from longscan.pipeline.keeper import Keeper
from longscan.pipeline.lanes import StepTotals
from longscan.pipeline.ledger import NOTHING, Late, attempts, begin_attempt, end_attempt, losses, report_of
from longscan.pipeline.leftover import leftover
from longscan.pipeline.memory import drop_caches, in_a_line, is_out_of_memory
from longscan.pipeline.meter import Cost, Costs, Meter, add_costs
from longscan.pipeline.model import load_model
from longscan.pipeline.read import Reader
from longscan.pipeline.resolve import Choice, Sizes, tokenizer_folder
from longscan.pipeline.schemas import has_windows
from longscan.pipeline.shards import Shard, ShardReport
from longscan.pipeline.states import KeptStates, binding
from longscan.pipeline.storage import locate, remember_secrets
from longscan.pipeline.suspects import History, Turns, Unfit, process_carefully
from longscan.pipeline.tokenize import DocumentTokenizer, load_tokenizer
from longscan.pipeline.watchdog import Watchdog
from longscan.pipeline.write import Writer

log = logging.getLogger(__name__)

SWITCH_S = 0.0005
SHARDS_AT_ONCE = 4
"""In one worker: while one shard is committed, others keep the engine busy."""
LATE_S = 600.0
"""How long a late attempt waits for the report of the newer one."""
TRIES = 3
"""Of a shard in one worker, before it is reported as failed: a file or the network may be away for a moment."""


EngineBuilder = Callable[["Job", str, Callable[[int], None] | None, Meter], Engine]

Chain = tuple[Shard, ...]
"""Shards that read on in one row group, to be taken one after the other."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a worker has done between two moments."""

    seconds: float = 0.0
    """Of one worker, or the sum of several's."""
    steps: StepTotals = field(default_factory=StepTotals)
    costs: Costs = field(default_factory=dict)

    def plus(self, other: Usage) -> Usage:
        return Usage(self.seconds + other.seconds, self.steps.plus(other.steps), add_costs(self.costs, other.costs))

    def minus(self, other: Usage) -> Usage:
        """What came since `other`, an earlier one of the same worker."""
        back = {stage: Cost(-cost.cpu, -cost.wall) for stage, cost in other.costs.items()}
        return Usage(self.seconds - other.seconds, self.steps.minus(other.steps), add_costs(self.costs, back))


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker needs to know of a run: plain data, sent to it once."""

    config: JobConfig
    choice: Choice
    sizes: Sizes
    passthrough: pa.Schema
    provenance: Mapping[str, Any]
    build: EngineBuilder | None = None
    """Makes the worker's engine, from what `build_engine` takes; None for `build_engine` itself."""
    start: int = 0
    """Number of the run's start, `RunFolder.number`."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a shard: its report, or why there is none."""

    index: int
    report: ShardReport | None
    error: str = ""
    usage: Usage | None = None
    """What the worker has done since the result before it that has one."""


class Worker:
    """Tools for one run on one device. As a context: everything is closed when it is left."""

    def __init__(self, job: Job, *, threads: int, on_tokens: Callable[[int], None] | None = None) -> None:
        """threads: cores for tokenization.

        Raises ConfigError where the device's memory does not hold the model and the states.
        """
        config, choice, sizes = job.config, job.choice, job.sizes
        remember_secrets(repr(config))
        folder = fetch_model(config.model.path, config.model.revision).folder  # on this machine, which may not be the driver's
        tokenizer = None
        if config.input.tokens_column is None:
            tokenizer = load_tokenizer(tokenizer_folder(config, folder), parse_special=config.model.parse_special)
        meter = Meter()
        self._stopped = threading.Event()
        self.output = locate(config.output.path, OutputError)
        with fitting(choice, sizes):
            engine = (job.build or build_engine)(job, folder, on_tokens, meter)
        self.tools = Tools(
            reader=Reader(config.input, job.passthrough, meter=meter),
            tokenizer=DocumentTokenizer(
                tokenizer,
                vocab_size=choice.vocab_size,
                workers=threads,
                with_offsets=has_windows(config.task)
                or (config.input.positions_column is not None and config.input.positions_unit == "chars"),
                append_eos=config.model.append_eos,
                prompt=choice.prompt,
                meter=meter,
                prefix_beyond=config.engine.segment_tokens if config.output.keep_state else None,
            ),
            engine=engine,
            writer=Writer(
                self.output,
                config.task,
                engine.width,
                job.passthrough,
                job.provenance,
                resets=config.engine.reset_tokens is not None,
                start=job.start,
                heads=choice.heads,
                keep_state=config.output.keep_state,
                continued=config.input.state_path is not None,
            ),
            keeper=self._keeper(job, engine),
            meter=meter,
        )
        self._job = job
        self._left = _share_the_interpreter()
        self._turns = Turns()
        self._watchdog = Watchdog(engine, config.cluster.hang_s)
        self._began = time.monotonic()
        self._told = Usage()
        self._telling = threading.Lock()

    def _keeper(self, job: Job, engine: Engine) -> Keeper:
        config, layout = job.config, engine.carry_layout
        path = config.input.state_path
        bound_to = binding(job.provenance) if path is not None or config.output.keep_state else ""
        return Keeper(
            self.output,
            job.provenance.get("fingerprint", ""),
            layout,
            checkpoint_tokens=config.engine.checkpoint_tokens,
            binding=bound_to,
            states=None if path is None else KeptStates(locate(path), bound_to, layout),
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop. Shards under way end with an error, and nothing of them is committed."""
        self._stopped.set()
        sys.setswitchinterval(self._left)
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
            now = Usage(time.monotonic() - self._began, self.tools.engine.totals, self.tools.meter.costs())
            before, self._told = self._told, now
        return now.minus(before)


def _share_the_interpreter() -> float:
    """Have the engine's thread wait less for the others. Returns the interval between two switches of threads, as it was.

    A thread that wants Python's lock gets it from one that computes only when an interval is over: by default 5 ms, a tenth of a small
    model's step, and the engine wants it many times a step. And what is there by now is not looked through at every collection of garbage.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    return before


def build_engine(job: Job, folder: str, on_tokens: Callable[[int], None] | None, meter: Meter) -> Engine:
    """The model in `folder`, on its device, in an engine. Raises what torch does where the memory does not hold it."""
    config, choice, sizes = job.config, job.choice, job.sizes
    model = with_graphs(
        load_model(
            folder,
            dtype=getattr(torch, choice.dtype),
            device=choice.device,
            backend=choice.backend,
            row_block=sizes.step_tokens if choice.device == "cuda" else None,
            format=choice.format,
            decay_scale=config.model.decay_scale,
        )
    )
    make = partial(
        Engine,
        model,
        config.task,
        step_tokens=sizes.step_tokens,
        segment_tokens=config.engine.segment_tokens,
        device=choice.device,
        backend=choice.backend,
        span_tiles=choice.span_tiles,
        context_id=choice.context_id,
        prompt=choice.prompt,
        reset_tokens=config.engine.reset_tokens,
        heads=read_heads(head_file(config.task.classify.head, folder), model.width) if config.task.classifies else (),
        vocab_size=choice.vocab_size,
        on_tokens=on_tokens,
        meter=meter,
    )
    if choice.device != "cuda":  # a CPU's memory is promised first and missed later: nothing is known from a start that went well
        return make(lanes=sizes.lanes)
    return with_fewer_lanes(lambda lanes: make(lanes=lanes), sizes.lanes)


def with_fewer_lanes(make: Callable[[int], Engine], lanes: int) -> Engine:
    """An engine of `lanes`, or of half of them as often as the memory does not hold it. Raises what torch does where it holds not one."""
    while True:
        try:
            return make(lanes)
        except (RuntimeError, MemoryError) as error:
            if lanes == 1 or not is_out_of_memory(error):
                raise
            reason = in_a_line(error)
        drop_caches()
        log.warning("%d lanes of state do not fit (%s): %d instead", lanes, reason, lanes // 2)
        lanes //= 2


@contextmanager
def fitting(choice: Choice, sizes: Sizes) -> Iterator[None]:
    """Turns what torch says of memory that is not there into a ConfigError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        lanes = 1 if choice.device == "cuda" else sizes.lanes  # there, fewer have been tried
        lower = "" if lanes == 1 else "Set engine.lanes lower: a run that has begun goes on with that. "
        raise ConfigError(
            f"the model in {choice.dtype} with {lanes} lanes of state and steps of {sizes.step_tokens} tokens does not fit into "
            f"the memory of this {choice.device}: {in_a_line(error)}. {lower}engine.step_tokens belongs to the run: a lower one takes "
            "another output.path, or output.overwrite=true, which begins anew"
        ) from error

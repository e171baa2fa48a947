"""Workers on Ray: an elastic pool of actors, on this machine or on a cluster.

Only descriptions of shards and reports pass through Ray; a worker reads its own input and writes its own output. Ray Data
is the scheduler: it keeps the pool between its bounds, holds back, and tries again what a lost worker had in hand.

A cluster's nodes find longscan, the model, the input and the output by the same names as this process: longscan must be installed
there (in their image, or as a wheel by `py_modules` of the Ray job), and local paths must lie on a disk that all share.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import torch
from longscan.pipeline.config import JobConfig
from longscan.pipeline.console import NAME, speak
from longscan.pipeline.errors import ConfigError, LongscanError, Stopped
from longscan.pipeline.job import Chain, Job, Result
from longscan.pipeline.nodes import Node, Workers, cores_here
from longscan.pipeline.progress import Progress
from longscan.pipeline.suspects import Unfit
from longscan.pipeline.worker import SHARDS_AT_ONCE, Worker

NO_LIMIT_S = -1
"""Ray Data gives a run up that yields no row for half an hour, which one long document may well take."""
GROW_AT, SHRINK_AT = 0.5, 0.2
"""Shards in hand, of all that the pool's workers could take, those that are still starting among them: with more than this there
are twice as many workers, or one fewer with less. By default Ray wants more than all, which workers that queue nothing never have."""
QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
TALLY_S = 1.0
POLL_S = 0.5
"""How often a worker asks whether it is to stop."""
SILENT_S = 5.0
"""Who has not asked for so long is gone: nobody waits for it."""
CALL_S = 10.0

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


@contextmanager
def joined(config: JobConfig) -> Iterator[None]:
    """While it lasts, this process is part of the cluster that cluster=ray names. Does nothing for other clusters.

    Raises ConfigError where there is none at cluster.address.
    """
    if config.cluster.mode != "ray":
        yield
        return
    try:
        _call(str(config.cluster.address))
        started = _connect(address=config.cluster.address)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"cluster.address: expected the address of a running Ray cluster, none answers at {config.cluster.address!r}: {reason}. "
            "If it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH in the environment"
        ) from error
    with _until_left(started):
        yield


def _call(address: str) -> None:
    """Raise OSError where nobody listens at `host:port`: Ray would go on asking for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_S).close()


def nodes_of(config: JobConfig) -> list[Node]:
    """The machines that workers can run on, as they are now."""
    if config.cluster.mode != "ray":
        return [Node(torch.cuda.device_count(), cores_here())]
    import ray

    there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(node.get("GPU", 0), node["CPU"]) for node in there if node.get("CPU")] or [Node(0, 1)]


def on_a_worker(config: JobConfig, gpus: float, ask: Callable[..., Answer], *arguments: Any) -> Answer:
    """`ask(*arguments)` where workers will run: on a cluster, this process may have no GPU when they do."""
    if config.cluster.mode != "ray":
        return ask(*arguments)
    import ray

    if gpus > max(node.gpus for node in nodes_of(config)):
        log.warning("no node of the cluster has %g GPUs now; waiting until one comes", gpus)
    with _told():
        answer: Answer = ray.get(ray.remote(num_cpus=0, num_gpus=gpus)(ask).remote(*arguments))
    return answer


def run_chains(job: Job, workers: Workers, chains: Sequence[Chain], progress: Progress) -> Generator[Result, None, None]:
    """Have the chains run by a pool of actors; results as they come. Raises Stopped where Ray cannot go on."""
    if not chains:
        return
    # One core more than there are: the driver's own work takes none of the workers'.
    cores = max(cores_here(), workers.most * workers.cores) + 1
    with _until_left(_connect(address="local", num_cpus=cores, include_dashboard=False)), _told():
        yield from _pool(job, workers, chains, progress)


def _connect(**settings: Any) -> bool:
    """Start Ray, or join it, unless this process is part of a cluster already. Whether it was this call that did."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its C++ part writes straight to the terminal
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a thread of Ray Data that comes late starts no cluster of its own
    import ray

    if ray.is_initialized():
        return False
    # Ray takes SIGTERM for itself, and ends the process where the command's own handler would end the run.
    before = signal.getsignal(signal.SIGTERM)
    ray.init(**settings, **QUIET)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
    return True


@contextmanager
def _until_left(started: bool) -> Iterator[None]:
    import ray

    try:
        yield
    finally:
        if started:
            ray.shutdown()


@contextmanager
def _told() -> Iterator[None]:
    """What Ray raises, as one line: a worker's own error as it is, anything else as Stopped."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, LongscanError):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if isinstance(cause, LongscanError):
            raise type(cause)(*cause.args) from error
        raise Stopped(f"Ray stopped the run: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The last line of what Ray says: it quotes whole traces, whose end names the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _pool(job: Job, workers: Workers, chains: Sequence[Chain], progress: Progress) -> Iterator[Result]:
    import ray
    from ray.data import ActorPoolStrategy, DataContext
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = NO_LIMIT_S
    context.autoscaling_config.actor_pool_util_upscaling_threshold = GROW_AT
    context.autoscaling_config.actor_pool_util_downscaling_threshold = SHRINK_AT
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what goes wrong is told by `_told`
    # Beside the driver, without whom there is no run: no other node that goes takes it along.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    tally = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)(Tally).remote()
    rows = ray.data.from_items([{"chain": pickle.dumps(chain)} for chain in chains], override_num_blocks=len(chains))
    results = rows.map_batches(
        RayWorker,
        fn_constructor_args=(job, workers.cores, tally, workers.most * job.config.cluster.max_attempts),
        batch_size=1,
        # Restarts of an actor, and tries of what it had in hand, are without limit by default.
        compute=ActorPoolStrategy(
            min_size=workers.least,
            max_size=workers.most,
            max_tasks_in_flight_per_actor=SHARDS_AT_ONCE,
            max_concurrent_calls_per_actor=SHARDS_AT_ONCE,
        ),
        num_cpus=workers.cores,
        num_gpus=workers.gpus,
    )
    with _watched(tally, progress), closing(_answers(results)) as answers:
        try:
            for answer in answers:
                if isinstance(answer, LongscanError):
                    raise answer
                yield from answer
        except (KeyboardInterrupt, GeneratorExit):
            _flush(tally, job.config.cluster.grace_s)
            raise


def _flush(tally: Any, grace_s: float) -> None:
    """Have all workers stop in good order, and wait for them for as long as they may take."""
    import ray

    end = time.monotonic() + grace_s
    with suppress(ray.exceptions.RayError):
        ray.get(tally.stop.remote(), timeout=grace_s)
        while time.monotonic() < end and ray.get(tally.waiting.remote(), timeout=max(end - time.monotonic(), 0.0)):
            time.sleep(POLL_S / 4)


def _answers(results: Any) -> Generator[Any, None, None]:
    """What the workers answered, as it comes; when it is closed, so is the data set's execution.

    Not by the data set's `iter_rows`: its threads outlive it, and Ray ends the process, with an exit code of its own, where one
    of them asks for something after `ray.shutdown`.
    """
    import ray

    bundles = results.iter_internal_ref_bundles()
    try:
        for bundle in bundles:
            for block in ray.get(bundle.block_refs):
                for answer in block.column("results").to_pylist():
                    yield pickle.loads(answer)
    finally:
        del bundles  # ends the execution


@contextmanager
def _watched(tally: Any, progress: Progress) -> Iterator[None]:
    """While it lasts, the workers' tokens are counted in `progress`."""
    import ray

    ended = threading.Event()

    def watch() -> None:
        with suppress(ray.exceptions.RayError):  # the numbers of a cluster that is going down are nobody's concern
            while not ended.wait(TALLY_S):
                progress.set_tokens(ray.get(tally.total.remote()))

    watcher = threading.Thread(target=watch, name="longscan-tally", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        with suppress(ray.exceptions.RayError):
            progress.set_tokens(ray.get(tally.total.remote(), timeout=TALLY_S))


class Tally:
    """The actor that adds up the tokens that workers report, and tells them to stop."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._begun = 0
        self._seen: dict[str, float] = {}
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    def stopping(self, worker: str) -> bool:
        """Whether the worker that asks is to stop; it says `stopped` then."""
        self._seen[worker] = time.monotonic()
        return self._stopping

    def stopped(self, worker: str) -> None:
        self._seen.pop(worker, None)

    def waiting(self) -> int:
        """Workers that are there and have not stopped."""
        return sum(time.monotonic() - seen < SILENT_S for seen in self._seen.values())

    def begin(self) -> int:
        """A worker begins to build its tools. How many have begun since one had them ready, this one counted."""
        self._begun += 1
        return self._begun

    def ready(self) -> None:
        self._begun = 0

    def add(self, worker: str, tokens: int) -> None:
        self._tokens[worker] += tokens

    def total(self) -> int:
        return self._tokens.total()


class RayWorker:
    """The actor around a worker."""

    def __init__(self, job: Job, cores: int, tally: Any, most_starts: int) -> None:
        """tally: handle of the `Tally`. most_starts: of workers that die before they are ready, until the run is given up."""
        import ray

        torch.set_num_threads(cores)
        if not logging.getLogger(NAME).handlers:
            speak()  # to the worker's log of Ray's, which is a file
        self._tally = tally
        self._name = f"{os.uname().nodename}:{os.getpid()}"
        self._threads = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard")
        self._failure: LongscanError | None = None
        # Kept for the answer: what a constructor raises, Ray wraps in several traces.
        begun = ray.get(tally.begin.remote())
        if begun > most_starts:
            self._failure = Stopped(f"workers died before they were ready, {begun - 1} times; does the memory hold the model?")
            return
        try:
            self._worker = Worker(job, threads=cores, on_tokens=self._count)
            tally.ready.remote()
            threading.Thread(target=self._await_stop, name="longscan-stop", daemon=True).start()
        except LongscanError as error:
            self._failure = error
        except Exception as error:
            self._failure = Stopped(f"a worker on {os.uname().nodename} cannot start: {type(error).__name__}: {error}")

    def _await_stop(self) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            while not ray.get(self._tally.stopping.remote(self._name)):
                time.sleep(POLL_S)
            flushing = threading.Thread(target=self._worker.flush, daemon=True)
            flushing.start()
            while flushing.is_alive():
                flushing.join(POLL_S)
                ray.get(self._tally.stopping.remote(self._name))
            self._tally.stopped.remote(self._name)

    def _count(self, tokens: int) -> None:
        self._tally.add.remote(self._name, tokens)

    def _run(self, chain: Chain) -> list[Result] | LongscanError:
        """Results of a chain. Where the engine failed this process ends, for Ray to start it anew and to try the chain elsewhere.

        An engine that fails whatever it is given ends the run instead.
        """
        try:
            return self._worker.run_chain(chain)
        except Unfit as error:
            return Stopped(str(error))
        except Stopped as error:
            log.error("a worker on %s ends and is started anew: %s", os.uname().nodename, error)
            os._exit(1)

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Chains in, as the driver pickled them; a pickled list of results out for each, or the error that ends the run."""
        for chain in batch["chain"]:
            loop = asyncio.get_running_loop()
            answer: object = self._failure
            if answer is None:
                answer = await loop.run_in_executor(self._threads, self._run, pickle.loads(chain))
            yield {"results": np.array([pickle.dumps(answer)], dtype=object)}

"""Workers on Ray: an elastic pool of actors, on this machine or on a cluster, and what there is to run on.

Only descriptions of shards and reports pass through Ray; a worker reads its own input and writes its own output. Ray Data
is the scheduler: it keeps the pool between its bounds, holds back, and tries again what a lost worker had in hand.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import ConfigError
from longscan.pipeline.progress import Progress
from longscan.pipeline.worker import SHARDS_AT_ONCE, Chain, Job, Result, Worker

NO_LIMIT_S = -1
"""Ray Data gives a run up that yields no row for half an hour, which one long document may well take."""

QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
TALLY_S = 1.0

Answer = TypeVar("Answer")


@contextmanager
def joined(config: JobConfig) -> Iterator[None]:
    """While it lasts, this process is part of the cluster that cluster=ray names. Does nothing for other clusters.

    Raises ConfigError where there is none at cluster.address.
    """
    if config.cluster.mode != "ray":
        yield
        return
    import ray

    try:
        ray.init(address=config.cluster.address, **QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"cluster.address: expected the address of a running Ray cluster, none answers at {config.cluster.address!r}: {reason}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def resources(config: JobConfig) -> tuple[int, int]:
    """GPUs and cores that workers can have: this machine's, or the cluster's."""
    if config.cluster.mode != "ray":
        return torch.cuda.device_count(), os.cpu_count() or 1
    import ray

    there = ray.cluster_resources()
    return int(there.get("GPU", 0)), max(1, int(there.get("CPU", 1)))


def on_a_worker(config: JobConfig, ask: Callable[..., Answer], *arguments: Any) -> Answer:
    """`ask(*arguments)` where workers will run: on a cluster the driver may have no GPU when they do."""
    if config.cluster.mode != "ray":
        return ask(*arguments)
    import ray

    task = ray.remote(num_cpus=0, num_gpus=gpus_of(config, resources(config)[0] > 0))(ask)
    answer: Answer = ray.get(task.remote(*arguments))
    return answer


def gpus_of(config: JobConfig, has_gpu: bool) -> float:
    """GPUs of one worker."""
    asked = config.cluster.gpus_per_worker
    return float(has_gpu) if asked == "auto" else float(asked)


def run_chains(job: Job, workers: tuple[int, int], cores: int, chains: Sequence[Chain], progress: Progress) -> Iterator[Result]:
    """Have the chains run by between `workers` actors with `cores` each; results as they come."""
    if not chains:
        return
    import ray

    started = not ray.is_initialized()
    if started:
        # One core more than there are: the driver's own work takes none of the workers'.
        ray.init(num_cpus=(os.cpu_count() or 1) + 1, include_dashboard=False, **QUIET)
    try:
        yield from _pool(job, workers, cores, chains, progress)
    finally:
        if started:
            ray.shutdown()


def _pool(job: Job, workers: tuple[int, int], cores: int, chains: Sequence[Chain], progress: Progress) -> Iterator[Result]:
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = NO_LIMIT_S
    tally = ray.remote(num_cpus=0)(Tally).remote()
    rows = ray.data.from_items([{"chain": pickle.dumps(chain)} for chain in chains], override_num_blocks=len(chains))
    results = rows.map_batches(
        RayWorker,
        fn_constructor_args=(job, cores, tally),
        batch_size=1,
        compute=ActorPoolStrategy(min_size=workers[0], max_size=workers[1], max_tasks_in_flight_per_actor=SHARDS_AT_ONCE),
        max_concurrency=SHARDS_AT_ONCE,
        num_cpus=cores,
        num_gpus=gpus_of(job.config, job.choice.device == "cuda"),
        max_restarts=-1,
        max_task_retries=-1,
    )
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(TALLY_S):
            progress.set_tokens(ray.get(tally.total.remote()))

    watcher = threading.Thread(target=watch, name="longscan-tally", daemon=True)
    watcher.start()
    try:
        for row in results.iter_rows():
            yield from pickle.loads(row["results"])
    finally:
        ended.set()
        watcher.join()


class Tally:
    """The actor that adds up the tokens that workers report."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()

    def add(self, worker: str, tokens: int) -> None:
        self._tokens[worker] += tokens

    def total(self) -> int:
        return self._tokens.total()


class RayWorker:
    """The actor around a worker."""

    def __init__(self, job: Job, cores: int, tally: Any) -> None:
        """tally: handle of the `Tally`."""
        torch.set_num_threads(cores)
        self._tally = tally
        self._name = f"{os.uname().nodename}:{os.getpid()}"
        self._worker = Worker(job, threads=cores, on_tokens=self._count)
        self._threads = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard")

    def _count(self, tokens: int) -> None:
        self._tally.add.remote(self._name, tokens)

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Chains in, as the driver pickled them; a pickled list of results out for each."""
        for chain in batch["chain"]:
            loop = asyncio.get_running_loop()
            results = await loop.run_in_executor(self._threads, self._worker.run_chain, pickle.loads(chain))
            yield {"results": np.array([pickle.dumps(results)], dtype=object)}

"""The pool of workers: chains of shards in, results out, tokens counted on the way, and a good end where the run is stopped."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

from longscan.pipeline.cluster.actors import POLL_S, RayWorker, Tally
from longscan.pipeline.cluster.connection import connect, told, until_left
from longscan.pipeline.errors import LongscanError
from longscan.pipeline.plan.nodes import Workers, cores_here
from longscan.pipeline.progress import Progress
from longscan.pipeline.shards import SHARDS_AT_ONCE
from longscan.pipeline.worker.job import Chain, Job, Result

NO_LIMIT_S = -1
"""Ray Data gives a run up that yields no row for half an hour, which one long document may well take."""
GROW_AT, SHRINK_AT = 0.5, 0.2
"""Shards in hand, of all that the pool's workers could take, those that are still starting among them: with more than this there
are twice as many workers, or one fewer with less. By default Ray wants more than all, which workers that queue nothing never have."""
TALLY_S = 1.0


def run_chains(job: Job, workers: Workers, chains: Sequence[Chain], progress: Progress) -> Generator[Result, None, None]:
    """Have the chains run by a pool of actors; results as they come. Raises Stopped where Ray cannot go on."""
    if not chains:
        return
    # One core more than there are: the driver's own work takes none of the workers'.
    cores = max(cores_here(), workers.most * workers.cores) + 1
    with until_left(connect(address="local", num_cpus=cores, include_dashboard=False)), told():
        yield from _pool(job, workers, chains, progress)


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
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what goes wrong is told by `told`
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
            max_tasks_in_flight_per_actor=in_hand(len(chains), workers),
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


def in_hand(chains: int, workers: Workers) -> int:
    """Of so many chains, at most in hand of one worker: of a few the first that is ready would take all, and leave the others none."""
    return min(SHARDS_AT_ONCE, -(-chains // workers.least))


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
                progress.set_tokens(*ray.get(tally.total.remote()))

    watcher = threading.Thread(target=watch, name="longscan-tally", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        with suppress(ray.exceptions.RayError):
            progress.set_tokens(*ray.get(tally.total.remote(), timeout=TALLY_S))

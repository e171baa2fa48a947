"""A run: plan, workers, progress, the mark that it is done. In this process, or on Ray; the shards' journey is the same.

prepare -> open the output -> plan -> shards that are not done -> workers -> _SUCCESS
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from longscan.pipeline import cluster
from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import ConfigError, OutputError, Stopped, TooManyErrors, again
from longscan.pipeline.keep.leftover import Done, kept_tokens
from longscan.pipeline.keep.states import STATES, read_index
from longscan.pipeline.output.duplicates import warn_of_duplicates
from longscan.pipeline.output.folder import RunFolder, find_output, open_output
from longscan.pipeline.output.lengths import warn_of_length
from longscan.pipeline.output.metrics import Metrics
from longscan.pipeline.plan.dryrun import Complete, Estimate, estimate, measure_speeds
from longscan.pipeline.plan.fingerprint import provenance
from longscan.pipeline.plan.nodes import Workers
from longscan.pipeline.plan.planner import Plan
from longscan.pipeline.plan.sizes import Sizes
from longscan.pipeline.plan.tail import longest_first
from longscan.pipeline.prepare import Prepared, prepare
from longscan.pipeline.progress import Progress
from longscan.pipeline.read.columns import Columns
from longscan.pipeline.read.sample import look
from longscan.pipeline.rules import validate, without_effect
from longscan.pipeline.shards import SHARDS_AT_ONCE, ShardReport
from longscan.pipeline.storage.location import locate
from longscan.pipeline.storage.redaction import remember_secrets
from longscan.pipeline.wording import count, plural
from longscan.pipeline.worker.job import Chain, EngineBuilder, Job, Result
from longscan.pipeline.worker.worker import Worker

log = logging.getLogger(__name__)


def run(config: JobConfig, *, build: EngineBuilder | None = None) -> dict[str, Any] | Estimate | Complete:
    """Do the job, or go on with it. Returns the summary of the finished run, as `_SUCCESS` holds it; for a dry run what is left to do.

    build: makes the workers' engines instead of `build.build_engine`.

    Raises ConfigError, ModelError, InputError, OutputError before anything starts, TooManyErrors once the run is complete
    with more error rows than allowed, Stopped where it is not complete and can go on.
    """
    remember_secrets(repr(config))
    validate(config)
    for line in without_effect(config.task):
        log.warning("%s", line)
    with cluster.joined(config):
        prepared = prepare(config)
        if config.dry_run:
            return _dry_run(prepared)
        with open_output(config.output.path, prepared.facts, overwrite=config.output.overwrite) as output:
            if output.finished:
                log.info("%s: the run is complete already, nothing to do", output.place)
                summary = output.summary()
            else:
                try:
                    summary = _work(prepared, output, build)
                except Stopped as error:
                    what = f"What is done is kept; once the cause is gone, {again(config.output.overwrite)} to go on"
                    raise Stopped(f"{error}\n{what}") from error
    if summary["errors"] > config.max_errors:
        raise TooManyErrors(
            f"the run is complete, but {plural(summary['errors'], 'row')} failed, and max_errors={config.max_errors}; "
            f"{locate(config.output.path, OutputError)}/errors says which and why"
        )
    return summary


def _dry_run(prepared: Prepared) -> Estimate | Complete:
    """What the job would do, or has left to do; nothing is written."""
    config, choice, workers = prepared.config, prepared.choice, prepared.workers
    output = find_output(config.output.path, prepared.facts, overwrite=config.output.overwrite)
    if output is not None and output.finished:
        return Complete(str(output.place))
    plan = prepared.plan() if output is None else output.plan(prepared.scan.files)
    sizes, done = _sizes(plan, config), _done(config, output, plan)
    model = (config.model.path, config.model.revision, choice)
    asked = (sizes.step_tokens, config.engine.segment_tokens, workers.cores, config.task.scores)
    speeds = cluster.on_a_worker(config, workers.gpus, measure_speeds, *model, *asked)
    sample = look(prepared.scan.files, Columns.of(config.input), prepared.tokenizer, limit=config.limit)
    made = (prepared.geometry, choice, sizes, plan, workers, speeds, sample, done)
    return estimate(*made, segment_tokens=config.engine.segment_tokens, keep_state=config.output.keep_state)


def _done(config: JobConfig, output: RunFolder | None, plan: Plan) -> Done:
    """output: of a run that is there."""
    path = config.input.state_path
    states = [] if path is None else [of_id[0].position for of_id in read_index(locate(path, ConfigError) / STATES).values()]
    if output is None:
        return Done(states=states)
    reports = output.reports()
    return Done(reports, kept_tokens(output.place, [shard.index for shard in plan.shards if shard.index not in reports]), states)


def _work(prepared: Prepared, output: RunFolder, build: EngineBuilder | None) -> dict[str, Any]:
    """Run the shards that are not done, and mark the run as done."""
    config = prepared.config
    if output.started:
        plan = output.plan(prepared.scan.files)
        if plan.device and plan.device != prepared.device:
            told = "this run began on %s and goes on on %s: what is new may differ in the last bits from what one of them alone would write"
            log.warning(told, plan.device, prepared.device)
    else:
        plan = prepared.plan()
        output.start(plan)
    done = output.reports()
    chains = [chain for chain in longest_first(plan.chains()) if any(shard.index not in done for shard in chain)]
    job = Job(config, prepared.choice, _sizes(plan, config), plan.passthrough, provenance(output.facts), build, output.number)
    log.info(
        "%s in %s, about %s tokens%s",
        plural(plan.num_rows, "document"),
        plural(len(plan.shards), "shard"),
        count(plan.estimated_tokens),
        f"; going on: {len(done)} of them done already" if done else "",
    )
    metrics = Metrics(
        output.place,
        start=output.number,
        done=done.values(),
        num_shards=len(plan.shards),
        about=_about(prepared, job),
        check=partial(output.check, now=True),
    )
    results = _run_shards(job, prepared.workers, chains, done, output, metrics)
    seconds = metrics.seconds
    failed = [result for result in results if result.report is None]
    if failed:
        raise Stopped(
            f"{len(failed)} of {plural(len(plan.shards), 'shard')} failed, the first of them shard {failed[0].index}: {failed[0].error}"
        )
    warn_of_length(output.place, plan, prepared.geometry.max_trained_tokens, config.engine.reset_tokens)
    duplicates = warn_of_duplicates(output.place, plan) if config.input.id_column is not None else 0  # those that longscan gives are unique
    return output.finish(plan, config.task, keep_state=config.output.keep_state, duplicate_ids=duplicates, seconds=seconds)


def _sizes(plan: Plan, config: JobConfig) -> Sizes:
    """As the plan has them, which results depend on; but for lanes, on which none does, where the configuration sets them."""
    sizes = Sizes(**plan.sizes)
    return sizes if config.engine.lanes == "auto" else replace(sizes, lanes=config.engine.lanes)


def _about(prepared: Prepared, job: Job) -> dict[str, Any]:
    """What a start runs on."""
    return {
        "device": job.choice.device,
        "backend": job.choice.backend,
        "dtype": job.choice.dtype,
        "sizes": asdict(job.sizes),
        "cluster": prepared.config.cluster.mode,
        "workers": asdict(prepared.workers),
    }


def _run_shards(
    job: Job, workers: Workers, chains: Sequence[Chain], done: Mapping[int, ShardReport], output: RunFolder, metrics: Metrics
) -> list[Result]:
    """Run the chains; returns what became of each shard that was not done. Metrics are written however it ends."""
    left = {shard.index: shard for chain in chains for shard in chain if shard.index not in done}
    ended: list[Result] = []
    if not left:
        return ended
    estimated, kept = sum(shard.estimated_tokens for shard in left.values()), sum(kept_tokens(output.place, left).values())
    if job.config.cluster.mode != "inprocess":
        log.info("workers start on Ray; the first tokens come when one has loaded the model")
    with Progress(estimated, len(left), kept_tokens=kept) as progress, _told(metrics, progress):
        start = _in_process if job.config.cluster.mode == "inprocess" else cluster.run_chains
        # Closed, not left to the garbage collector: workers must have ended before the output is unlocked.
        with closing(start(job, workers, chains, progress)) as results:
            for result in results:
                output.check(now=metrics.due)
                if result.index not in left and result.report is not None:
                    metrics.spend(result.usage)  # what its worker did since the one before, for other shards
                    continue  # of a chain that goes on: done by an earlier start
                ended.append(result)
                metrics.add(result, progress.computed_tokens)
                if result.report is None:
                    log.error("shard %d failed, the others go on: %s", result.index, result.error)
                else:
                    progress.add_shard(result.report, left[result.index].estimated_tokens)
    return ended


@contextmanager
def _told(metrics: Metrics, progress: Progress) -> Iterator[None]:
    """Metrics are written when it is left."""
    try:
        yield
    finally:
        metrics.write(progress.computed_tokens)


def _in_process(job: Job, workers: Workers, chains: Sequence[Chain], progress: Progress) -> Generator[Result, None, None]:
    # The worker is closed before the pool waits for its threads: they end because it is.
    with (
        ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard") as pool,
        Worker(job, cores=workers.cores, on_tokens=progress.add_tokens) as worker,
    ):
        try:
            yield from _chains_through(worker, pool, chains)
        except (KeyboardInterrupt, GeneratorExit):
            worker.flush()
            raise


def _chains_through(worker: Worker, pool: ThreadPoolExecutor, chains: Sequence[Chain]) -> Iterator[Result]:
    waiting = iter(chains)
    running: set[Future[list[Result]]] = set()
    while True:
        while len(running) < SHARDS_AT_ONCE and (chain := next(waiting, None)) is not None:
            running.add(pool.submit(worker.run_chain, chain))
        if not running:
            return
        finished, running = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            yield from future.result()

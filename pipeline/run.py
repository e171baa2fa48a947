"""A run: plan, workers, progress, the mark that it is done. In this process, or on Ray; the shards' journey is the same.

find, scan -> choose -> open the output -> plan -> shards that are not done -> workers -> _SUCCESS
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from longscan.pipeline import cluster
from longscan.pipeline.config import JobConfig, validate
from longscan.pipeline.dryrun import Estimate, estimate
from longscan.pipeline.errors import OutputError, Stopped, TooManyErrors
from longscan.pipeline.find import find_files
from longscan.pipeline.fingerprint import provenance, run_facts
from longscan.pipeline.model import Mamba2Geometry, read_geometry
from longscan.pipeline.output import RunFolder, open_output
from longscan.pipeline.plan import make_plan
from longscan.pipeline.progress import Progress
from longscan.pipeline.resolve import Choice, Sizes, choose, choose_sizes, model_facts, model_folder, tokenizer_of
from longscan.pipeline.scan import Scan, scan
from longscan.pipeline.storage import locate
from longscan.pipeline.worker import SHARDS_AT_ONCE, Chain, Job, Result, Worker
from longscan.pipeline.write import check_passthrough

log = logging.getLogger(__name__)

SMALL_TOKENS = 1 << 23
"""An input below this is run in this process, unless cluster says otherwise: Ray would take longer to start."""
CORES_A_WORKER = 4


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is settled before the output is touched."""

    config: JobConfig
    scan: Scan
    geometry: Mamba2Geometry
    choice: Choice
    facts: Mapping[str, Any]
    mode: str
    workers: tuple[int, int]
    """The least and the most at a time."""
    cores: int
    """Of a worker."""


def run(config: JobConfig) -> dict[str, Any] | Estimate:
    """Do the job, or go on with it. Returns the summary of the finished run, as `_SUCCESS` holds it; for a dry run an estimate.

    Raises ConfigError, ModelError, InputError, OutputError before anything starts, TooManyErrors once the run is complete
    with more error rows than allowed, Stopped where it is not complete and can go on.
    """
    validate(config)
    with cluster.joined(config):
        prepared = prepare(config)
        if config.dry_run:
            sizes = _sizes(prepared, _tokens(prepared))
            plan = make_plan(prepared.scan.files, shard_tokens=sizes.shard_tokens, limit=config.limit)
            return estimate(config, prepared.geometry, prepared.choice, sizes, plan, prepared.workers[1])
        with open_output(config.output.path, prepared.facts, overwrite=config.output.overwrite) as output:
            summary = output.summary() if output.finished else _work(prepared, output)
    if summary["errors"] > config.max_errors:
        raise TooManyErrors(
            f"the run is complete, but {summary['errors']} rows failed, and max_errors={config.max_errors}; "
            f"{locate(config.output.path, OutputError)}/errors says which and why"
        )
    return summary


def prepare(config: JobConfig) -> Prepared:
    """Find the input and the model and settle what will run; nothing is written."""
    check_passthrough(config.task, list(config.input.passthrough))
    output = locate(config.output.path, OutputError)
    scanned = scan(find_files(config.input.path, exclude=output), config.input)
    folder = model_folder(config.model.path, config.model.revision)
    geometry = read_geometry(folder)
    tokenizer = tokenizer_of(config, geometry, folder)
    tokens = sum(group.num_bytes for file in scanned.files for group in file.row_groups) // 4
    mode = config.cluster.mode
    gpus, cores = cluster.resources(config)
    least, most = _workers(config, gpus, cores)
    if mode == "auto":
        mode = "inprocess" if most == 1 or tokens < SMALL_TOKENS else "local"
        log.info("cluster %s: %s", mode, "one worker is enough here" if mode == "inprocess" else f"{most} workers")
    if mode == "inprocess":
        least = most = 1
    choice = cluster.on_a_worker(config, choose, config, folder, geometry, tokenizer)
    settled = replace(config, model=replace(config.model, dtype=choice.dtype, add_bos=choice.context_id is not None))
    versions = {"longscan": version("longscan")}
    facts = run_facts(settled, scanned.files, model=model_facts(choice, tokenizer), backend=choice.backend, versions=versions)
    share = config.cluster.cpus_per_worker
    return Prepared(
        config, scanned, geometry, choice, facts, mode, (least, most), max(1, cores // most) if share == "auto" else max(1, int(share))
    )


def _workers(config: JobConfig, gpus: int, cores: int) -> tuple[int, int]:
    wanted = config.cluster.workers
    if isinstance(wanted, list):
        return wanted[0], wanted[1]
    number = wanted if wanted != "auto" else gpus or max(1, cores // CORES_A_WORKER)
    return number, number


def _tokens(prepared: Prepared) -> int:
    return make_plan(prepared.scan.files, shard_tokens=1 << 40, limit=prepared.config.limit).estimated_tokens


def _sizes(prepared: Prepared, tokens: int) -> Sizes:
    return choose_sizes(prepared.config, prepared.geometry, prepared.choice, tokens, prepared.workers[1])


def _work(prepared: Prepared, output: RunFolder) -> dict[str, Any]:
    """Run the shards that are not done, and mark the run as done."""
    config = prepared.config
    if output.started:
        plan = output.plan(prepared.scan.files)
        sizes = Sizes(**plan.sizes)
    else:
        sizes = _sizes(prepared, _tokens(prepared))
        as_json = {"lanes": sizes.lanes, "step_tokens": sizes.step_tokens, "shard_tokens": sizes.shard_tokens}
        plan = make_plan(
            prepared.scan.files,
            shard_tokens=sizes.shard_tokens,
            limit=config.limit,
            passthrough=prepared.scan.passthrough,
            sizes=as_json,
        )
        output.start(plan)
    done = output.reports()
    chains = [chain for chain in plan.chains() if any(shard.index not in done for shard in chain)]
    left = {shard.index: shard for chain in chains for shard in chain if shard.index not in done}
    log.info(
        "%d documents in %d shards, about %d tokens; %d shards are done already",
        plan.num_rows,
        len(plan.shards),
        plan.estimated_tokens,
        len(done),
    )
    job = Job(config, prepared.choice, sizes, plan.passthrough, provenance(output.facts))
    began = time.monotonic()
    failed: list[Result] = []
    with Progress(sum(shard.estimated_tokens for shard in left.values()), len(left)) as progress:
        if prepared.mode == "inprocess":
            results = _in_process(job, prepared.cores, chains, progress)
        else:
            results = cluster.run_chains(job, prepared.workers, prepared.cores, chains, progress)
        for result in results:
            output.check()
            if result.report is None:
                failed.append(result)
            elif result.index in left:
                progress.add_shard(result.report, left[result.index].estimated_tokens)
    if failed:
        raise Stopped(
            f"{len(failed)} of {len(plan.shards)} shards failed, the first of them shard {failed[0].index}: {failed[0].error}\n"
            "What is done is kept; once the cause is gone, run the same command again to go on"
        )
    return output.finish(plan, config.task, seconds=round(time.monotonic() - began, 3))


def _in_process(job: Job, cores: int, chains: Sequence[Chain], progress: Progress) -> Iterator[Result]:
    if not chains:
        return
    with (
        ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard") as pool,
        Worker(job, threads=cores, on_tokens=progress.add_tokens) as worker,
    ):
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

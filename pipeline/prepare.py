"""What is settled before the output is touched: the input, the model, where to run, on what, and how much of it at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

from longscan.kernels import tuning
from longscan.pipeline import cluster
from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import OutputError
from longscan.pipeline.model import Mamba2Geometry, check_weights, read_geometry
from longscan.pipeline.model.recipe import read_recipe, settle
from longscan.pipeline.output.bindings import check_bound, check_keeps, earlier_run
from longscan.pipeline.output.folder import begun_run
from longscan.pipeline.plan.fingerprint import fingerprint, run_facts
from longscan.pipeline.plan.nodes import Workers, size_workers
from longscan.pipeline.plan.planner import Plan, make_plan
from longscan.pipeline.plan.resolve import (
    Choice,
    choose,
    look_at_device,
    model_facts,
    narrower_products,
    pinned,
    tokenizer_of,
)
from longscan.pipeline.plan.sizes import Sizes, choose_sizes, choose_spans
from longscan.pipeline.plan.tail import giants
from longscan.pipeline.read.find import find_files
from longscan.pipeline.read.scan import Scan, scan
from longscan.pipeline.storage.location import locate
from longscan.pipeline.tokenize import TextTokenizer
from longscan.pipeline.wording import count
from longscan.pipeline.write.writer import check_passthrough

log = logging.getLogger(__name__)

SMALL_TOKENS = 1 << 23
"""An input below this is run in this process, unless cluster says otherwise: Ray would take longer to start."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is settled before the output is touched."""

    config: JobConfig
    scan: Scan
    geometry: Mamba2Geometry
    choice: Choice
    device: str
    """The name of what it was chosen for."""
    sizes: Sizes
    facts: Mapping[str, Any]
    workers: Workers
    tokenizer: TextTokenizer | None

    def plan(self) -> Plan:
        """Of a run that begins now; one that goes on has its own."""
        return make_plan(
            self.scan.files,
            shard_tokens=self.sizes.shard_tokens,
            limit=self.config.limit,
            passthrough=self.scan.passthrough,
            sizes=asdict(self.sizes),
            device=self.device,
        )


def prepare(config: JobConfig) -> Prepared:
    """Find the input and the model and settle what will run; nothing is written. `config.cluster.mode` is no longer auto then."""
    continued = config.input.state_path is not None
    check_passthrough(config.task, list(config.input.passthrough), continued=continued)
    output = locate(config.output.path, OutputError)
    earlier = earlier_run(config)
    scanned = scan(find_files(config.input.path, exclude=output), config.input)
    config, model = pinned(config)
    folder = model.folder
    geometry = read_geometry(folder, format=config.model.format)
    check_weights(folder, geometry, format=config.model.format)
    tokenizer = tokenizer_of(config, geometry, folder)
    recipe = read_recipe(folder)
    config = settle(config, recipe, tokenizer)
    if geometry.max_trained_tokens is None and recipe is not None:
        geometry = replace(geometry, max_trained_tokens=recipe.max_tokens)
    whole = make_plan(scanned.files, shard_tokens=1 << 40, limit=config.limit)
    tokens = whole.estimated_tokens
    config, workers = _settle_cluster(config, tokens)
    device = cluster.on_a_worker(config, workers.gpus, look_at_device, workers.gpus > 0)
    choice = choose(config, folder, geometry, tokenizer, device)
    if config.output.keep_state:
        check_keeps(tokenizer, geometry)
    before = earlier if earlier is not None or config.output.overwrite else begun_run(output)
    few = giants(scanned.files, workers.most, config.limit)
    spans = choose_spans(config, geometry, choice, device, whole.num_rows // workers.most, before, few)
    choice = replace(choice, span_tiles=spans)
    check_passthrough(config.task, list(config.input.passthrough), choice.heads, continued=continued)
    settled = replace(config, model=replace(config.model, dtype=choice.dtype, add_bos=choice.context_id is not None))
    # What was found fastest on a GPU can change the last bits.
    versions = {"longscan": version("longscan"), **({"tuning": tuning.version()} if choice.backend == "cutile" else {})}
    if (products := narrower_products(choice.backend, choice.device)) is not None:
        versions["products"] = products
    model_of = model_facts(config, choice, tokenizer)
    states = None if earlier is None else fingerprint(earlier)
    on = (choice.device, choice.backend, spans)
    facts = run_facts(settled, scanned.files, model=model_of, on=on, versions=versions, states=states)
    if earlier is not None:
        check_bound(earlier, facts)
    sizes = choose_sizes(config, geometry, device, tokens, workers.most, choice.context_slots, choice.itemsize)
    return Prepared(config, scanned, geometry, choice, device.name, sizes, facts, workers, tokenizer)


def _settle_cluster(config: JobConfig, tokens: int) -> tuple[JobConfig, Workers]:
    """Where to run: with cluster=auto in this process, unless the input and the machine are worth several."""
    nodes = cluster.nodes_of(config)
    if config.cluster.mode != "auto":
        return config, size_workers(config.cluster, nodes)
    spread = size_workers(config.cluster, nodes)
    mode, why = "local", f"{spread.most} workers for about {count(tokens)} tokens"
    if config.cluster.workers == "auto" and tokens < SMALL_TOKENS:
        mode, why = "inprocess", f"about {count(tokens)} tokens are not worth the start of Ray"
    elif spread.most == 1:
        mode, why = "inprocess", "this machine has room for one worker" if config.cluster.workers == "auto" else "one worker, as asked"
    log.info("cluster=%s: %s", mode, why)
    config = replace(config, cluster=replace(config.cluster, mode=mode))
    return config, size_workers(config.cluster, nodes)

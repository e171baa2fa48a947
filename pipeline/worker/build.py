"""A worker's tools, built once: the model on its device in an engine, and what stands before and behind that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.engine.graphs import with_graphs
from longscan.pipeline.engine.memory import drop_caches, in_a_line, is_out_of_memory
from longscan.pipeline.engine.settings import EngineSettings
from longscan.pipeline.errors import ConfigError, OutputError
from longscan.pipeline.journey import Tools
from longscan.pipeline.keep.keeper import Keeper
from longscan.pipeline.keep.states import KeptStates
from longscan.pipeline.meter import Meter
from longscan.pipeline.model import load_model
from longscan.pipeline.model.classify import head_file, read_heads
from longscan.pipeline.plan.fetch import fetch_model
from longscan.pipeline.plan.fingerprint import binding
from longscan.pipeline.plan.resolve import Choice, tokenizer_folder
from longscan.pipeline.plan.sizes import Sizes
from longscan.pipeline.read.reader import Reader
from longscan.pipeline.schemas import has_windows
from longscan.pipeline.storage.location import Location, locate
from longscan.pipeline.storage.redaction import remember_secrets
from longscan.pipeline.tokenize import DocumentTokenizer, TextTokenizer, load_tokenizer
from longscan.pipeline.wording import plural
from longscan.pipeline.worker.job import Job
from longscan.pipeline.write.writer import Writer

log = logging.getLogger(__name__)

FREE_SHARE = 8
"""Beside a GPU, one core in so many tokenizes nothing: when a job begins all that tokenize are busy, and threads that read, feed the GPU
and write need a core at once."""


def build_tools(job: Job, *, cores: int, on_tokens: Callable[[int, int], None] | None = None) -> Tools:
    """For one run on one device. cores: of the worker.

    Raises ConfigError where the device's memory does not hold the model and the states.
    """
    config = job.config
    remember_secrets(repr(config))
    folder = fetch_model(config.model.path, config.model.revision).folder  # on this machine, which may not be the driver's
    output = locate(config.output.path, OutputError)
    meter = Meter()
    tokenizer = None
    if config.input.tokens_column is None:
        tokenizer = load_tokenizer(tokenizer_folder(config, folder), parse_special=config.model.parse_special)
    with fitting(job.choice, job.sizes):
        engine = (job.build or build_engine)(job, folder, on_tokens, meter)
    return Tools(
        reader=Reader(config.input, job.passthrough, meter=meter),
        tokenizer=_document_tokenizer(job, tokenizer, cores, meter),
        engine=engine,
        writer=_writer(job, output, engine.width),
        keeper=_keeper(job, output, engine),
        meter=meter,
    )


def _document_tokenizer(job: Job, tokenizer: TextTokenizer | None, cores: int, meter: Meter) -> DocumentTokenizer:
    """tokenizer: None where documents bring token ids."""
    config = job.config
    positions_in_chars = config.input.positions_column is not None and config.input.positions_unit == "chars"
    return DocumentTokenizer(
        tokenizer,
        vocab_size=job.choice.vocab_size,
        workers=tokenizing_threads(cores, job.choice.device),
        with_offsets=has_windows(config.task) or positions_in_chars,
        append_eos=config.model.append_eos,
        prompt=job.choice.prompt,
        meter=meter,
        prefix_beyond=config.engine.segment_tokens if config.output.keep_state else None,
        gives_way=job.choice.device != "cpu",
    )


def tokenizing_threads(cores: int, device: str) -> int:
    """How many a worker of `cores` has; on a CPU as many, since the model's own threads are on all cores as well."""
    return cores if device == "cpu" else cores - cores // FREE_SHARE


def _writer(job: Job, output: Location, width: int) -> Writer:
    config = job.config
    return Writer(
        output,
        config.task,
        width,
        job.passthrough,
        job.provenance,
        resets=config.engine.reset_tokens is not None,
        start=job.start,
        heads=job.choice.heads,
        keep_state=config.output.keep_state,
        continued=config.input.state_path is not None,
    )


def _keeper(job: Job, output: Location, engine: Engine) -> Keeper:
    config, layout = job.config, engine.carry_layout
    path = config.input.state_path
    bound_to = binding(job.provenance) if path is not None or config.output.keep_state else ""
    return Keeper(
        output,
        job.provenance.get("fingerprint", ""),
        layout,
        checkpoint_tokens=config.engine.checkpoint_tokens,
        binding=bound_to,
        states=None if path is None else KeptStates(locate(path), bound_to, layout),
    )


def build_engine(job: Job, folder: str, on_tokens: Callable[[int, int], None] | None, meter: Meter) -> Engine:
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
    settings = engine_settings(job, folder, model.width)

    def make(lanes: int) -> Engine:
        return Engine(model, replace(settings, lanes=lanes), on_tokens=on_tokens, meter=meter)

    if choice.device != "cuda":  # a CPU's memory is promised first and missed later: nothing is known from a start that went well
        return make(sizes.lanes)
    return with_fewer_lanes(make, sizes.lanes)


def engine_settings(job: Job, folder: str, width: int) -> EngineSettings:
    """What the worker's engine is built for. folder: the model's; width: of its hidden states."""
    config, choice, sizes = job.config, job.choice, job.sizes
    return EngineSettings(
        task=config.task,
        lanes=sizes.lanes,
        step_tokens=sizes.step_tokens,
        segment_tokens=config.engine.segment_tokens,
        device=choice.device,
        backend=choice.backend,
        span_tiles=choice.span_tiles,
        context_id=choice.context_id,
        prompt=choice.prompt,
        reset_tokens=config.engine.reset_tokens,
        heads=read_heads(head_file(config.task.classify.head, folder), width) if config.task.classifies else (),
        vocab_size=choice.vocab_size,
    )


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
            f"the model in {choice.dtype} with {plural(lanes, 'lane')} of state and steps of {sizes.step_tokens} tokens does not fit into "
            f"the memory of this {choice.device}: {in_a_line(error)}. {lower}engine.step_tokens belongs to the run: a lower one takes "
            "another output.path, or output.overwrite=true, which begins anew"
        ) from error

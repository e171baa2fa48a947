"""From what was asked for to what will run: model folder, device, backend, dtype, context token, and sizes, each said in the log.

A run's results depend on some of these (they are in its fingerprint) and its speed on the others (they are in its plan);
a run that goes on takes the latter from there, whatever machine it goes on with.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from longscan.kernels.checks import Backend
from longscan.kernels.segments import MOST_ROWS, TILE
from longscan.kernels.ssd.spans import full_waves, heads_a_block, pays, span_tiles
from longscan.pipeline.config import JobConfig
from longscan.pipeline.engine.pool import check_width
from longscan.pipeline.engine.schedule import check_sizes
from longscan.pipeline.engine.score import context_token
from longscan.pipeline.engine.slots import spare_slots
from longscan.pipeline.errors import ConfigError, ModelError
from longscan.pipeline.model import Mamba2Geometry, model_hash
from longscan.pipeline.model.classify import head_file, head_hash, read_heads
from longscan.pipeline.plan.fetch import Fetched, fetch_model, fetch_tokenizer
from longscan.pipeline.plan.tail import Giants
from longscan.pipeline.schemas import HeadShape
from longscan.pipeline.shards import SHARDS_AT_ONCE
from longscan.pipeline.tokenize import Prompt, TextTokenizer, check_fits, load_tokenizer, make_prompt

log = logging.getLogger(__name__)

GPU_STEP_TOKENS = 65536
CPU_STEP_TOKENS = 8192
MAX_LANES = 256
LEAST_SHARD = 1 << 20
"""Tokens."""
SHARDS_EACH = 16
"""Of a worker: then a run's end, when some are at their last shard and others have none, costs some 2 % (`tail.foresee`)."""
FEW_SHARE = 0.15
"""Of a worker's tokens: a giant that has more of them is left alone when all others are done, since it has a segment of each step beside
them, and takes twice as long for the rest without spans. Those cost a model of 24 heads a twentieth of its speed, others a hundredth."""
NO_GIANTS = Giants(0, 0.0)
STATE_SHARE = 0.25
"""Of the device's memory, for the tables of states."""
STEP_SHARE = 0.7
"""Of a GPU's memory, for the weights and a step's activations together."""
MIN_CAPABILITY = (8, 0)
"""Of a GPU that cuTile compiles for: Ampere."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a worker computes on."""

    kind: str
    """`cuda` or `cpu`, as torch names them."""
    name: str
    num_bytes: int
    """The device's whole memory; of a CPU, the machine's."""
    capability: tuple[int, int] | None = None
    """Of a GPU."""
    has_tile: bool = False
    """The package cuda-tile is installed."""
    processors: int = 0
    """Multiprocessors of a GPU."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs, as far as results depend on it and on the configuration, as `recipe.settle` returns it."""

    folder: str
    """The model's, on this machine."""
    device: str
    """Its kind: cuda or cpu."""
    backend: Backend
    dtype: str
    context_id: int | None
    """Token that every document has as context."""
    vocab_size: int
    format: str = "auto"
    """Of the model's checkpoint."""
    prompt: Prompt | None = None
    """Before every document, behind the context token."""
    heads: tuple[HeadShape, ...] = ()
    """Of a task that classifies."""
    span_tiles: int | None = None
    """Of the spans in which documents are scanned; None: each goes from tile to tile."""

    @property
    def context_slots(self) -> int:
        """Slots of the state tables beside the lanes': a state behind the context for each number of tokens that a document replaces."""
        return 1 + (self.prompt.replaceable if self.prompt is not None else 0)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return int(torch.finfo(getattr(torch, self.dtype)).bits) // 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much runs at once."""

    lanes: int
    step_tokens: int
    shard_tokens: int


def pinned(config: JobConfig) -> tuple[JobConfig, Fetched]:
    """Fetch the model, and the tokenizer where it is named. Returns the configuration with their commits as revisions, and the model."""
    model = fetch_model(config.model.path, config.model.revision)
    settings = replace(config.model, revision=model.commit)
    if settings.tokenizer is not None and config.input.tokens_column is None:
        settings.tokenizer_revision = fetch_tokenizer(settings.tokenizer, settings.tokenizer_revision).commit
    return replace(config, model=settings), model


def tokenizer_folder(config: JobConfig, folder: str) -> str:
    """Where the tokenizer is: with the model in `folder`, unless another is named."""
    settings = config.model
    return folder if settings.tokenizer is None else fetch_tokenizer(settings.tokenizer, settings.tokenizer_revision).folder


def tokenizer_of(config: JobConfig, geometry: Mamba2Geometry, folder: str) -> TextTokenizer | None:
    """The tokenizer, checked to fit the model; None where documents bring token ids."""
    if config.input.tokens_column is not None:
        return None
    tokenizer = load_tokenizer(tokenizer_folder(config, folder), parse_special=config.model.parse_special)
    check_fits(tokenizer, geometry.vocab_size)
    return tokenizer


def look_at_device(use_gpu: bool) -> Device:
    """What this process computes on. use_gpu: take the first GPU that it sees, where it sees one."""
    if use_gpu and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        has_tile = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.tile") is not None
        capability = torch.cuda.get_device_capability(0)
        return Device("cuda", found.name, int(found.total_memory), capability, has_tile, int(found.multi_processor_count))
    return Device("cpu", _cpu_name(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _cpu_name(about: str = "/proc/cpuinfo") -> str:
    """The processor's model, where the system tells it, and the vector instructions that torch uses: what its last bits come of."""
    found = None
    with suppress(OSError), open(about, encoding="utf-8", errors="replace") as file:
        found = re.search(r"^model name\s*: *(\S.*?) *$", file.read(), re.MULTILINE)
    return f"{found[1] if found else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def choose(config: JobConfig, folder: str, geometry: Mamba2Geometry, tokenizer: TextTokenizer | None, device: Device) -> Choice:
    """Settle everything that results depend on. Raises ConfigError or ModelError where what is asked for cannot be had there."""
    dtype = config.model.dtype if config.model.dtype != "auto" else "bfloat16" if device.kind == "cuda" else "float32"
    reason = _no_cutile(geometry, dtype, device)
    if config.engine.backend == "cutile" and reason:
        raise ConfigError(f"engine.backend=cutile: {reason}. Use engine.backend=auto, or torch, which runs anywhere")
    backend: Backend = "torch" if config.engine.backend == "torch" or reason else "cutile"
    why = "as asked" if config.engine.backend != "auto" else reason or f"{device.name} runs it"
    products = f", products in {found}" if (found := narrower_products(backend, device.kind)) else ""
    log.info("backend %s (%s), %s on %s%s", backend, why, dtype, f"{device.kind}: {device.name}", products)
    if config.task.scores and not geometry.has_head:
        raise ModelError(
            f"model.path: task={config.task.name} needs a model with an output projection, and {folder} has none; use task=embed"
        )
    bos, eos = (geometry.bos_id, geometry.eos_id) if tokenizer is None else (tokenizer.bos_id, tokenizer.eos_id)
    add_bos = config.model.add_bos if config.model.add_bos != "auto" else tokenizer is not None and tokenizer.adds_bos
    context = context_token(config.task, add_bos=bool(add_bos), bos_id=bos, eos_id=eos)
    if config.model.append_eos is True and tokenizer is not None and tokenizer.eos_id is None:
        raise ConfigError("model.append_eos: expected a tokenizer with an EOS token, found none; set model.append_eos=false")
    if config.task.embeds:
        check_width(config.task.embedding, geometry.d_model)
    heads: tuple[HeadShape, ...] = ()
    if config.task.classifies:
        heads = tuple(head.shape for head in read_heads(head_file(config.task.classify.head, folder), geometry.d_model))
    text = config.task.embedding.prompt_text if config.task.embeds else None
    prompt = None if text is None or tokenizer is None else make_prompt(text, tokenizer)
    return Choice(folder, device.kind, backend, dtype, context, geometry.vocab_size, config.model.format, prompt, heads)


def _no_cutile(geometry: Mamba2Geometry, dtype: str, device: Device) -> str | None:
    """Why the CUDA Tile kernels cannot run there; None where they can."""
    if device.kind != "cuda" or device.capability is None:
        return "there is no CUDA GPU that torch can use"
    if device.capability < MIN_CAPABILITY:
        return f"the GPU has compute capability {device.capability[0]}.{device.capability[1]}, CUDA Tile needs 8.0 or newer"
    if not device.has_tile:
        return "the package cuda-tile is not installed"
    if dtype == "float32":
        return "the kernels compute in bfloat16 and float16, and model.dtype is float32"
    shapes = {
        "head_dim": (geometry.head_dim, (32, 64, 128)),
        "state_size": (geometry.state_size, (16, 64, 128, 256)),
        "conv_kernel": (geometry.conv_kernel, (2, 3, 4)),
    }
    for name, (value, taken) in shapes.items():
        if value not in taken:
            return f"the kernels take a {name} of {', '.join(map(str, taken))}, and the model's is {value}"
    if geometry.d_model % TILE or geometry.inner // geometry.num_groups % 16:
        return f"the kernels take widths that are multiples of {TILE}, and the model's is {geometry.d_model}"
    return None


def narrower_products(backend: Backend, device: str) -> str | None:
    """TF32, where PyTorch was asked to have a GPU multiply fp32 in it (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE); longscan itself never does."""
    asked = backend == "torch" and device == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "TF32" if asked else None


def choose_spans(
    config: JobConfig,
    geometry: Mamba2Geometry,
    choice: Choice,
    device: Device,
    documents: int,
    before: Mapping[str, Any] | None = None,
    few: Giants = NO_GIANTS,
) -> int | None:
    """Tiles of the spans in which documents are scanned, where that is asked for, or faster: with few `documents` for a worker, or
    where a `few` of these will be left when all others are done.

    before: facts of the run that this one goes on with, or from. A run keeps to the form that it began with, since the two differ in
    the last bits: that other machines, or more of them, would choose the other one is no reason to refuse it.
    Only the CUDA Tile kernels know spans.
    """
    wanted = config.engine.spans
    tiles = span_tiles(geometry.num_heads, config.engine.segment_tokens // TILE)
    if wanted == "auto" and before is not None:
        wanted = before.get("engine", {}).get("span_tiles") is not None
    elif wanted == "auto":
        # Where segments ask for spans of less than half the length that is best, the states' traffic may cost more than spans gain.
        alone = min(few.rows, SHARDS_AT_ONCE) if few.share > FEW_SHARE else documents
        wanted = 2 * tiles >= span_tiles(geometry.num_heads) and pays(min(documents, alone), _blocks(geometry), device.processors)
    return tiles if wanted and choice.backend == "cutile" else None


def choose_sizes(
    config: JobConfig,
    geometry: Mamba2Geometry,
    device: Device,
    estimated_tokens: int,
    workers: int,
    context_slots: int = 1,
    itemsize: int = 2,
) -> Sizes:
    """Replace every "auto" among the sizes by a number: from the device's whole memory, the model and the configuration.

    context_slots: as the Choice has it. itemsize: bytes of a weight.

    Raises ConfigError where they do not fit each other.
    """
    engine = config.engine
    step = engine.step_tokens
    if step == "auto":
        step = max(engine.segment_tokens, CPU_STEP_TOKENS)
        if device.kind == "cuda":
            room = int(STEP_SHARE * device.num_bytes) - geometry.num_parameters * itemsize
            most = room // geometry.step_bytes(engine.segment_tokens, itemsize)
            step = engine.segment_tokens * _segments_a_step(engine.segment_tokens, _blocks(geometry), device.processors, most)
    lanes = engine.lanes
    if lanes == "auto":
        beside = context_slots + spare_slots(int(step), engine.segment_tokens)
        lanes = max(1, min(MAX_LANES, int(STATE_SHARE * device.num_bytes) // geometry.state_bytes(4) - beside))
    shard = config.output.shard_tokens
    if shard == "auto":
        # None so small that its files are all overhead. On a CPU a small one takes a minute: where there are few, whoever is ready first
        # would take them all.
        least = LEAST_SHARD if workers == 1 or device.kind == "cuda" else LEAST_SHARD // 8
        shard = min(1 << 26, max(least, estimated_tokens // (SHARDS_EACH * workers)))
    check_sizes(lanes=int(lanes), step_tokens=int(step), segment_tokens=engine.segment_tokens)
    if device.kind == "cuda":
        _check_reach("engine.step_tokens", int(step), geometry.channels, MOST_ROWS)
        _check_reach("engine.lanes", int(lanes), geometry.inner * geometry.state_size)
    return Sizes(int(lanes), int(step), int(shard))


def _check_reach(name: str, rows: int, width: int, allowed: int = 2**31) -> None:
    """Raise ConfigError for more rows than `allowed`, or whose `width` numbers each have places that take more than 32 bits."""
    most = min(allowed, 2**31 // width) // TILE * TILE
    if rows > most:
        raise ConfigError(f"{name}: expected at most {most} on a GPU with this model, got {rows}")


def _blocks(geometry: Mamba2Geometry) -> int:
    """Blocks of the scan of one entry."""
    heads = heads_a_block(geometry.num_heads // geometry.num_groups, geometry.head_dim, geometry.state_size)
    return geometry.num_heads // heads


def _segments_a_step(segment_tokens: int, blocks: int, processors: int, most: int) -> int:
    """Segments, as one entry each, that fill the GPU's waves of blocks best, in steps of GPU_STEP_TOKENS to twice as many.

    most: that the memory holds; where these are fewer, in steps of half of them to all. One at least.
    """
    least = max(1, min(GPU_STEP_TOKENS // segment_tokens, most // 2))
    asked = range(least, max(least, min(2 * least, most)) + 1)
    return max(asked, key=lambda segments: (full_waves(segments, blocks, processors), -segments))


def model_facts(config: JobConfig, choice: Choice, tokenizer: TextTokenizer | None) -> Mapping[str, Any]:
    """What the fingerprint and the provenance say of the model: its content, and of a hub id the commit; never its path.

    config: as `pinned` returns it.
    """
    return {
        "content": model_hash(choice.folder, format=choice.format),
        "commit": config.model.revision,
        "tokenizer": None if tokenizer is None else tokenizer_facts(tokenizer, config.model.tokenizer_revision),
        "heads": head_hash(head_file(config.task.classify.head, choice.folder)) if config.task.classifies else None,
        "context_id": choice.context_id,
        "prompt_ids": None if choice.prompt is None else list(choice.prompt.ids),
    }


def tokenizer_facts(tokenizer: TextTokenizer, commit: str | None) -> Mapping[str, Any]:
    """What of a tokenizer decides ids. commit: of one that is named by its hub id."""
    return {
        "content": tokenizer.fingerprint,
        "commit": commit,
        "parse_special": tokenizer.parse_special,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
    }

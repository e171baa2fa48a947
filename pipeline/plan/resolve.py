"""From what was asked for to what will run: model folder, device, backend, dtype and context token, each said in the log.

A run's results depend on these, and they are in its fingerprint; what its speed depends on, and where that is kept, is in `sizes`.
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
from longscan.kernels.segments import TILE
from longscan.pipeline.config import JobConfig
from longscan.pipeline.engine.pool import check_width
from longscan.pipeline.engine.score import context_token
from longscan.pipeline.errors import ConfigError, ModelError
from longscan.pipeline.model import Mamba2Geometry, model_hash
from longscan.pipeline.model.classify import head_file, head_hash, read_heads
from longscan.pipeline.plan.fetch import Fetched, fetch_model, fetch_tokenizer
from longscan.pipeline.schemas import HeadShape
from longscan.pipeline.tokenize import Prompt, TextTokenizer, check_fits, load_tokenizer, make_prompt

log = logging.getLogger(__name__)

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

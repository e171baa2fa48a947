"""How much runs at once: lanes, steps, shards and spans, from the device's memory, the model and the input.

A run's speed depends on these. Lanes, steps and shards are in its plan, and a run that goes on takes them from there, whatever machine
it goes on with; the form of the scan is in its fingerprint, since the last bits depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longscan.kernels.segments import MOST_ROWS, TILE
from longscan.kernels.ssd.spans import full_waves, heads_a_block, pays, span_tiles
from longscan.pipeline.config import JobConfig
from longscan.pipeline.engine.schedule import check_sizes
from longscan.pipeline.engine.slots import spare_slots
from longscan.pipeline.errors import ConfigError
from longscan.pipeline.model import Mamba2Geometry
from longscan.pipeline.plan.resolve import Choice, Device
from longscan.pipeline.plan.tail import Giants
from longscan.pipeline.shards import SHARDS_AT_ONCE

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


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much runs at once."""

    lanes: int
    step_tokens: int
    shard_tokens: int


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
        # would take them all. One GPU alone goes through a small one in half a second: those that it works on at once would begin
        # and end together, and it would wait for all of them.
        alone, gpu = workers == 1, device.kind == "cuda"
        least = 2 * LEAST_SHARD if alone and gpu else LEAST_SHARD if alone or gpu else LEAST_SHARD // 8
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

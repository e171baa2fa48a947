"""What an engine is built for, in one record: made in one place (`build.engine_settings`), and passed whole to all that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from longscan.kernels.checks import Backend
from longscan.kernels.segments import TILE
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.engine.schedule import check_sizes
from longscan.pipeline.engine.slots import Slots, spare_slots
from longscan.pipeline.model.classify import Head
from longscan.pipeline.tokenize.prompt import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Numbers, all of them; what was "auto" is settled. Raises ConfigError where the sizes do not fit each other."""

    task: TaskConfig
    lanes: int
    """Documents that may have a state at a time."""
    step_tokens: int
    """Rows of a step, at most."""
    segment_tokens: int
    device: torch.device | str
    backend: Backend
    span_tiles: int | None = None
    """Of the spans in which documents are scanned (`Segments.span_tiles`)."""
    context_id: int | None = None
    """Token given to every document as context before its first (`score.context_token`), None for none."""
    prompt: Prompt | None = None
    """Tokens that come before every document, behind the context token; in no count, and in no pool unless asked for."""
    reset_tokens: int | None = None
    """A document starts afresh, state and context, at every multiple of it; poolings and sums go on."""
    heads: Sequence[Head] = ()
    """Of a task that classifies."""
    vocab_size: int | None = None
    """Ids from here on become error rows; None trusts the streams."""
    constant_shape: bool = False
    """Every step has `step_tokens` rows, on a CPU too. On a GPU each has, as results would depend on the shape."""
    rehearse: bool = False
    """Where steps have one shape, a full one of nobody's comes first, on a CPU too, so that a lack of memory is told before any document.
    On a GPU it always does."""

    def __post_init__(self) -> None:
        check_sizes(lanes=self.lanes, step_tokens=self.step_tokens, segment_tokens=self.segment_tokens)

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def tiles(self) -> int | None:
        """Of every step, where steps have one shape; None where each has as many as are in use."""
        return self.step_tokens // TILE if self.constant_shape or self.on_gpu else None

    @property
    def rehearses(self) -> bool:
        """A full step of nobody's comes first."""
        return self.tiles is not None and (self.rehearse or self.on_gpu)

    @property
    def contexts(self) -> list[list[int]]:
        """Tokens before a document that replaces 0, 1, ... of them at their end; one empty list where there are none."""
        before = [] if self.context_id is None else [self.context_id]
        if self.prompt is None:
            return [before]
        ids = self.prompt.ids
        return [[*before, *ids[: len(ids) - replaced]] for replaced in range(self.prompt.replaceable + 1)]

    @property
    def slots(self) -> Slots:
        """Of the state tables, before memory is short."""
        contexts, spare = self.contexts, spare_slots(self.step_tokens, self.segment_tokens)
        return Slots(self.lanes, len(contexts), spare, has_context=bool(contexts[0]))

"""What a step brings back from the device: whole, in order of its entries, and cut into what it says of each of them.

Of every kind there is one tensor for the whole step, in which an entry's part stands behind those of the entries before it.
Nothing here waits or launches: a step is cut once its tensors are filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from longscan.kernels.pool import Run, window_runs
from longscan.kernels.segments import Segments
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.engine.places import Picks
from longscan.pipeline.engine.pool import finish_vectors
from longscan.pipeline.engine.score import UNSCORED, Logprobs
from longscan.pipeline.engine.stepmodel import Mark
from longscan.pipeline.records import Vector
from longscan.pipeline.schemas import window_tokens

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that is queued on the device. Its tensors are on the host, filled once `done` has passed."""

    segments: Segments
    logprobs_T: torch.Tensor | None
    firsts: list[list[int]]
    """By entry: rows, counted from the entry's first, before tokens that only the context comes before; -1 for a document's first."""
    first_logprobs: torch.Tensor | None
    """Of these tokens, in the order of `firsts`."""
    picks: list[Picks]
    """By entry: the places that are asked for; none of them unless the task classifies positions."""
    picked: torch.Tensor | None
    """[R, D], fp32: hidden states there, in the order of `picks`, but for places before all tokens."""
    norms: list[torch.Tensor]
    """As `state_norms` gives them, for each entry that ends its document."""
    documents: dict[str, torch.Tensor]
    """Pooling -> [W, D], of the documents that end."""
    replaced: list[int]
    """Tokens at the prompt's end that these documents replace."""
    windows: dict[str, torch.Tensor]
    """Pooling -> [W, D], of the windows that close."""
    before: dict[int, dict[str, torch.Tensor]]
    """Entry -> what its lane held before the step, for those that are to be kept."""
    after: dict[int, dict[str, torch.Tensor]]
    """Entry -> what its lane holds after the step, for those wanted as carries."""
    begun: Mark | None
    """Before all that the step queues; None where a call returns when the device is done."""
    done: Mark | None
    """Behind all of it."""


@dataclass(slots=True)
class EntryResult:
    """What one step says of one entry of n tokens."""

    logprobs: Logprobs | None = None
    """[n]: of the token after each of the entry's tokens; None unless scores are asked for."""
    first_logprob: float = UNSCORED
    """Of the document's first token given the context; only for an entry at position 0."""
    vectors: Mapping[str, Vector] = field(default_factory=dict)
    """Pooling -> vector [N], for an entry that ends its document."""
    windows: Sequence[Run] = ()
    """The windows that the entry touches, in order."""
    window_vectors: Mapping[str, Vector] = field(default_factory=dict)
    """Pooling -> vectors [W, N] of those that close in the entry."""
    picks: Picks | None = None
    """Places whose last token the entry holds, where the task classifies positions."""
    picked: npt.NDArray[np.float32] | None = None
    """[R, D]: hidden states there, but for places before all tokens."""
    state_norms: npt.NDArray[np.float64] | None = None
    """[layers, ...]: norms of the parts of the final state, for an entry that ends its document, where they are asked for."""
    before: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the entry's lane held before it, where that is to be kept."""
    after: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What it holds after it, where that is wanted as a carry."""


def cut(launched: Launched, task: TaskConfig, contexts: Sequence[npt.NDArray[np.float64]]) -> list[EntryResult]:
    """The results of a step's entries, in order.

    contexts: hidden states [L, D] of what comes before a document that replaces 0, 1, ... tokens at the prompt's end, where they
        belong to the document's vectors; empty where they do not.
    """
    segments, embedding = launched.segments, task.embedding
    # One a document that ends here, in order.
    pooled = {pooling: finish_vectors(_with_context(pooling, launched, contexts), embedding) for pooling in launched.documents}
    vectors = iter([{pooling: rows[n] for pooling, rows in pooled.items()} for n in range(len(launched.replaced))])
    norms = iter(launched.norms)
    # One an entry.
    logprobs, firsts = _scores(launched)
    windows = _windows(segments, task)
    closing = {pooling: finish_vectors(rows.numpy(), embedding) for pooling, rows in launched.windows.items()}
    closed = _slices([sum([run.closes for run in touched]) for touched in windows])
    picks, picked = _picks(launched)
    return [
        EntryResult(
            logprobs=logprobs[i],
            first_logprob=firsts[i],
            vectors=next(vectors) if entry.ends else {},
            windows=windows[i],
            window_vectors={pooling: rows[closed[i]] for pooling, rows in closing.items()},
            picks=picks[i],
            picked=picked[i],
            state_norms=next(norms).numpy() if entry.ends and launched.norms else None,
            before=launched.before.get(i, {}),
            after=launched.after.get(i, {}),
        )
        for i, entry in enumerate(segments.entries)
    ]


def _with_context(pooling: str, launched: Launched, contexts: Sequence[npt.NDArray[np.float64]]) -> Floats:
    """Pooled vectors [W, D] of the documents that end, with the hidden states of the context where they belong to it."""
    pooled_WD: Floats = launched.documents[pooling].numpy()
    if not contexts or pooling == "last":
        return pooled_WD
    pooled_WD = pooled_WD.astype(np.float64)
    lengths = [entry.position + entry.num_tokens for entry in launched.segments.entries if entry.ends]
    for row_D, length, replaced in zip(pooled_WD, lengths, launched.replaced, strict=True):
        context_LD = contexts[replaced]
        if not len(context_LD):
            continue
        if pooling == "mean":
            row_D[:] = (row_D * length + context_LD.sum(axis=0)) / (length + len(context_LD))
        else:
            np.maximum(row_D, context_LD.max(axis=0), out=row_D)
    return pooled_WD


def _scores(launched: Launched) -> tuple[Sequence[Logprobs | None], list[float]]:
    """By entry: `EntryResult.logprobs`, with those in it that were made of the context alone, and `EntryResult.first_logprob`."""
    entries = launched.segments.entries
    firsts = [UNSCORED] * len(entries)
    if launched.logprobs_T is None:
        return [None] * len(entries), firsts
    logprobs_T = launched.logprobs_T.numpy()
    logprobs: list[Logprobs] = [logprobs_T[entry.rows] for entry in entries]
    if launched.first_logprobs is not None:
        scores = iter(launched.first_logprobs.tolist())
        for i, rows in enumerate(launched.firsts):
            for row in rows:
                if row < 0:
                    firsts[i] = next(scores)
                else:
                    logprobs[i][row] = next(scores)
    return logprobs, firsts


def _windows(segments: Segments, task: TaskConfig) -> list[list[Run]]:
    """By entry: the windows that it touches, in order."""
    runs: list[list[Run]] = [[] for _ in segments.entries]
    size = window_tokens(task)
    for run in window_runs(segments, size) if size is not None else ():
        runs[run.entry].append(run)
    return runs


def _picks(launched: Launched) -> tuple[Sequence[Picks | None], Sequence[npt.NDArray[np.float32] | None]]:
    """By entry: `EntryResult.picks` and `EntryResult.picked`."""
    if launched.picked is None:
        nothing = [None] * len(launched.segments.entries)
        return nothing, nothing
    picked_RD = launched.picked.numpy()
    there = [int((places.rows >= 0).sum()) for places in launched.picks]
    return launched.picks, [picked_RD[part] for part in _slices(there)]


def _slices(counts: Sequence[int]) -> list[slice]:
    """Parts of so many rows each, end to end."""
    return [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]

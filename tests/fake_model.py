"""What the engine stands between, in miniature: a model of ten lines, exact and with a real state, and token streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from longscan.kernels.segments import NO_LANE, Segments
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.engine.settings import EngineSettings
from longscan.pipeline.engine.stepmodel import StepModel
from longscan.pipeline.errors import DocumentError
from longscan.pipeline.records import Document, TokenBlock, TokenStream


class CountingModel:
    """hidden_i [V] = share of each token among all up to and with token i; the state is the counts, one row a lane.

    The next token is v with probability (share_v + 1/V) / 2: never 0, and it depends on all that came before.
    """

    def __init__(self, vocab_size: int = 11, device: str = "cpu") -> None:
        self.width = vocab_size
        self.device = device
        self.steps: list[Segments] = []

    def new_state(self, slots: int) -> torch.Tensor:
        return torch.zeros((slots, self.width), dtype=torch.float64, device=self.device)

    def lane(self, state: torch.Tensor, lane: int) -> dict[str, torch.Tensor]:
        return {"counts": state[lane]}

    def step(self, ids_T: torch.Tensor, segments: Segments, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.steps.append(segments)
        hidden_TD = torch.full((segments.num_rows, self.width), 7.0, device=self.device)  # padding: finite, and wrong if it is used
        before = [state[entry.lane_in].clone() if entry.lane_in != NO_LANE else torch.zeros_like(state[0]) for entry in segments.entries]
        for entry, counts in zip(segments.entries, before, strict=True):
            one_hot = torch.eye(self.width, dtype=torch.float64, device=self.device)[ids_T[entry.rows]]
            running = counts + one_hot.cumsum(0)
            hidden_TD[entry.rows] = (running / running.sum(1, keepdim=True)).float()
            if entry.lane_out != NO_LANE:
                state[entry.lane_out] = running[-1]
        return hidden_TD, state

    def logprobs(self, hidden_TD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        shares = hidden_TD.double().gather(1, targets_T.clamp(min=0)[:, None])[:, 0]
        return torch.where(targets_T < 0, torch.nan, ((shares + 1 / self.width) / 2).log()).float()


def settings_of(task: TaskConfig, **asked: Any) -> EngineSettings:
    """On a CPU, in PyTorch, where nothing else is asked for."""
    return EngineSettings(**{"task": task, "device": "cpu", "backend": "torch", **asked})


def engine_of(model: StepModel, task: TaskConfig, **asked: Any) -> Engine:
    """An engine of the `settings_of` what is asked for; on_tokens, meter and forward are the engine's own."""
    beside = {name: asked.pop(name) for name in ("on_tokens", "meter", "forward") if name in asked}
    return Engine(model, settings_of(task, **asked), **beside)


def document(ordinal: int, text: bytes | None = b"") -> Document:
    """A document as the reader gives it, without passthrough columns."""
    view = None if text is None else memoryview(text)
    return Document(ordinal, f"corpus#{ordinal}", "corpus.parquet", ordinal, view, None, pa.record_batch({"n": [ordinal]}))


def stream(
    ordinal: int,
    ids: Sequence[int],
    *,
    block: int = 1000,
    offsets: bool = False,
    num_bytes: int | None = None,
    fails_at: int | None = None,
) -> TokenStream:
    """A document's tokens in blocks. offsets: token i covers the characters 3 i to 3 i + 2. fails_at: DocumentError there."""
    array = np.asarray(ids, dtype=np.int32)

    def blocks() -> Iterator[TokenBlock]:
        for start in range(0, len(array), block):
            if fails_at is not None and start + block > fails_at:
                yield TokenBlock(array[start:fails_at])
                raise DocumentError("tokenize", f"cannot cut token {fails_at}")
            places = np.arange(start, min(start + block, len(array)), dtype=np.int64)
            yield TokenBlock(array[places], *((3 * places, 3 * places + 2) if offsets else ()))

    return TokenStream(document(ordinal), blocks(), num_bytes, len(array))

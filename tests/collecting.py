"""Documents through an engine for a caller that collects what it is handed: rows, carries and states; and rows as their bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fake_model import CountingModel, engine_of
from longscan.pipeline.config import EmbeddingConfig, ScoreConfig, TaskConfig
from longscan.pipeline.records import Carry, DocumentRow, ErrorRow, Kept, Outcome, Reached, TokensRow, TokenStream, WindowRow
from longscan.pipeline.tokenize.blocks import LaterBlocks

SEGMENT = 64
SIZES: dict[str, Any] = {"lanes": 3, "step_tokens": 256, "segment_tokens": SEGMENT, "context_id": 3}


def task(*, window_tokens: int) -> TaskConfig:
    """Everything that a document carries along: all poolings, scores, and windows of both."""
    poolings = ["mean", "last", "max", "weighted_mean"]
    return TaskConfig(
        "embed_score",
        EmbeddingConfig(pooling=poolings, normalize=False, window_tokens=window_tokens),
        ScoreConfig(per_token=True, window_tokens=window_tokens),
    )


class Collecting:
    """Keeps nothing on a disk and remembers every carry, and how many states came at a time."""

    def __init__(self, checkpoint_tokens: int = 1 << 20) -> None:
        self.checkpoint_tokens = checkpoint_tokens
        self.carries: list[Carry] = []
        self.kept: dict[int, Carry] = {}
        """Of each document the one that is for another run."""
        self.most = 0

    def reserve(self) -> bool:
        return True

    def forget(self) -> None:
        pass

    def keep(self, news: Sequence[Outcome | Carry | Kept | Reached]) -> list[Outcome]:
        self.carries += [item for item in news if isinstance(item, Carry)]
        kept = [item for item in news if isinstance(item, Kept)]
        self.most = max(self.most, len(kept))
        for item in kept:
            assert item.carry.ordinal == item.document.ordinal
            assert item.carry.ordinal not in self.kept, "twice"
            self.kept[item.carry.ordinal] = item.carry
        return [item for item in news if not isinstance(item, Carry | Kept | Reached)]


def rows_of(
    streams: Iterable[TokenStream], task: TaskConfig, keeper: Collecting | None = None, *, device: str = "cpu", **sizes: Any
) -> dict[int, list[Outcome]]:
    """Each document's rows as they come, by its ordinal; none of them an error. sizes: of the engine, others than SIZES."""
    rows: dict[int, list[Outcome]] = {}
    with engine_of(CountingModel(device=device), task, device=device, **SIZES | sizes) as engine:
        for row in engine.process(streams, keeper):
            assert not isinstance(row, ErrorRow)
            rows.setdefault(row.document.ordinal, []).append(row)
    return rows


def going_on(whole: TokenStream, carry: Carry | None) -> TokenStream:
    """The stream of a document from its carry on, if it has one."""
    if carry is None:
        return whole
    return replace(whole, document=replace(whole.document, carry=carry), blocks=LaterBlocks(whole.blocks, carry.position))


def printed(rows: Iterable[Outcome], after: int = 0) -> list[Any]:
    """Rows as their bits, those that end behind a position."""
    prints = []
    for row in rows:
        if isinstance(row, WindowRow) and row.token_end > after:
            vectors = {name: vector.tobytes() for name, vector in row.vectors.items()}
            prints.append(("window", row.window_index, row.token_start, row.char_start, row.char_end, vectors, row.log_likelihood))
        elif isinstance(row, TokensRow) and row.token_start >= after:
            prints.append(("tokens", row.token_start, row.token_ids.tobytes(), row.logprobs.tobytes()))
        elif isinstance(row, DocumentRow):
            vectors = {name: None if vector is None else vector.tobytes() for name, vector in row.vectors.items()}
            prints.append(("document", row.num_tokens, vectors, row.log_likelihood, row.bits_per_byte))
    return sorted(prints, key=lambda row: (row[0], row[1]))

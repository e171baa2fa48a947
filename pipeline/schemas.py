"""The Arrow schemas of what is written: a table's columns, by the task and by the model's width and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from longscan.pipeline.config import TaskConfig


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What is known of a classifier's head without its weights."""

    name: str
    """Empty for the only one."""
    size: int
    labels: tuple[str, ...] | None

    @property
    def columns(self) -> tuple[str, str]:
        """Of its logits, and of its label."""
        return (f"logits_{self.name}", f"label_{self.name}") if self.name else ("logits", "label")


def vector_type(task: TaskConfig, width: int) -> pa.DataType:
    """fixed_size_list of the vectors written: `truncate_dim` or the model's `width`, of float32 or float16."""
    value = pa.float16() if task.embedding.dtype == "float16" else pa.float32()
    return pa.list_(value, task.embedding.truncate_dim or width)


def embedding_columns(task: TaskConfig) -> dict[str, str]:
    """Pooling -> column: `embedding` for a single pooling, `embedding_<pooling>` where several are asked for."""
    if not task.embeds:
        return {}
    poolings = task.embedding.poolings
    return {p: "embedding" if len(poolings) == 1 else f"embedding_{p}" for p in poolings}


def head_fields(heads: Sequence[HeadShape]) -> list[pa.Field]:
    """Of each head the logits, and for several labels the one with the largest, by its name or its number."""
    fields = []
    for head in heads:
        logits, label = head.columns
        fields.append(pa.field(logits, pa.list_(pa.float32(), head.size)))
        if head.size > 1:
            fields.append(pa.field(label, pa.string()))
    return fields


def positions_schema(heads: Sequence[HeadShape]) -> pa.Schema:
    fields = [pa.field("doc_id", pa.string(), nullable=False), pa.field("position_index", pa.int64(), nullable=False)]
    return pa.schema([*fields, pa.field("position", pa.int64(), nullable=False), pa.field("token", pa.int64()), *head_fields(heads)])


def documents_schema(
    task: TaskConfig, width: int, passthrough: pa.Schema, heads: Sequence[HeadShape] = (), *, continued: bool = False
) -> pa.Schema:
    """continued: documents may go on from states of an earlier run, and each says where."""
    fields = [pa.field("doc_id", pa.string(), nullable=False), pa.field("num_tokens", pa.int64(), nullable=False)]
    fields += [pa.field(f.name, f.type, f.nullable, f.metadata) for f in passthrough]
    fields += [pa.field(column, vector_type(task, width)) for column in embedding_columns(task).values()]
    if task.classifies == "document":
        fields += head_fields(heads)
    if task.scores:
        fields += [
            pa.field("log_likelihood", pa.float64()),
            pa.field("num_scored_tokens", pa.int64()),
            pa.field("num_bytes", pa.int64()),
            pa.field("bits_per_byte", pa.float64()),
        ]
    if task.state_norm:
        fields += [pa.field("state_norm_max", pa.float64()), pa.field("state_norm_mean", pa.float64())]
    if continued:
        fields.append(pa.field("continued_at", pa.int64(), nullable=False))
    return pa.schema(fields)


def has_windows(task: TaskConfig) -> bool:
    return window_tokens(task) is not None


def window_tokens(task: TaskConfig) -> int | None:
    """Size of the windows in tokens. Where both tasks ask for windows they ask for one size (`config.validate`)."""
    sizes = [task.embedding.window_tokens] * task.embeds + [task.score.window_tokens] * task.scores
    return next((size for size in sizes if size is not None), None)


def windows_schema(task: TaskConfig, width: int, *, resets: bool = False) -> pa.Schema:
    """resets: documents start afresh every so often, and a window says since when it has seen all."""
    fields = [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("window_index", pa.int64(), nullable=False),
        pa.field("token_start", pa.int64(), nullable=False),
        pa.field("token_end", pa.int64(), nullable=False),
        pa.field("char_start", pa.int64()),
        pa.field("char_end", pa.int64()),
    ]
    if resets:
        fields.append(pa.field("context_start", pa.int64(), nullable=False))
    if task.embeds and task.embedding.window_tokens is not None:
        fields += [pa.field(column, vector_type(task, width)) for column in embedding_columns(task).values()]
    if task.scores and task.score.window_tokens is not None:
        fields += [pa.field("log_likelihood", pa.float64())]
    return pa.schema(fields)


TOKENS_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("token_start", pa.int64(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
    ]
)

STATES_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("prefix_length", pa.int64(), nullable=False),
        pa.field("prefix_sha256", pa.string(), nullable=False),
        pa.field("state", pa.large_binary(), nullable=False),
    ]
)

ERRORS_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string()),
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64()),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("error", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
    ]
)

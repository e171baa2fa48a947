"""Rows of the output -> Arrow batches of the `schemas`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from longscan.pipeline.arrays import binaries, flags, numbers, of_numpy, strings
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.records import DocumentRow, ErrorRow, Outcome, PositionRow, StateRow, TokensRow, Vector, WindowRow
from longscan.pipeline.schemas import ERRORS_SCHEMA, STATES_SCHEMA, TOKENS_SCHEMA, HeadShape, embedding_columns

ROW_BYTES = 64
"""What the small columns of a row are taken to weigh."""


def documents_batch(rows: Sequence[DocumentRow], task: TaskConfig, schema: pa.Schema, heads: Sequence[HeadShape] = ()) -> pa.RecordBatch:
    """A batch of `documents_schema`."""
    columns: dict[str, Any] = {
        "doc_id": strings([row.document.doc_id for row in rows]),
        "num_tokens": numbers([row.num_tokens for row in rows], pa.int64()),
    }
    if rows and rows[0].document.passthrough.num_columns:
        passed = pa.concat_batches([row.document.passthrough for row in rows])
        columns.update(zip(passed.schema.names, passed.columns, strict=True))
    columns |= _vectors(rows, task, schema)
    if task.classifies == "document":
        columns |= _logits(rows, heads)
    if task.scores:
        for name in ("log_likelihood", "num_scored_tokens", "num_bytes", "bits_per_byte"):
            columns[name] = numbers([getattr(row, name) for row in rows], schema.field(name).type)
    for name in ("state_norm_max", "state_norm_mean") if task.state_norm else ():
        columns[name] = numbers([getattr(row, name) for row in rows], pa.float64())
    if "continued_at" in schema.names:
        columns["continued_at"] = numbers([row.continued_at for row in rows], pa.int64())
    return _batch(columns, schema)


def states_batch(rows: Sequence[StateRow]) -> pa.RecordBatch:
    """A batch of STATES_SCHEMA."""
    columns: dict[str, Any] = {"doc_id": strings([row.document.doc_id for row in rows])}
    columns["prefix_sha256"] = strings([row.prefix_sha256 for row in rows])
    for name in ("position", "prefix_length"):
        columns[name] = numbers([getattr(row, name) for row in rows], pa.int64())
    columns["state"] = binaries([row.state.data for row in rows])
    return _batch(columns, STATES_SCHEMA)


def windows_batch(rows: Sequence[WindowRow], task: TaskConfig, schema: pa.Schema) -> pa.RecordBatch:
    """A batch of `windows_schema`."""
    columns: dict[str, Any] = {"doc_id": strings([row.document.doc_id for row in rows])}
    for name in ("window_index", "token_start", "token_end", "char_start", "char_end"):
        columns[name] = numbers([getattr(row, name) for row in rows], pa.int64())
    if "context_start" in schema.names:
        columns["context_start"] = numbers([row.context_start for row in rows], pa.int64())
    columns |= _vectors(rows, task, schema)
    if "log_likelihood" in schema.names:
        columns["log_likelihood"] = numbers([row.log_likelihood for row in rows], pa.float64())
    return _batch(columns, schema)


def tokens_batch(rows: Sequence[TokensRow]) -> pa.RecordBatch:
    """A batch of TOKENS_SCHEMA; a NaN in `logprobs` becomes null."""
    offsets = of_numpy(np.cumsum([0, *(len(row.token_ids) for row in rows)]).astype(np.int32), pa.int32())
    ids = np.concatenate([row.token_ids for row in rows]) if rows else np.empty(0, np.int32)
    logprobs = np.concatenate([row.logprobs for row in rows]) if rows else np.empty(0, np.float32)
    columns = {
        "doc_id": strings([row.document.doc_id for row in rows]),
        "token_start": numbers([row.token_start for row in rows], pa.int64()),
        "token_ids": pa.ListArray.from_arrays(offsets, of_numpy(ids, pa.int32())),
        "logprobs": pa.ListArray.from_arrays(offsets, of_numpy(logprobs, pa.float32(), ~np.isnan(logprobs))),
    }
    return _batch(columns, TOKENS_SCHEMA)


def positions_batch(rows: Sequence[PositionRow], schema: pa.Schema, heads: Sequence[HeadShape]) -> pa.RecordBatch:
    """A batch of `positions_schema`."""
    places = [row.document.positions[row.index] for row in rows if row.document.positions is not None]
    columns: dict[str, Any] = {
        "doc_id": strings([row.document.doc_id for row in rows]),
        "position_index": numbers([row.index for row in rows], pa.int64()),
        "position": numbers(places, pa.int64()),
        "token": numbers([row.token for row in rows], pa.int64()),
    }
    return _batch(columns | _logits(rows, heads), schema)


def _logits(rows: Sequence[DocumentRow] | Sequence[PositionRow], heads: Sequence[HeadShape]) -> dict[str, pa.Array]:
    columns: dict[str, pa.Array] = {}
    for head in heads:
        logits, label = head.columns
        kind = pa.list_(pa.float32(), head.size)
        found: list[Mapping[str, Any]] = [{} if row.logits is None else row.logits for row in rows]
        columns[logits] = _vector_array([{head.name: of.get(head.name)} for of in found], head.name, kind)
        if head.size > 1:
            names = head.labels or tuple(map(str, range(head.size)))
            best = [None if head.name not in of else names[int(np.argmax(of[head.name]))] for of in found]
            columns[label] = strings(best)
    return columns


def errors_batch(rows: Sequence[ErrorRow]) -> pa.RecordBatch:
    """A batch of ERRORS_SCHEMA."""
    columns = {
        "doc_id": strings([None if row.doc_id is None else _encodable(row.doc_id) for row in rows]),
        "row": numbers([row.row for row in rows], pa.int64()),
    }
    for name in ("file", "stage", "error", "message"):
        columns[name] = strings([_encodable(getattr(row, name)) for row in rows])
    return _batch(columns, ERRORS_SCHEMA)


def row_bytes(row: Outcome) -> int:
    """About the memory that a row waits in."""
    if isinstance(row, ErrorRow):
        return ROW_BYTES + len(row.message)
    if isinstance(row, StateRow):
        return ROW_BYTES + row.state.nbytes
    if isinstance(row, TokensRow):
        return ROW_BYTES + row.token_ids.nbytes + row.logprobs.nbytes
    size = ROW_BYTES
    if not isinstance(row, PositionRow):
        size += sum([vector.nbytes for vector in row.vectors.values() if vector is not None])
    if not isinstance(row, WindowRow) and row.logits:
        size += sum([vector.nbytes for vector in row.logits.values()])
    if isinstance(row, DocumentRow) and row.document.passthrough.num_columns:
        size += row.document.passthrough.nbytes
    return size


def _vectors(rows: Sequence[DocumentRow] | Sequence[WindowRow], task: TaskConfig, schema: pa.Schema) -> dict[str, pa.Array]:
    columns = {pooling: column for pooling, column in embedding_columns(task).items() if column in schema.names}
    return {column: _vector_array([row.vectors for row in rows], pooling, schema.field(column).type) for pooling, column in columns.items()}


def _vector_array(vectors: Sequence[Mapping[str, Vector | None]], pooling: str, kind: pa.DataType) -> pa.Array:
    nothing = np.zeros(kind.list_size, dtype=kind.value_type.to_pandas_dtype())
    found = [of_row[pooling] for of_row in vectors]
    missing = np.array([vector is None for vector in found], dtype=bool)
    there = [nothing if vector is None else np.ascontiguousarray(vector) for vector in found]
    for vector in there:
        if vector.shape != nothing.shape or vector.dtype != nothing.dtype:
            raise ValueError(f"vectors[{pooling!r}]: expected {kind}, got shape {vector.shape} of {vector.dtype}")
    # Joined as bytes: numpy would give Python's lock away, and want it back, at each.
    values = pa.Array.from_buffers(
        kind.value_type, len(there) * len(nothing), [None, pa.py_buffer(b"".join([vector.data for vector in there]))]
    )
    return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=flags(missing))


def _batch(columns: Mapping[str, pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _encodable(text: str) -> str:
    """Messages may quote file names whose bytes are no UTF-8: Python's stand-ins for them cannot be written."""
    return text.encode("utf-8", "backslashreplace").decode()


Convert = Callable[[Sequence[Any]], pa.RecordBatch]

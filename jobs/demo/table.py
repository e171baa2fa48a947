"""The demo's closing table: what came out for each novel, read back from the files that the run wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from longscan.pipeline.config import JobConfig
from longscan.pipeline.storage.location import Location, children, exists, locate
from longscan.pipeline.wording import plural

EXCERPT = 60
"""Characters of a window's text that are shown."""
TABLES = ("documents", "errors", "tokens", "windows")

Row = Mapping[str, Any]


def render(config: JobConfig) -> str:
    """A line a novel: tokens, bits per byte, nearest novel by vector, most surprising window and how it begins.

    What the run was not asked for stays out: the demo may be run with any keys.
    """
    out = locate(config.output.path)
    documents, windows = _rows(out, "documents"), _rows(out, "windows")
    texts = {row["title"]: row["text"] for row in pq.read_table(config.input.path, columns=["title", "text"]).to_pylist()}
    nearest = _nearest(documents)
    columns = [("novel", [str(row["doc_id"]) + " *" * bool(row.get("held_out")) for row in documents])]
    columns.append(("tokens", [f"{row['num_tokens']:,}".rjust(9) for row in documents]))
    if documents and "bits_per_byte" in documents[0]:
        columns.append(("bits/byte", [f"{row['bits_per_byte']:9.3f}" if row["bits_per_byte"] is not None else "" for row in documents]))
    if nearest:
        columns.append(("nearest", [nearest[row["doc_id"]] for row in documents]))
    if windows and "log_likelihood" in windows[0]:
        heading = f"most surprising window of {config.task.score.window_tokens} tokens, bits/byte"
        columns.append((heading, [_most_surprising(row["doc_id"], windows, texts.get(row["doc_id"])) for row in documents]))
    lines = _aligned(columns)
    if any(row.get("held_out") for row in documents):
        lines.append("* held out: the model has never seen it")
    return "\n".join([*lines, f"files: {out}", *_files(out)])


def _rows(out: Location, table: str) -> list[Row]:
    rows: list[Row] = []
    for name in _parts(out, table):
        with (out / table / name).fs.open((out / table / name).path, "rb") as file:
            rows += pq.read_table(file).to_pylist()
    return rows


def _parts(out: Location, table: str) -> list[str]:
    return [name for name in children(out / table) if name.startswith("part-")] if exists(out / table) else []


def _nearest(documents: Sequence[Row]) -> dict[str, str]:
    """Id -> id of the other novel whose vector is closest, as cosines go. Directions alone: the common one is taken out."""
    column = next((name for name in documents[0] if name.startswith("embedding")), None) if documents else None
    rows = [row for row in documents if column is not None and row[column] is not None]
    if len(rows) < 2 or len(rows) < len(documents):
        return {}
    vectors = np.array([row[str(column)] for row in rows], dtype=np.float64)
    vectors -= vectors.mean(0)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    return {row["doc_id"]: rows[int(best)]["doc_id"] for row, best in zip(rows, cosines.argmax(1), strict=True)}


def _most_surprising(doc_id: str, windows: Sequence[Row], text: str | None) -> str:
    """Number, bits per byte and beginning of the window with the most bits per byte."""
    if text is None:
        return ""
    found = []
    for window in windows:
        if window["doc_id"] == doc_id:
            part = text[window["char_start"] : window["char_end"]]
            found.append((-window["log_likelihood"] / math.log(2) / max(len(part.encode()), 1), window["window_index"], part))
    if not found:
        return ""
    bits, index, part = max(found)
    return f"{index:4} {bits:5.2f}  “{' '.join(part.split())[:EXCERPT]}…”"


def _aligned(columns: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    widths = [max(map(len, (heading, *cells))) for heading, cells in columns]
    rows = [[heading for heading, _ in columns], *zip(*(cells for _, cells in columns), strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _files(out: Location) -> list[str]:
    lines = []
    for table in TABLES:
        for name in _parts(out, table):
            place = out / table / name
            with place.fs.open(place.path, "rb") as file:
                lines.append(f"  {table}/{name}  {plural(pq.ParquetFile(file).metadata.num_rows, 'row')}")
    return lines

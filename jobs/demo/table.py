"""The demo's closing table: what came out for each novel, read back from the files that the run wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from longscan.pipeline.config import JobConfig

EXCERPT = 60
"""Characters of a window's text that are shown."""
LN_2 = 0.6931471805599453


def render(config: JobConfig) -> str:
    """A line a novel: tokens, bits per byte, nearest novel by vector, most surprising window and how it begins."""
    out = Path(config.output.path)
    documents = pq.read_table(out / "documents").to_pylist()
    windows = pq.read_table(out / "windows").to_pylist()
    texts = {row["title"]: row["text"] for row in pq.read_table(config.input.path, columns=["title", "text"]).to_pylist()}
    nearest = _nearest(documents)
    lines = [f"{'novel':24} {'tokens':>9} {'bits/byte':>9}  {'nearest':24} most surprising window of {_size(config)} tokens"]
    for row in documents:
        title = row["doc_id"]
        window = min((w for w in windows if w["doc_id"] == title), key=lambda w: w["log_likelihood"] / len(_text(texts[title], w).encode()))
        text = _text(texts[title], window)
        bits = -window["log_likelihood"] / LN_2 / len(text.encode())
        mark = " *" if row.get("held_out") else ""
        excerpt = " ".join(text.split())[:EXCERPT]
        lines.append(
            f"{title + mark:24} {row['num_tokens']:9,} {row['bits_per_byte']:9.3f}  {nearest.get(title, '-'):24} "
            f"{window['window_index']:4} at {bits:.2f}: “{excerpt}…”"
        )
    lines += ["* held out: the model has never seen it", f"files: {out.resolve()}", *(f"  {path}" for path in _files(out))]
    return "\n".join(lines)


def _nearest(documents: list[dict[str, object]]) -> dict[str, str]:
    """Title -> title of the other novel whose vector is closest, as cosines go. Directions alone: the common one is taken out."""
    titles = [str(row["doc_id"]) for row in documents]
    vectors = np.array([row["embedding"] for row in documents], dtype=np.float64)
    if len(titles) < 2:
        return {}
    vectors -= vectors.mean(0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    return {title: titles[int(best)] for title, best in zip(titles, cosines.argmax(1), strict=True)}


def _text(text: str, window: dict[str, int]) -> str:
    return text[window["char_start"] : window["char_end"]]


def _size(config: JobConfig) -> int:
    return config.task.score.window_tokens or 0


def _files(out: Path) -> list[str]:
    described = []
    for path in sorted(out.rglob("part-*.parquet")):
        rows = pq.ParquetFile(path).metadata.num_rows
        described.append(f"{path.relative_to(out)}  {rows} rows")
    return described

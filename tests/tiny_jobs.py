"""Jobs that take a moment: a tiny model, a few texts in Parquet, and how the output of one is read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fakes import LINES
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.pipeline.model import load_model

SENTENCE = " ".join(LINES[:3])


def texts(count: int, *, seed: int = 0) -> list[str]:
    """Texts of some tens to some hundreds of tokens, all different."""
    return [f"{seed}:{n} " + SENTENCE[: 40 + 97 * n % 300] * (1 + n % 4) for n in range(count)]


def some_ids(rows: Sequence[str | None]) -> pa.Array:
    """A column of token ids beside these texts, a third as long; null where the text is."""
    return pa.array([None if text is None else [ord(c) % 320 for c in text[: len(text) // 3]] for text in rows], pa.list_(pa.int32()))


def write_input(path: Path, rows: Sequence[str | None], *, row_group: int = 1000, **columns: Sequence[Any]) -> Path:
    """A Parquet file of `rows` in the column `text`, and further columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": pa.array(rows, pa.string()), **columns}), path, row_group_size=row_group)
    return path


def words(model: Path | str, source: Path | str, output: Path | str, *more: str) -> list[str]:
    """A command line. Small steps, so that documents are cut into several segments."""
    small = ("engine.segment_tokens=64", "engine.step_tokens=256", "engine.lanes=4")
    return [f"model.path={model}", f"input.path={source}", f"output.path={output}", *small, *more]


def table(output: Path, name: str) -> pa.Table:
    """A table of an output, parts in order."""
    return pa.concat_tables([pq.read_table(path) for path in sorted((output / name).glob("part-*.parquet"))])


def rows(output: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table(output, name).to_pylist()
    return found


def snapshot(folder: Path) -> Mapping[str, tuple[int, int]]:
    """Every file below a folder, its time and size, but for the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and "lock" not in path.parts]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def success(output: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((output / "_SUCCESS").read_text())
    return summary


def unfinish(output: Path, *shards: int) -> None:
    """Take a finished run back to where `shards` were not done."""
    (output / "_SUCCESS").unlink()
    for shard in shards:
        (output / "_run" / "manifest" / f"{shard:05d}.json").unlink()
        for part in output.glob(f"*/part-{shard:05d}-of-*.parquet"):
            part.unlink()


def same_tables(output: Path, expected: Path) -> list[str]:
    """Names of the tables of `expected`, after an assertion that `output` has the same rows bit for bit.

    Rows of windows and tokens come as segments end: in order within a document, but documents in any.
    """
    orders = {"windows": ["doc_id", "window_index"], "tokens": ["doc_id", "token_start"]}
    names = sorted(path.name for path in expected.iterdir() if path.is_dir() and path.name != "_run")
    for name in names:
        found, wanted = table(output, name), table(expected, name)
        if name in orders:
            order = [(column, "ascending") for column in orders[name]]
            found, wanted = found.sort_by(order), wanted.sort_by(order)
        assert found.equals(wanted), f"{name}: {difference(found, wanted)}"
    return names


def difference(found: pa.Table, wanted: pa.Table) -> str:
    """In words, the first cells in which tables differ, and by how much: for whoever reads of an assertion that failed."""
    if found.schema != wanted.schema or found.num_rows != wanted.num_rows:
        return f"{found.num_rows} rows of {found.schema}\n{wanted.num_rows} rows expected of {wanted.schema}"
    told = []
    for row, (mine, theirs) in enumerate(zip(found.to_pylist(), wanted.to_pylist(), strict=True)):
        for column in mine:
            one, other = mine[column], theirs[column]
            if repr(one) != repr(other):
                told.append(f"row {row} {mine.get('doc_id')!r} {column}: {_apart(one, other)}")
    return f"{len(told)} cells differ\n" + "\n".join(told[:10])


def _apart(one: Any, other: Any) -> str:
    try:
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        where = np.flatnonzero((a != b) & ~(np.isnan(a) & np.isnan(b)))
        return f"{len(where)} of {a.size} numbers, from {where[:1]} on, by {np.abs(a - b).max():.3g} at most of {np.abs(b).max():.3g}"
    except (TypeError, ValueError):
        return f"{one!r:.80}, expected {other!r:.80}"


def hidden_of(folder: Path, ids: list[int]) -> np.ndarray:
    """[len(ids), D], float64: final hidden states of the model in `folder`, in fp32 on a CPU, over one document alone."""
    model = load_model(folder, dtype=torch.float32, device="cpu", backend="torch")
    tiles = -(-len(ids) // TILE)
    padded = torch.zeros(tiles * TILE, dtype=torch.int64)
    padded[: len(ids)] = torch.tensor(ids)
    with torch.inference_mode():
        hidden, _ = model.step(padded, Segments.pack([Entry(0, len(ids))], tiles), model.new_state(1))
    return hidden[: len(ids)].double().numpy()

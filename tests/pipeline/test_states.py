"""Documents that grow: runs that go on from the states of earlier ones give the bits of runs on the whole texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fakes import tiny_checkpoint
from longscan.jobs.run import main
from stopping import Stop, carries, stopped
from threads import torch_threads
from tiny_jobs import rows, success, table, texts, words, write_input

SEGMENT = 64
EVERYTHING = ("task=embed_score", "task.embedding.window_tokens=192", "task.score.window_tokens=192", "task.score.per_token=true")
TASKS = {
    "every_pooling": ("task=embed", "task.embedding.pooling=[mean,last,max,weighted_mean]", "task.embedding.window_tokens=128"),
    "everything": EVERYTHING,
    "bos": ("task=embed_score", "model.add_bos=true", "task.embedding.include_prompt=true", "task.embedding.pooling=[mean,max]"),
    "prompt": ("task=embed", "task.embedding.prompt_text=a prompt: ", "task.embedding.include_prompt=true", "task.embedding.window_tokens=64"),
    "eos": (*EVERYTHING, "model.append_eos=true", "task.score.first_token=skip", "task.state_norm=true"),
    "tokens_column": (*EVERYTHING, "input.tokens_column=ids"),
    "resets": ("task=embed_score", "task.embedding.window_tokens=64", "engine.reset_tokens=192"),
}
KEYS = {"windows": "window_index", "tokens": "token_start"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True)


def versions(seed: int, count: int = 3) -> list[list[str]]:
    """Texts of one corpus as it grows: cut anywhere, also inside words and of whatever length, none at all included."""
    chance = random.Random(seed)
    whole = [" ".join(texts(n, seed=n)) for n in (3, 1, 6, 2, 9, 4, 1)]
    ends = [sorted(chance.randrange(len(text)) for _ in range(count - 1)) + [len(text)] for text in whole]
    return [[text[: of_text[version]] for text, of_text in zip(whole, ends, strict=True)] for version in range(count)]


def write(path: Path, corpus: Sequence[str | None], names: Sequence[str] | None = None) -> Path:
    ids = pa.array([None if text is None else [ord(c) % 320 for c in text[: len(text) // 3]] for text in corpus], pa.list_(pa.int32()))
    return write_input(path, corpus, row_group=3, ids=ids, name=names or [f"document {n}" for n in range(len(corpus))])


def job(model: Path, source: Path, output: Path, task: str, *more: str) -> list[str]:
    sizes = ("output.shard_tokens=500", "cluster=inprocess", "input.id_column=name")
    return words(model, source, output, *sizes, *TASKS[task], *more)


def run(model: Path, source: Path, output: Path, task: str, *more: str) -> Path:
    assert main(job(model, source, output, task, *more)) == 0
    return output


def states(output: Path) -> dict[str, int]:
    return {row["doc_id"]: row["position"] for row in table(output, "states").select(["doc_id", "position"]).to_pylist()}


def assert_same_documents(output: Path, expected: Path) -> None:
    found = table(output, "documents")
    assert found.drop_columns(["continued_at"] if "continued_at" in found.schema.names else []).equals(table(expected, "documents"))


def assert_same(runs: Sequence[Path], expected: Path) -> None:
    """The documents of the last run are those expected; of the other tables the rows of all runs, the newest of each, are."""
    assert_same_documents(runs[-1], expected)
    for name, key in KEYS.items():
        if not (expected / name).exists():
            continue
        newest: dict[tuple[str, int], Any] = {}
        for output in runs:
            newest |= {(row["doc_id"], row[key]): repr(row) for row in rows(output, name)}
        assert newest == {(row["doc_id"], row[key]): repr(row) for row in rows(expected, name)}, name


@pytest.mark.parametrize("task", TASKS)
def test_a_chain_of_runs_gives_the_bits_of_runs_on_the_whole_texts(task: str, model: Path, tmp_path: Path) -> None:
    runs: list[Path] = []
    for n, corpus in enumerate(versions(seed=list(TASKS).index(task))):
        source = write(tmp_path / f"in{n}" / "in.parquet", corpus)
        more = [f"input.state_path={runs[-1]}"] if runs else []
        with pytest.MonkeyPatch.context() as patch:
            counted = Stop(patch, 1 << 40)
            runs.append(run(model, source, tmp_path / f"out{n}", task, "output.keep_state=true", *more))
        whole = run(model, source, tmp_path / f"whole{n}", task)
        assert_same(runs, whole)
        lengths = {row["doc_id"]: row["num_tokens"] for row in rows(whole, "documents")}
        kept = states(runs[-1])
        loose = 12  # of so many tokens at most, after these texts' last safe cut
        assert all(0 < at < lengths[name] and at % SEGMENT == 0 for name, at in kept.items())
        assert all(length - kept.get(name, 0) <= SEGMENT + loose for name, length in lengths.items())
        told = carries(runs[-1])
        assert told["states_kept"] == len(kept)
        if n:
            before = states(runs[-2])
            begun = {row["doc_id"]: row["continued_at"] for row in rows(runs[-1], "documents")}
            assert begun == {name: before.get(name, 0) for name in lengths}
            assert counted.seen == sum(lengths.values()) - sum(before.values())
            assert (told["continued_documents"], told["continued_tokens"]) == (len(before), sum(before.values()))
            assert told["states_left_out"] == 0
            windows = rows(runs[-1], "windows") if (whole / "windows").exists() else []
            assert all(row["token_end"] > begun[row["doc_id"]] for row in windows)
    assert len(kept) >= 5

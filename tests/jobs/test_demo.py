"""The demo as a newcomer meets it: one command in an empty folder; and what its model shows of a state that is carried on."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from longscan.jobs.compose import compose_job
from longscan.jobs.demo import corpus
from longscan.jobs.demo.table import render
from longscan.jobs.run import main
from tiny_jobs import rows, snapshot, success, table
from tokenizers import Tokenizer

DEMO = Path(corpus.__file__).parent
NOVELS = ["Sense and Sensibility", "Pride and Prejudice", "Mansfield Park", "Emma", "Northanger Abbey", "Persuasion"]
HELD_OUT = "Persuasion"


EXCERPTS = """
import sys
from pathlib import Path
from longscan.jobs import run
run.DEMO_FOLDER = Path(sys.argv.pop())
sys.exit(run.main())
"""
"""The command as it is, on another demo than the one that ships."""


def longscan(folder: Path, demo: Path | None) -> subprocess.CompletedProcess[str]:
    """Run `longscan` in `folder`; demo: instead of the one that ships."""
    command = ["-m", "longscan.jobs.run"] if demo is None else ["-c", EXCERPTS, str(demo)]
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def excerpts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with the first 60,000 characters of each novel."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "model").symlink_to(DEMO / "model")
    novels = pq.read_table(corpus.PARQUET)
    texts = pa.array([text.as_py()[:60_000] for text in novels["text"]])
    pq.write_table(novels.set_column(novels.schema.get_field_index("text"), "text", texts), folder / "austen.parquet")
    return folder


def test_one_command_in_an_empty_folder(tmp_path: Path, excerpts: Path) -> None:
    """The start of each novel; the whole ones are a test for whoever has the time, and the last step of .ci/run."""
    check_demo(tmp_path, excerpts, shortest=10_000, held_out=1.72)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_command_in_an_empty_folder_with_the_whole_novels(tmp_path: Path) -> None:
    check_demo(tmp_path, None, shortest=100_000, held_out=1.65)


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_and_pytorch_say_the_same(tmp_path: Path, excerpts: Path) -> None:
    """From Parquet to Parquet by the command: on CUDA Tile, there again in spans, and on the PyTorch path."""
    words = [f"input.path={excerpts / 'austen.parquet'}", f"model.path={excerpts / 'model'}", "task=embed_score"]
    forms = {"cutile": ["engine.spans=false"], "cutile_spans": ["engine.spans=true"], "torch": []}
    found = {}
    for name, more in forms.items():
        out = tmp_path / name
        assert main([*words, f"engine.backend={name.partition('_')[0]}", f"output.path={out}", *more]) == 0
        assert success(out)["documents"] == len(NOVELS)
        assert table(out, "errors").num_rows == 0
        found[name] = rows(out, "documents")
    for name in ("cutile", "cutile_spans"):
        for ours, theirs in zip(found[name], found["torch"], strict=True):
            assert (ours["doc_id"], ours["num_tokens"]) == (theirs["doc_id"], theirs["num_tokens"])
            assert ours["bits_per_byte"] == pytest.approx(theirs["bits_per_byte"], rel=1e-3)
            a, b = (np.array(row["embedding"], np.float64) for row in (ours, theirs))
            assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


def check_demo(tmp_path: Path, demo: Path | None, *, shortest: int, held_out: float) -> None:
    """shortest: tokens that every novel has more of. held_out: bits per byte that the novel which the model has not seen stays below."""
    done = longscan(tmp_path, demo)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["longscan-demo"]
    out = tmp_path / "longscan-demo"
    documents = {row["doc_id"]: row for row in rows(out, "documents")}
    assert list(documents) == NOVELS
    assert [title for title, row in documents.items() if row["held_out"]] == [HELD_OUT]
    assert {row["author"] for row in documents.values()} == {"Jane Austen"}
    assert all(row["num_tokens"] > shortest and len(row["embedding"]) > 0 for row in documents.values())
    assert documents[HELD_OUT]["bits_per_byte"] < held_out
    assert all(row["bits_per_byte"] < documents[HELD_OUT]["bits_per_byte"] for title, row in documents.items() if title != HELD_OUT)
    assert table(out, "errors").num_rows == 0
    windows = rows(out, "windows")
    assert len(windows) == sum(math.ceil(row["num_tokens"] / 1024) for row in documents.values())
    for title, row in documents.items():
        own = [window for window in windows if window["doc_id"] == title]
        assert sum(window["log_likelihood"] for window in own) == pytest.approx(row["log_likelihood"])
        assert (own[0]["char_start"], own[-1]["token_end"]) == (0, row["num_tokens"])
    assert_table(done.stdout, {title: (row["num_tokens"], row["bits_per_byte"]) for title, row in documents.items()}, out)
    before = snapshot(out)
    again = longscan(tmp_path, demo)
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
    assert "complete already" in again.stderr
    assert snapshot(out) == before
    assert success(out)["documents"] == 6


def assert_table(printed: str, expected: dict[str, tuple[int, float]], out: Path) -> None:
    lines = printed.splitlines()
    assert re.fullmatch(r"novel +tokens +bits/byte +nearest +most surprising window of 1024 tokens, bits/byte", lines[0])
    for line, (title, (tokens, bits)) in zip(lines[1:], expected.items(), strict=False):
        mark = r" \*" if title == HELD_OUT else ""
        found = re.fullmatch(rf"{title}{mark} +{tokens:,} +{bits:.3f}  (.+?) +(\d+) +(\d+\.\d\d)  “.+…”", line)
        assert found is not None, line
        assert found[1] in set(expected) - {title}
        assert float(found[3]) > bits
    assert lines[7].startswith("* held out")
    assert lines[8] == f"files: {out}"
    assert [line.split() for line in lines[9:]] == [
        ["documents/part-00000-of-00001.parquet", "6", "rows"],
        ["errors/part-00000-of-00001.parquet", "0", "rows"],
        ["windows/part-00000-of-00001.parquet", str(table(out, "windows").num_rows), "rows"],
    ]


@pytest.mark.parametrize("task", ["embed", "score"])
def test_the_table_shows_what_there_is(tmp_path: Path, task: str) -> None:
    """The demo takes words as any job does: without windows, or vectors, or scores."""
    novels = pq.read_table(corpus.PARQUET).slice(4)
    starts = pa.array([text.as_py()[:5000] for text in novels["text"]])
    pq.write_table(novels.set_column(novels.schema.get_field_index("text"), "text", starts), tmp_path / "in.parquet")
    job = [f"task={task}", f"input.path={tmp_path / 'in.parquet'}", "input.id_column=title", f"output.path={tmp_path / 'out'}"]
    assert main(job) == 0
    lines = render(compose_job(job)).splitlines()
    columns = {"embed": ["novel", "tokens", "nearest"], "score": ["novel", "tokens", "bits/byte"]}[task]
    assert lines[0].split() == columns
    assert [line[:17].strip() for line in lines[1:3]] == ["Northanger Abbey", "Persuasion"]
    assert lines[-2:] == ["  documents/part-00000-of-00001.parquet  2 rows", "  errors/part-00000-of-00001.parquet  0 rows"]


def log_likelihood(documents: Sequence[Sequence[int]], folder: Path) -> float:
    """Of all tokens of the documents, through the command."""
    folder.mkdir()
    pq.write_table(pa.table({"ids": pa.array(documents, pa.list_(pa.int32()))}), folder / "in.parquet")
    job = ("task=score", "input.tokens_column=ids", "engine.segment_tokens=1024", "cluster=inprocess")
    assert main([*job, f"input.path={folder / 'in.parquet'}", f"output.path={folder / 'out'}"]) == 0
    found = rows(folder / "out", "documents")
    assert sum(row["num_scored_tokens"] for row in found) == sum(map(len, documents))
    return sum(row["log_likelihood"] for row in found)


def test_a_state_that_is_carried_on_reads_better_than_one_reset_every_512_tokens(tmp_path: Path) -> None:
    """The same tokens of the held-out novel, as one document and as documents of 512."""
    text = {row["title"]: row["text"] for row in pq.read_table(corpus.PARQUET).to_pylist()}[HELD_OUT]
    tokenizer = Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids[: 48 * 512]
    size = len(tokenizer.decode(ids).encode())
    carried = log_likelihood([ids], tmp_path / "carried")
    reset = log_likelihood([ids[start : start + 512] for start in range(0, len(ids), 512)], tmp_path / "reset")
    bits = {name: -value / math.log(2) / size for name, value in (("carried", carried), ("reset", reset))}
    assert bits["carried"] <= bits["reset"] - 0.01, bits

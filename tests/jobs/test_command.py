"""The command, from its words to its exit code: what it writes, what it leaves alone, how it stops and goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sigterm
from fakes import tiny_checkpoint
from longscan.jobs.run import main
from tiny_jobs import rows, snapshot, success, table, texts, unfinish, words, write_input
from waiting import HANG_S, until


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two files in nested folders, three row groups each: six shards, where shards are small."""
    for n, name in enumerate(("a.parquet", "b/c.parquet")):
        write_input(tmp_path / "in" / name, texts(12, seed=n), row_group=4)
    return tmp_path / "in"


SMALL_SHARDS = "output.shard_tokens=500"


AS_FROM_A_TERMINAL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, as CI may be, ignores it and so would its children
from longscan.jobs.run import main
sys.exit(main())
"""


HELD_BEHIND_THREE_SHARDS = """
import threading
from pathlib import Path
from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.engine.forward import Forward
launch, stop, told = Forward.launch, Engine.stop, threading.Event()
def held(forward, step):
    if len(list(Path("out/_run/manifest").glob("*.json"))) >= 3:
        told.wait()
    return launch(forward, step)
def stopped(engine, timeout_s):
    told.set()
    return stop(engine, timeout_s)
Forward.launch, Engine.stop = held, stopped
"""
"""So that a signal finds the run in the middle: steps behind that wait until the engine is told to stop."""


@contextmanager
def run_process(*arguments: str, cwd: Path, first: str = "") -> Iterator[subprocess.Popen[str]]:
    """It ends with the block."""
    command = [sys.executable, "-c", first + AS_FROM_A_TERMINAL, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONWARNINGS": ""}
    with subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_embed_score_by_the_contract(model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    more = ["task=embed_score", "task.embedding.window_tokens=64", "task.score.window_tokens=64", "task.score.per_token=true"]
    assert main(words(model, source, out, SMALL_SHARDS, *more)) == 0
    documents = rows(out, "documents")
    assert [row["doc_id"] for row in documents] == [f"{name}#{n}" for name in ("a.parquet", "b/c.parquet") for n in range(12)]
    assert sorted(path.name for path in (out / "documents").iterdir()) == [f"part-{n:05d}-of-00006.parquet" for n in range(6)]
    assert table(out, "documents").column_names == [
        *("doc_id", "num_tokens", "embedding", "log_likelihood", "num_scored_tokens", "num_bytes", "bits_per_byte")
    ]
    expected = [text.encode() for seed in range(2) for text in texts(12, seed=seed)]
    for row, text in zip(documents, expected, strict=True):
        assert row["num_bytes"] == len(text)
        assert row["num_scored_tokens"] == row["num_tokens"] > 0
        assert row["bits_per_byte"] == pytest.approx(-row["log_likelihood"] / np.log(2) / len(text))
        assert np.linalg.norm(row["embedding"]) == pytest.approx(1, abs=1e-6)
    windows = rows(out, "windows")
    assert sum(row["token_end"] - row["token_start"] for row in windows) == sum(row["num_tokens"] for row in documents)
    assert sum(row["log_likelihood"] for row in windows) == pytest.approx(sum(row["log_likelihood"] for row in documents))
    tokens = rows(out, "tokens")
    assert sum(len(row["token_ids"]) for row in tokens) == sum(row["num_tokens"] for row in documents)
    assert sum(map(sum, (row["logprobs"] for row in tokens))) == pytest.approx(sum(row["log_likelihood"] for row in documents), rel=1e-5)
    assert table(out, "errors").num_rows == 0
    summary = success(out)
    assert (summary["documents"], summary["errors"], summary["shards"]) == (24, 0, 6)
    assert summary["tokens"] == sum(row["num_tokens"] for row in documents)
    said = capsys.readouterr().err
    assert " backend " in said
    assert "24 documents in 6 shards" in said
    assert "done: 24 documents, 0 errors" in said


def test_a_rerun_of_a_finished_run_does_nothing(model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(words(model, source, out)) == 0
    before = snapshot(out)
    assert main(words(model, source, out)) == 0
    assert snapshot(out) == before
    assert "complete already" in capsys.readouterr().err


def test_an_unfinished_run_goes_on_with_the_shards_that_are_not_done(
    model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, job = tmp_path / "out", words(model, source, tmp_path / "out", SMALL_SHARDS)
    assert main(job) == 0
    whole, before = table(out, "documents"), snapshot(out)
    unfinish(out, 2, 5)
    assert main(job) == 0
    assert "going on: 4 of them done already" in capsys.readouterr().err
    after = snapshot(out)
    again = {name for name in before if name.startswith(("documents/", "errors/")) and before[name] != after[name]}
    assert again == {f"{name}/part-{n:05d}-of-00006.parquet" for name in ("documents", "errors") for n in (2, 5)}
    assert table(out, "documents").equals(whole)
    assert success(out)["documents"] == 24


def test_a_part_that_is_gone_is_made_anew(model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, job = tmp_path / "out", words(model, source, tmp_path / "out", SMALL_SHARDS)
    assert main(job) == 0
    (out / "_SUCCESS").unlink()
    (out / "documents" / "part-00003-of-00006.parquet").unlink()
    assert main(job) == 2
    assert "documents/part-00003-of-00006.parquet" in capsys.readouterr().err
    assert main(job) == 0
    assert table(out, "documents").num_rows == 24


def test_a_run_whose_settings_changed_is_refused_with_what_changed(
    model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(words(model, source, out)) == 0
    before = snapshot(out)
    write_input(source / "d.parquet", ["one more"])
    assert main(words(model, source, out, "task.embedding.pooling=[last]")) == 2
    said = capsys.readouterr().err
    assert 'task.embedding.pooling: ["mean"] -> ["last"]' in said
    assert "d.parquet is new" in said
    assert "output.overwrite=true" in said
    assert snapshot(out) == before
    assert main(words(model, source, out, "task.embedding.pooling=[last]", "output.overwrite=true")) == 0
    assert table(out, "documents").num_rows == 25


def test_keys_that_change_no_result_are_free_to_change(model: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(words(model, source, out, SMALL_SHARDS)) == 0
    whole = table(out, "documents")
    unfinish(out, 0)
    assert main([*words(model, source, out)[:3], "engine.segment_tokens=64", "engine.lanes=9", "max_errors=3"]) == 0
    assert table(out, "documents").equals(whole)


def test_dry_run_prints_and_writes_nothing(model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(words(model, source, out, SMALL_SHARDS, "dry_run=true")) == 0
    said = capsys.readouterr().out
    assert " ".join(line.split()[0] for line in said.splitlines()) == "shards documents tokens memory time longest end nothing"
    assert said.splitlines()[0].split() == ["shards", "6"]
    assert said.splitlines()[1].split() == ["documents", "24", "rows"]
    assert not out.exists()


def test_a_dry_run_counts_what_is_done(model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    job = words(model, source, out, SMALL_SHARDS)
    assert main(job) == 0
    unfinish(out, 0)
    before = snapshot(out)
    capsys.readouterr()
    assert main([*job, "dry_run=true"]) == 0
    assert "done        5 of 6 shards, " in capsys.readouterr().out
    assert main([*job, "dry_run=true", "output.overwrite=true"]) == 0
    assert "done" not in capsys.readouterr().out, "it is to be done anew"
    assert main([*job, "dry_run=true", "seed=7"]) == 2
    assert "seed: 0 -> 7" in capsys.readouterr().err, "as the job is refused"
    assert snapshot(out) == before
    assert main(job) == 0
    before = snapshot(out)
    capsys.readouterr()
    assert main([*job, "dry_run=true"]) == 0
    assert capsys.readouterr().out == f"{out}: the run is complete already, nothing to do\nnothing was written\n"
    assert snapshot(out) == before


def test_a_file_that_was_only_touched_is_told_with_dates_and_gets_its_own_back(
    model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = words(model, source, tmp_path / "out")
    os.utime(source / "a.parquet", ns=(0, 1_796_048_751_437_325_112))
    assert main(job) == 0
    os.utime(source / "a.parquet", ns=(0, 1_796_048_812_000_000_007))
    assert main(job) == 2
    said = capsys.readouterr().err
    assert "input file a.parquet was modified: 2026-11-30 14:25:51 UTC -> 2026-11-30 14:26:52 UTC; if its content is what it was, " in said
    assert "mtime_ns" not in said
    assert "To go on with that run put the input files back as they were; else set another output.path" in said
    (touch,) = re.findall(r"touch -d '[^']+' a\.parquet", said)
    subprocess.run(touch, shell=True, cwd=source, check=True)
    assert main(job) == 0


def test_limit_takes_the_first_rows_of_the_whole_input(model: Path, source: Path, tmp_path: Path) -> None:
    assert main(words(model, source, tmp_path / "out", "limit=14")) == 0
    ids = [row["doc_id"] for row in rows(tmp_path / "out", "documents")]
    assert ids == [f"a.parquet#{n}" for n in range(12)] + ["b/c.parquet#0", "b/c.parquet#1"]


def test_too_many_errors_are_told_after_all_is_committed(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_input(tmp_path / "in.parquet", ["fine", None, "also fine", None])
    job = words(model, source, tmp_path / "out")
    for _ in range(2):  # a rerun does nothing, and tells the same
        assert main(job) == 3
        said = capsys.readouterr().err
        assert "longscan: error: the run is complete, but 2 rows failed, and max_errors=0" in said
        assert f"{tmp_path / 'out'}/errors" in said
    assert success(tmp_path / "out")["errors"] == 2
    assert [row["row"] for row in rows(tmp_path / "out", "errors")] == [1, 3]
    assert main([*job, "max_errors=2"]) == 0
    assert main([*job, "max_errors=1"]) == 3


def test_duplicate_ids_are_kept_and_told_of_once(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ["x", "y", "x", "z", "x"]
    source = write_input(tmp_path / "in.parquet", texts(5), row_group=2, name=pa.array(ids))
    assert main(words(model, source, tmp_path / "out", "input.id_column=name", "output.shard_tokens=100")) == 0
    said = capsys.readouterr().err
    assert said.count("ids that an earlier document has too: 2 documents") == 1
    assert "'x'" in said
    assert [row["doc_id"] for row in rows(tmp_path / "out", "documents")] == ids
    assert success(tmp_path / "out")["duplicate_ids"] == 2


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("task.embedding.truncate_dim=65", ["task.embedding.truncate_dim", "1 to 64"]),
        ("task.embedding.window_tokens=100", ["task.embedding.window_tokens", "64"]),
        ("engine.step_tokens=64", ["engine.step_tokens", "engine.segment_tokens"]),
        ("engine.backend=cutile", ["engine.backend=cutile", "GPU", "engine.backend=auto"]),
        ("input.text_column=body", ["input.text_column=body", "no such column", "the columns are text"]),
        ("input.tokens_column=ids", ["input.tokens_column=ids", "the columns are text"]),
        ("input.passthrough=[year]", ["input.passthrough=year", "the columns are text"]),
        ("input.passthrough=[num_tokens]", ["input.passthrough", "num_tokens"]),
        ("cluster.workers=2", ["cluster.workers", "inprocess"]),
        ("cluster.address=auto", ["cluster.address", "cluster=ray"]),
        ("model.dtype=float8", ["model.dtype", "bfloat16"]),
        ("model.tokenizer=gone/folder/of/mine", ["model.tokenizer", "gone/folder/of/mine"]),
        ("limit=0", ["limit", "at least 1"]),
    ],
)
def test_what_cannot_be_done_is_told_before_the_output_is_touched(
    model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, says: list[str]
) -> None:
    if word.startswith("engine.backend"):
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    base = words(model, source, tmp_path / "out")
    kept = [one for one in base if one.split("=")[0] != word.split("=")[0]]
    if word == "engine.step_tokens=64":
        kept = [one for one in kept if not one.startswith("engine.segment")]
    assert main([*kept, "cluster=inprocess", word]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in ("longscan: error: ", *says)), said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_read_is_told_before_the_output_is_touched(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tiny_checkpoint(tmp_path / "model", tokenizer=True)
    (broken / "config.json").write_text((broken / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    assert main(words(broken, source, tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert "missing: layers.2.norm.weight" in said
    assert main(words("some/where", source, tmp_path / "out")) == 2
    assert "model.path: expected a folder or a hub id, found no folder at 'some/where'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_memory_that_is_not_there_is_told_in_a_line(model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = [word for word in words(model, source, tmp_path / "out") if not word.startswith("engine.lanes")]
    assert main([*job, "engine.lanes=1000000000"]) == 2
    said = capsys.readouterr().err
    assert "does not fit into the memory" in said
    assert "engine.lanes" in said
    assert "Traceback" not in said


def test_secrets_of_a_path_are_not_told(model: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(model, source, "memory://user:secret@bucket/out")) == 0
    assert main(words(model, "memory://user:secret@bucket/gone?key=hidden", "memory://x/out")) == 2
    said = "".join(capsys.readouterr())
    assert "bucket" in said
    assert "secret" not in said
    assert "hidden" not in said


class TestProcess:
    """The same as a process of its own."""

    def test_errors_are_a_line_without_a_trace(self, tmp_path: Path) -> None:
        with run_process("input.path=gone", "output.path=out", cwd=tmp_path) as process:
            out, said = process.communicate(timeout=HANG_S)
        assert process.returncode == 2
        assert out == ""
        assert said.strip().splitlines()[-1].startswith("longscan: error: ")
        assert "gone" in said
        assert "Traceback" not in said
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
    def test_a_signal_stops_it_and_a_later_run_completes(
        self, number: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write_input(tmp_path / "in.parquet", [text * 3 for text in texts(40)], row_group=1)
        job = words(model, source, "out", "output.shard_tokens=64", "cluster=inprocess", "task=embed_score")
        manifest = tmp_path / "out" / "_run" / "manifest"
        with run_process(*job, cwd=tmp_path, first=HELD_BEHIND_THREE_SHARDS) as process:
            until(lambda: len(list(manifest.glob("*.json"))) >= 3, process)
            process.send_signal(number)
            _, said = process.communicate(timeout=HANG_S)
        assert process.returncode == 75, said
        assert said.strip().splitlines()[-1].startswith("longscan: error: stopped; what is done is kept")
        assert "Traceback" not in said
        done = len(list(manifest.glob("*.json")))
        assert 3 <= done < 40
        assert not (tmp_path / "out" / "_SUCCESS").exists()
        for part in (tmp_path / "out" / "documents").iterdir():
            assert pq.read_metadata(part).num_rows == 1
        monkeypatch.chdir(tmp_path)
        assert main(job) == 0
        assert f"going on: {done} of them done already" in capsys.readouterr().err
        assert [row["doc_id"] for row in rows(tmp_path / "out", "documents")] == [f"in.parquet#{n}" for n in range(40)]


def test_a_stop_in_a_library_s_hands_is_a_stop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Hydra closes in a `finally` what it had not opened yet, and its error hides the signal."""

    def composed(*_: object, **__: object) -> None:
        try:
            sigterm.send()
            file: StringIO = StringIO()
        finally:
            file.close()

    def failing(*_: object, **__: object) -> None:
        raise UnboundLocalError

    monkeypatch.setattr("longscan.jobs.run.compose_job", composed)
    assert main(["limit=1"]) == 75
    assert "stopped; what is done is kept" in capsys.readouterr().err
    monkeypatch.setattr("longscan.jobs.run.compose_job", failing)
    with pytest.raises(UnboundLocalError):
        main(["limit=1"])

"""`longscan-bench job`: what it makes, what it measures, and that its sleeping device behaves like one that computes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from fakes import tiny_checkpoint
from longscan.jobs import bench_fake
from longscan.jobs.bench import main
from longscan.jobs.bench_corpus import LENGTHS, Corpus, lengths_of, make_corpus
from longscan.jobs.bench_fake import Moment, SleepingModel
from longscan.jobs.benchmark.record import record_of
from longscan.jobs.benchmark.summary import jobs_summary
from longscan.jobs.benchmark.watch import Watch
from longscan.jobs.command import DEMO_MODEL
from longscan.kernels.segments import Entry, Segments
from longscan.pipeline.tokenize import load_tokenizer
from tiny_jobs import table


@pytest.mark.parametrize("kind", LENGTHS)
def test_lengths_come_to_the_tokens_that_were_asked_for(kind: str) -> None:
    lengths = lengths_of(kind, 500, 100_000)
    assert min(lengths) >= 1
    assert sum(lengths) == pytest.approx(100_000, rel=0.05)
    assert lengths == lengths_of(kind, 500, 100_000)


def test_lengths_are_what_their_names_say() -> None:
    assert lengths_of("giant", 500, 9000) == [9000]
    assert set(lengths_of("constant", 500, 9000)) == {500}
    drawn = sorted(lengths_of("lognormal", 8000, 4_000_000))
    assert drawn[len(drawn) // 2] == pytest.approx(8000, rel=0.2)
    assert drawn[-1] > 10 * drawn[0]
    mixed = lengths_of("mixed", 8000, 1_000_000)
    assert max(mixed) == 250_000
    assert mixed.count(500) == 500


def test_a_corpus_has_the_lengths_in_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(DEMO_MODEL)
    lengths = [1, 500, 20_000, 64]
    corpus = make_corpus(tmp_path / "c.parquet", lengths, tokenizer)
    texts = pq.read_table(corpus.path)["text"].to_pylist()
    found = [len(tokens.ids) for tokens in tokenizer.encode(texts)]
    assert found == pytest.approx(lengths, abs=2)
    assert (corpus.documents, corpus.tokens, corpus.longest) == (4, sum(lengths), 20_000)
    footer = pq.ParquetFile(corpus.path).metadata
    groups = [footer.row_group(n).num_rows for n in range(footer.num_row_groups)]
    assert sum(groups) == 4
    assert groups[2] == 1, "the giant has one of its own"


class Clock:
    """What the sleeping device asks of the module `time`."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds


def test_the_sleeping_device_takes_its_time_once_for_all_that_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(bench_fake, "time", clock)
    model = SleepingModel(rate=64_000.0, width=3)
    segments = Segments.pack([Entry(0, 64)], 10)
    for _ in range(3):
        hidden_TD, _ = model.step(None, segments, None)  # type: ignore[arg-type]
    assert clock.slept == 0
    assert hidden_TD.shape == (640, 3)
    done = Moment(model.busy_until)
    assert not done.query()
    clock.now += 0.01
    done.synchronize()
    assert clock.slept == pytest.approx(0.02)
    assert done.query()
    assert Moment(1.0).elapsed_time(Moment(1.5)) == 500.0


def written(path: Path, model: str) -> dict[str, Any]:
    """The one record of a file of results, which the command's table takes."""
    content = json.loads(path.read_text())
    assert content["kind"] == "job"
    assert content["facts"]["commit"] == "abc"
    assert content["facts"]["versions"]["torch"] == torch.__version__
    (record,) = content["rows"]
    assert record["model"] == model
    assert f"| {model} | " in jobs_summary(path.parent)
    found: dict[str, Any] = record
    return found


def test_a_job_on_the_sleeping_device_says_where_its_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["job", "--lengths", "constant:500", "--tokens", "200000", "--fake-rate", "1e6", "--task", "embed_score"]
    assert main([*words, "--json", str(tmp_path / "record.json"), "--commit", "abc", "--keep", str(tmp_path / "kept")]) == 0
    record = written(tmp_path / "record.json", "sleeping")
    assert record["documents"] == 400
    assert record["tokens"] == pytest.approx(200_000, rel=0.01)
    assert 0 < record["device_share"] <= 1
    assert record["share_of_model"] == pytest.approx(record["tokens_per_second"] / 1e6)
    assert record["stages"]["device"]["seconds"] >= 200_000 / 1e6
    idle = [record[name] for name in ("before_first_s", "between_steps_s", "behind_last_s")]
    assert min(idle) >= 0
    assert sum(idle) == pytest.approx((1 - record["device_share"]) * record["seconds"], abs=0.01)
    assert idle[0] > 0, "the first document is read before the first step"
    assert record["stages"]["tokenize"]["cpu_seconds"] > record["stages"]["rows"]["cpu_seconds"] > 0
    assert record["host_peak_mb"] >= record["host_before_mb"] > 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "tokenize" in printed
    documents = table(tmp_path / "kept" / "out", "documents")
    assert documents.num_rows == 400
    assert sum(documents["num_tokens"].to_pylist()) == record["tokens"]


def test_a_job_does_not_wait_for_what_the_bench_writes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own first words go to the disk for good, behind gigabytes of a model that are on their way there."""
    done: list[str] = []

    def run(*_: Any, **__: Any) -> None:
        done.append("run")
        raise ZeroDivisionError

    monkeypatch.setattr("os.sync", lambda: done.append("sync"))
    monkeypatch.setattr("longscan.pipeline.run.run", run)
    with pytest.raises(ZeroDivisionError):
        main(["job", "--lengths", "constant:500", "--tokens", "1000", "--fake-rate", "1e6"])
    assert done == ["sync", "run"]


def test_a_worker_without_work_makes_no_job_faster() -> None:
    """One giant on a pool of four: the others have nothing to do."""
    device = {"cpu_seconds": 0.0, "seconds": 10.0}
    metrics = {
        "tokens": 9000,  # with those that states of an earlier run stand for
        "computed_tokens": 1000,
        "device": "cuda",
        "backend": "cutile",
        "workers": {"least": 4, "most": 4, "cores": 2, "gpus": 1.0},
        "workers_at_work": 1,
        "worker_seconds": 10.0,
        "longest_worker_seconds": 10.0,
        "waste": 0.0,
        "alignment_waste": 0.0,
        "stages": {"device": device},
    }
    options = argparse.Namespace(lengths="giant", task="embed", fake_rate=0.0, cluster="local", shape="130m", layers=4, keys=["seed=1"])
    record = record_of(options, Corpus(Path("c.parquet"), 1, 1000, 1000), metrics, Watch(), 100.0, 125.0)
    assert (record.model, record.keys) == ("130m, 4 layers", ("seed=1",))
    assert (record.workers, record.tokens_per_second, record.share_of_model, record.device_share) == (1, 100.0, 1.0, 1.0)
    (line,) = (line for line in record.lines() if line.startswith("sequence"))
    assert "125 tokens/s" in line
    assert line.endswith("the job has 80.0% of it")
    metrics |= {"workers_at_work": 2, "longest_worker_seconds": 5.0}
    lines = list(record_of(options, Corpus(Path("c.parquet"), 2, 1000, 500), metrics, Watch(), 125.0, None).lines())
    assert "model         2 x 125 tokens/s alone; the job has 80.0% of them" in lines


def test_a_job_with_a_real_model_is_held_against_it(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", tokenizer=True)
    words = ["job", "--lengths", "lognormal:300", "--tokens", "20000", "--model", str(model)]
    assert main([*words, "--json", str(tmp_path / "record.json"), "--commit", "abc", "--keys", "task.embedding.pooling=[max]"]) == 0
    record = written(tmp_path / "record.json", "model")
    assert record["model_tokens_per_second"] > 0
    assert 0 < record["host_cpu_share"] < 1
    assert 0 < record["device_share"] <= 1
    assert 0 < record["waste"] < 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lengths", "short:3"], "constant, lognormal"),
        (["--tokens", "0"], "above 0, got '0'"),
        (["--tokens", "-5", "--lengths", "giant"], "above 0, got '-5'"),
        (["--layers", "none"], "above 0, got 'none'"),
        (["--fake-rate", "-3"], "tokens a second, got '-3'"),
        (["--fake-rate", "nan"], "tokens a second, got 'nan'"),
    ],
)
def test_words_that_mean_nothing_are_told(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["job", *words])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_model_that_is_not_there_is_told_by_the_word_that_names_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["job", "--tokens", "1000", "--model", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("longscan-bench: error: --model: ")
    assert str(tmp_path / name) in said
    assert "give --model a folder that holds both" in said
    assert "model.tokenizer" not in said


def test_a_dry_run_is_no_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "--tokens", "1000", "--lengths", "constant:500", "--fake-rate", "1e6", "--keys", "dry_run=true"]) == 2
    assert "got dry_run=true" in capsys.readouterr().err

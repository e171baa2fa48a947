"""What the command cannot do with the output or the model it is given: one line, exit code 2, and nothing of it touched."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import tiny_checkpoint
from longscan.jobs.compose import compose_job
from longscan.jobs.run import main
from longscan.pipeline import prepare
from longscan.pipeline.commit.lock import RunLock
from longscan.pipeline.output.folder import open_output
from longscan.pipeline.plan.fingerprint import explain_difference
from longscan.pipeline.plan.resolve import Device, look_at_device
from longscan.pipeline.storage.location import locate
from tiny_jobs import rows, snapshot, success, texts, unfinish, words, write_input


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_input(tmp_path / "in.parquet", texts(4), row_group=1)


def refused(job: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says as it refuses `job`, its last line alone."""
    assert main(job) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert last.startswith("longscan: error: "), said
    return last


def test_an_output_that_another_run_is_at_work_on(model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, job = tmp_path / "out", words(model, source, tmp_path / "out", "output.shard_tokens=100")
    assert main(job) == 0
    unfinish(out, 1)
    before = snapshot(out)
    with RunLock(locate(str(out))):
        said = refused(job, capsys)
        assert f"another run is at work on this output: process {os.getpid()}" in said
        assert "set another output.path" in said
        assert snapshot(out) == before
    assert main(job) == 0
    assert len(rows(out, "documents")) == 4


def test_a_folder_that_is_not_a_run(model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.txt").write_text("dear")
    for more in ((), ("output.overwrite=true",)):
        said = refused(words(model, source, tmp_path / "mine", *more), capsys)
        assert "expected an empty folder or a run of longscan, found report.txt; nothing was touched" in said
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["report.txt"]
    assert (tmp_path / "mine" / "report.txt").read_text() == "dear"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_output_that_cannot_be_a_folder(
    model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "file").write_text("mine")
    said = refused(words(model, source, tmp_path / name), capsys)
    assert f"{tmp_path / name}: expected a folder, or nothing yet" in said
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="without /proc there is no folder that even root cannot write")
def test_an_output_that_cannot_be_written(model: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(words(model, source, "/proc/longscan/out"), capsys)
    assert "/proc/longscan/out" in said
    assert "cannot be written" in said
    assert "Set output.path to a place that can be written" in said


def test_a_tokenizer_that_does_not_fit_the_model(model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = tiny_checkpoint(tmp_path / "narrow", vocab_size=128)
    said = refused(words(narrow, source, tmp_path / "out", f"model.tokenizer={model}"), capsys)
    assert "model.tokenizer: expected ids below 128, the model's vocabulary" in said
    assert "use the tokenizer that the model was trained with" in said
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_head_has_no_scores(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    headless = tiny_checkpoint(tmp_path / "headless", tokenizer=True, base_model=True, tied=False)
    said = refused(words(headless, source, tmp_path / "out", "task=score"), capsys)
    assert "task=score needs a model with an output projection" in said
    assert not (tmp_path / "out").exists()


class TestAnotherDevice:
    """Its last bits are others: of another kind a run is refused, of another model it is told."""

    @pytest.fixture
    def job(self, model: Path, source: Path, tmp_path: Path) -> list[str]:
        more = ("engine.backend=torch", "model.dtype=float32", "engine.lanes=4", "output.shard_tokens=100")
        job = words(model, source, tmp_path / "out", *more)
        assert main(job) == 0
        unfinish(tmp_path / "out", 1)
        return job

    def test_of_the_same_kind(self, job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        here = look_at_device(use_gpu=False)
        assert "goes on on" not in capsys.readouterr().err
        monkeypatch.setattr(prepare, "look_at_device", lambda _: replace(here, name="another CPU"))
        assert main(job) == 0
        assert f"this run began on {here.name} and goes on on another CPU: what is new may differ" in capsys.readouterr().err

    def test_of_another_kind(self, job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(prepare, "look_at_device", lambda _: Device("cuda", "a GPU", 1 << 34, (9, 0)))
        assert main(job) == 2
        assert '  device: "cpu" -> "cuda" (no key)\n' in (said := capsys.readouterr().err)
        assert "To go on with that run have what is no key as it was" in said

    def test_a_gpu_that_would_scan_in_another_form_goes_on_in_that_of_the_run(
        self, model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "spans"

        def prepared(processors: int, *more: str) -> prepare.Prepared:
            gpu = Device("cuda", "a GPU", 1 << 34, (9, 0), has_tile=True, processors=processors)
            monkeypatch.setattr(prepare, "look_at_device", lambda _: gpu)
            long = ("engine.segment_tokens=2048", "engine.step_tokens=4096")  # short spans are not chosen
            return prepare.prepare(compose_job(words(model, source, out, "cluster=inprocess", *long, *more)))

        def form(found: prepare.Prepared) -> object:
            return found.choice.span_tiles

        large, small = 100_000, 1
        assert (form(prepared(large)), form(prepared(small))) == (32, None)
        for began, other in ((large, small), (small, large)):
            first = prepared(began, "output.overwrite=true")
            with open_output(str(out), first.facts, overwrite=True) as output:
                output.start(first.plan())
            assert prepared(other).facts == first.facts
            assert form(prepared(other, "output.overwrite=true")) != form(first), "a run that is replaced says nothing of the new one"

    def test_products_in_tf32_are_another_run(self, model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prepare, "look_at_device", lambda _: Device("cuda", "a GPU", 1 << 34, (9, 0)))
        config = compose_job(words(model, source, tmp_path / "out", "cluster=inprocess", "model.dtype=float32"))
        plain = prepare.prepare(config).facts
        monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "high")
        assert explain_difference(plain, prepare.prepare(config).facts) == ['versions.products: not set -> "TF32" (no key)']


def test_automatic_sizes_are_those_of_the_first_start(model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from its device's memory, and stand in the plan; lanes alone may be set for a run that has begun."""
    out = tmp_path / "out"
    fixed = words(model, source, out, "output.shard_tokens=100", "cluster=inprocess")
    job = [word for word in fixed if not word.startswith(("engine.lanes", "engine.step_tokens"))]
    assert main(job) == 0
    first = metrics(out)["sizes"]
    assert first["lanes"] > 2
    assert json.loads((out / "_run" / "plan.json").read_bytes())["sizes"] == first
    here = look_at_device(use_gpu=False)
    monkeypatch.setattr(prepare, "look_at_device", lambda _: replace(here, num_bytes=1))
    for more, lanes in ((), first["lanes"]), (("engine.lanes=2",), 2):
        unfinish(out, 1)
        assert main([*job, *more]) == 0
        assert metrics(out)["sizes"] == first | {"lanes": lanes}


class TestWhatARunSaysOfItself:
    def test_its_metrics_are_those_of_the_last_start(self, model: Path, source: Path, tmp_path: Path) -> None:
        out, job = tmp_path / "out", words(model, source, tmp_path / "out", "output.shard_tokens=100", "cluster=inprocess")
        assert main(job) == 0
        first = metrics(out)
        assert {key: first[key] for key in ("documents", "errors", "tokens", "windows", "shards")} == {
            key: success(out)[key] for key in ("documents", "errors", "tokens", "windows", "shards")
        }
        assert (first["failed_shards"], first["backend"], first["cluster"]) == (0, "torch", "inprocess")
        assert first["sizes"] == {"lanes": 4, "step_tokens": 256, "shard_tokens": 100}
        unfinish(out, 2)
        assert main(job) == 0
        again = metrics(out)
        assert (again["shards"], again["documents"]) == (1, 1)
        assert again["tokens"] == rows(out, "documents")[2]["num_tokens"]
        unfinish(out)
        assert main(job) == 0
        assert metrics(out) == again, "a start with nothing to do has no metrics"

    def test_the_demo_model_on_other_documents_is_told_of(
        self, model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = [f"input.path={source}", "dry_run=true", "cluster=inprocess"]
        assert main([*job, f"output.path={tmp_path / 'out'}"]) == 0
        assert "model.path=demo: the small model that ships with longscan" in capsys.readouterr().err
        assert main([*job, f"output.path={tmp_path / 'out'}", f"model.path={model}"]) == 0
        assert "model.path=demo" not in capsys.readouterr().err


def metrics(output: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((output / "_run" / "metrics.json").read_text())
    return found

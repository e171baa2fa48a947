"""The command `longscan-bench` on a machine without a GPU: what it does there, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from longscan.jobs import bench
from longscan.jobs.benchmark.widths import report_widths
from longscan.kernels import compile as ahead
from longscan.kernels import tuning
from longscan.kernels.bench.case import Candidate, Case
from longscan.kernels.bench.limits import Work
from longscan.kernels.bench.widths import AS_IT_IS
from longscan.kernels.variants import OPERATORS

needs_tile = pytest.importorskip("cuda.tile", reason="cuda-tile is only on Linux")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("word", ["kernels", "model", "tune", "widths"])
def test_what_needs_a_gpu_says_so(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"longscan-bench: error: {word}: expected an NVIDIA GPU")


def test_widths_of_a_projection_are_checked_then_timed(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter(range(1, 9))
    assert report_widths("130m", 64, lambda call: (call(), next(times) * 1e-3)[1], device="cpu") == []
    head, *told = capsys.readouterr().out.splitlines()
    assert head.startswith("130m: [64, 768] @ [768, 3352], limit ")
    assert told[0].partition(":")[0].strip() == AS_IT_IS
    assert [line.partition(": ")[2].partition(" ms")[0] for line in told] == [f"{n}.0000" for n in range(1, 9)]


def test_a_width_that_is_wrong_has_no_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [Candidate("off", lambda: None, lambda: {"product": 0.5}, 3e-3)]
    monkeypatch.setattr("longscan.jobs.benchmark.widths.candidates", lambda *_, **__: iter(wrong))
    assert report_widths("130m", 64, lambda _: 1e-3, device="cpu") == ["130m, off: wrong: more than 0.003, found {'product': 0.5}"]
    assert "off" not in capsys.readouterr().out


def test_compile_prints_a_line_a_variant(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["compile", "--arch", "sm_90", "--operator", "conv1d"]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {report["kernel"] for report in reports} == {"conv1d.convolve", "conv1d.join_tails"}
    assert set(reports[0]) == {"kernel", "variant", "arch", "registers", "spill_bytes", "shared_bytes", "hgmma", "hmma"}


def test_without_words_it_compiles_every_kernel_for_four_architectures_and_ci_runs_that(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def compile_all(*given: object, full: bool) -> Iterator[ahead.Report]:
        asked.append((*map(tuple, given), full))
        yield ahead.Report("ssd.scan", "demo", "sm_90", 255, spill_bytes=8, shared_bytes=0, hgmma=1, hmma=0)

    monkeypatch.setattr("longscan.jobs.benchmark.ahead.compile_all", compile_all)
    assert bench.main(["compile"]) == 1
    assert asked == [(ahead.ARCHITECTURES, OPERATORS, False)]
    assert {"sm_80", "sm_90", "sm_100", "sm_120"} == set(ahead.ARCHITECTURES)
    bench.main(["compile", "--all"])
    assert asked[-1] == (ahead.ARCHITECTURES, OPERATORS, True)
    ci = Path(__file__).resolve().parents[2] / ".ci" / "run"
    found = [line.partition(" >")[0] for line in ci.read_text("utf-8").splitlines() if line.startswith("longscan-bench")]
    assert found == ["longscan-bench compile"]


def test_no_table_allows_spills_on_hopper() -> None:
    """At the models' shapes: what is measured there is what is compiled without any."""
    for operator in OPERATORS:
        assert "sm_90" not in tuning.table(operator).get("spill_allowed", {}), operator


def test_an_architecture_that_the_kernels_are_not_for_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["compile", "--arch", "sm_90", "sm_75"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "expected --arch to be of sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, got 'sm_75'" in err


def test_what_is_wrong_with_a_kernel_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reports = [
        ahead.Report("ssd.scan", "mamba2-130m", "sm_90", 168, spill_bytes=8, shared_bytes=0, hgmma=0, hmma=12),
        ahead.Report("norm.add_and_norm", "mamba2-130m", "sm_90", 40, spill_bytes=0, shared_bytes=0, hgmma=0, hmma=0),
    ]
    monkeypatch.setattr("longscan.jobs.benchmark.ahead.compile_all", lambda *_, **__: iter(reports))
    assert bench.main(["compile"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    spills, products = err.splitlines()
    where = "longscan-bench: wrong: ssd.scan (mamba2-130m) on sm_90"
    assert spills == f"{where}: expected at most 0 bytes of spills (spill_allowed), found 8"
    assert products == f"{where}: expected products on Hopper's tensor cores (HGMMA), found 12 HMMA and no HGMMA"


def test_spills_that_the_table_allows_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    report = ahead.Report("ssd.scan", "demo", "sm_80", 255, spill_bytes=8, shared_bytes=0, hgmma=0, hmma=12)
    allowed = {"spill_allowed": {"sm_80": {"scan": 7}}, "spill_allowed_all": {"sm_80": {"scan": 8}}}
    monkeypatch.setattr(tuning, "table", lambda _: allowed)
    assert len(ahead.faults(report)) == 1
    assert ahead.faults(report, full=True) == []


def test_spills_that_are_found_can_be_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def report(spills: int, variant: str, arch: str = "sm_80") -> ahead.Report:
        return ahead.Report("ssd.scan", variant, arch, 255, spill_bytes=spills, shared_bytes=0, hgmma=1, hmma=0)

    (tmp_path / "ssd").mkdir()
    (tmp_path / "ssd" / tuning.FILE).write_text(
        '{"kernels": {}, "spill_allowed": {"sm_80": {"scan": 4}, "sm_120": {"scan": 7, "products": 2}}}'
    )
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.table.cache_clear()
    try:
        for reports in ([report(8, "a"), report(16, "b"), report(0, "a", "sm_120")], [report(0, "a")]):
            monkeypatch.setattr("longscan.jobs.benchmark.ahead.compile_all", lambda *_, found=reports, **__: iter(found))
            assert bench.main(["compile", "--operator", "ssd"]) == int(any(found.spill_bytes for found in reports))
            assert bench.main(["compile", "--operator", "ssd", "--allow"]) == 0
            allowed = json.loads((tmp_path / "ssd" / tuning.FILE).read_text())["spill_allowed"]
            assert allowed.get("sm_80", {}) == ({"scan": 16} if reports[0].spill_bytes else {})
        assert allowed == {"sm_120": {"products": 2}}
    finally:
        tuning.table.cache_clear()


@pytest.mark.parametrize("words", [["compile", "--operator", "fft"], ["kernels", "--shape", "1t"], [], ["fly"]])
def test_words_that_it_does_not_know(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: longscan-bench")


def test_kernels_tells_of_rows_and_keeps_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a stand-in for a GPU: one operator that is right, one that is wrong."""
    known = {
        "gpu": "a GPU",
        "driver": "1",
        "cuda": "13",
        "versions": {"torch": "2", "fla-core": None},
        "commit": "abc",
        "date": "2026-01-01",
    }
    known |= {"chip": {"copy_bytes_a_second": 4.2e12, "product_flops_a_second": 7e14}, "timing": "median"}
    rows = [("ssd", 1e-3), ("conv1d", 1.0)]
    cases = [Case(name, "small", "two", Work(4.3e9), Candidate("longscan", lambda: None, lambda e=error: {"y": e})) for name, error in rows]
    for name, value in (
        ("require_gpu", lambda _: None),
        ("facts", lambda _: known),
        ("cases", lambda *_: iter(cases)),
        ("time_on_gpu", lambda _: 2e-3),
        ("launch_times", lambda operator, _: {f"kernel of {operator}": 1.5}),
    ):
        monkeypatch.setattr(f"longscan.jobs.benchmark.operators.{name}", value)
    assert bench.main(["kernels", "--operator", "ssd", "--json", str(tmp_path / "kept.json")]) == 1
    out, err = capsys.readouterr()
    assert "copies 4.20 TB/s and multiplies 700 TFLOP/s" in out
    assert "fla-core not installed" in out
    assert "2.0000 ms  2.00 x the limit of 1.0000 ms (bytes)" in out
    assert "of it: kernel of ssd 1.5000 ms" in out
    assert "kernel of conv1d" not in out, "what is wrong has no times"
    assert err.startswith("longscan-bench: wrong: conv1d (small; two): wrong: more than 0.02")
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [row["longscan"]["milliseconds"] for row in kept["rows"]] == [2.0, None]
    assert kept["facts"] == known

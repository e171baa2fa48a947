"""The README's table is what the command prints from the results that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from longscan.jobs import bench
from longscan.jobs.benchmark.summary import BEGIN, BEGIN_JOBS, END, NO_JOBS, NOTHING, jobs_summary, summary, write_summary
from longscan.pipeline.errors import OutputError

README = Path(__file__).resolve().parents[2] / "README.md"


def facts(date: str, commit: str = "abc") -> dict[str, Any]:
    return {"gpu": "NVIDIA H200", "driver": "580.1", "date": date, "commit": commit}


def operator(milliseconds: float | None, *peers: float | None) -> dict[str, Any]:
    ours = {"milliseconds": milliseconds, "note": "wrong: more than 0.003", "ratio_to_limit": 1.5, "ns_per_token_head": 0.11}
    others = [{"name": f"peer {i}", "milliseconds": time, "times_ours": time and 4.0} for i, time in enumerate(peers)]
    return {"operator": "ssd", "shape": "mamba2-130m", "load": "16 documents", "longscan": ours, "peers": others}


NETWORK = {
    "shape": "130m",
    "load": "one document",
    "layers": 24,
    "tokens_per_second": 2.5e6,
    "layer_milliseconds": 1.092,
    "ratio_to_products_and_limits": 1.21,
    "peer": "stack",
    "peer_tokens_per_second": 1.25e6,
    "times_peer": 2.0,
}


JOB = {
    "model": "130m",
    "lengths": "constant:500",
    "task": "embed",
    "workers": 1,
    "device": "cuda",
    "tokens": 40_000_000,
    "tokens_per_second": 1.75e6,
    "seconds": 22.857,
    "share_of_model": 0.921,
    "sequence_tokens_per_second": None,
    "device_share": 0.95,
    "before_first_s": 0.1,
    "between_steps_s": 0.2,
    "behind_last_s": 0.3,
    "device_peak_mb": 7752.3,
    "cpu_ns_per_token": 2000.0,
    "peers": [],
}
PEER = {"name": "stack", "tokens": 800_000, "tokens_per_second": 5e5, "times_peer": 3.5, "distance": 1e-3, "note": ""}


def put(folder: Path, name: str, kind: str, known: dict[str, Any], *rows: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps({"kind": kind, "facts": known, "rows": rows}))


def test_the_readme_has_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["table"]) == 0
    printed = capsys.readouterr().out.strip()
    between = [README.read_text("utf-8").partition(mark)[2].partition(END)[0].strip() for mark in (BEGIN_JOBS, BEGIN)]
    assert all(between)
    assert "\n\n".join(between) == printed


def test_the_newest_result_of_a_row_counts(tmp_path: Path) -> None:
    assert summary(tmp_path) == NOTHING
    put(tmp_path, "z.json", "kernels", facts("2026-01-01", "old"), operator(0.9, 1.8))
    put(tmp_path, "a.json", "kernels", facts("2026-02-01", "new"), operator(0.172, None, 0.688, 0.7))
    put(tmp_path, "b.json", "model", facts("2026-02-02", "later"), NETWORK)
    lines = summary(tmp_path).splitlines()
    assert lines[2:4] == [
        "| ssd | mamba2-130m | 16 documents | 0.172 ms, 0.110 ns a token and head | 1.50 | peer 1, 0.688 ms | 4.00 |",
        "| network | 130m, 24 layers | one document | 2,500,000 tokens/s, 1.09 ms a layer | 1.21 | stack, 1,250,000 tokens/s | 2.00 |",
    ]
    assert [line for line in lines if "measured" in line] == [
        "* measured on NVIDIA H200, driver 580.1, bf16, 2026-02-01, commit new",
        "* measured on NVIDIA H200, driver 580.1, bf16, 2026-02-02, commit later",
    ]


def test_what_was_wrong_or_alone_is_in_the_table_too(tmp_path: Path) -> None:
    put(tmp_path, "a.json", "kernels", facts("2026-01-01"), operator(None))
    assert "| wrong: more than 0.003 |" in summary(tmp_path)
    put(tmp_path, "a.json", "kernels", facts("2026-01-01"), operator(0.2, None))
    assert "| 0.200 ms, 0.110 ns a token and head | 1.50 |  |  |" in summary(tmp_path)


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    put(tmp_path, "a.json", "model", facts("2026-01-01"), NETWORK)
    readme = tmp_path / "README.md"
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    put(jobs, "a.json", "job", facts("2026-01-01"), JOB)
    readme.write_text(f"before\n{BEGIN_JOBS}\nold\n{END}\nbetween\n{BEGIN}\nold\n{END}\nafter\n")
    write_summary(readme, tmp_path, jobs)
    tables = f"{BEGIN_JOBS}\n\n{jobs_summary(jobs)}\n\n{END}\nbetween\n{BEGIN}\n\n{summary(tmp_path)}\n\n{END}"
    assert readme.read_text() == f"before\n{tables}\nafter\n"
    for marks in ("no marks\n", f"{BEGIN}\n{END}\n", f"{BEGIN_JOBS}\n{END}\n"):
        readme.write_text(marks)
        with pytest.raises(OutputError, match="expected the marks"):
            write_summary(readme, tmp_path, jobs)
        assert readme.read_text() == marks


@pytest.mark.parametrize("name", ["nofile.md", "folder", "binary.md"])
def test_a_file_that_cannot_be_read_is_told_in_a_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.md").write_bytes(b"\xff\xfe")
    assert bench.main(["table", "--update", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("longscan-bench: error: --update: expected a Markdown file with the tables' marks, and ")
    assert str(tmp_path / name) in line


def test_a_job_has_its_line_and_its_peers_theirs(tmp_path: Path) -> None:
    assert jobs_summary(tmp_path) == NO_JOBS
    one = JOB | {"lengths": "giant", "task": "score", "workers": 2, "sequence_tokens_per_second": 2e6, "cpu_ns_per_token": None}
    one["keys"] = ["engine.spans=false", "engine.lanes=3"]
    lost = PEER | {"name": "other", "tokens_per_second": None, "times_peer": None, "distance": None, "note": "failed: E"}
    windows = PEER | {"name": "windows", "distance": None, "note": "another function"}
    put(tmp_path, "a.json", "job", facts("2026-01-01", "old"), JOB | {"tokens": 1, "peers": [PEER, lost]})
    put(tmp_path, "b.json", "job", facts("2026-01-02", "new"), JOB | {"peers": [PEER, lost, windows]}, one)
    lines = jobs_summary(tmp_path).splitlines()
    assert lines[2:5] == [
        "| 130m | documents of 500 | 40,000,000 | 1,750,000 in 22.9 s | 92.1% | 95.0% | 0.10 / 0.20 / 0.30 s | 7.8 GB |",
        "| 130m | one document; score; `engine.spans=false`; `engine.lanes=3` | 40,000,000 | 1,750,000 in 22.9 s, 2 GPUs "
        "| 92.1%; 87.5% of one sequence of 65,536 | 95.0% "
        "| 0.10 / 0.20 / 0.30 s |  |",
        "",
    ]
    assert lines[7:] == [
        "| 130m | documents of 500 | stack | 800,000 | 500,000 | 3.50 | 1.0e-03 |",
        "| 130m | documents of 500 | other | 800,000 | failed: E |  |  |",
        "| 130m | documents of 500 | windows | 800,000 | 500,000 | 3.50 | another function |",
        "",
        "* measured on NVIDIA H200, driver 580.1, bf16, 2026-01-02, commit new",
    ]


def test_a_peer_stays_until_there_is_a_newer_of_it(tmp_path: Path) -> None:
    """A later run may have fewer peers beside it, and another chunk may have been the best of one."""
    kernels, other = PEER | {"name": "kernels, chunk 128"}, PEER | {"name": "other", "tokens_per_second": 2e5}
    put(tmp_path, "a.json", "job", facts("2026-01-01", "old"), JOB | {"peers": [kernels, other]})
    again = PEER | {"name": "kernels, chunk 256", "tokens_per_second": 6e5, "times_peer": 3.0}
    put(tmp_path, "b.json", "job", facts("2026-01-02", "new"), JOB | {"peers": [again]})
    lines = jobs_summary(tmp_path).splitlines()
    assert lines[6:] == [
        "| 130m | documents of 500 | kernels, chunk 256 | 800,000 | 600,000 | 3.00 | 1.0e-03 |",
        "| 130m | documents of 500 | other | 800,000 | 200,000 | 3.50 | 1.0e-03 |",
        "",
        "* measured on NVIDIA H200, driver 580.1, bf16, 2026-01-01, commit old",
        "* measured on NVIDIA H200, driver 580.1, bf16, 2026-01-02, commit new",
    ]


def test_a_peer_of_another_version_is_the_same_and_one_that_was_not_timed_hides_none_that_was(tmp_path: Path) -> None:
    def named(*names: str, rate: float | None = 5e5) -> dict[str, Any]:
        note = "" if rate else "not usable: No module named 'x'"
        row = PEER | {"tokens_per_second": rate, "distance": rate and 1e-3, "note": note}
        return JOB | {"peers": [row | {"name": name} for name in names]}

    old, new, broken = facts("2026-01-01", "old"), facts("2026-01-02", "new"), facts("2026-01-03", "broken")
    put(tmp_path, "a.json", "job", old, named("transformers 5.17.0, chunk 256", "windows of 512 tokens, of a"))
    put(tmp_path, "b.json", "job", new, named("transformers 5.18.0.dev0, chunk 256", "windows of 512 tokens, of b", rate=6e5))
    put(tmp_path, "c.json", "job", broken, named("transformers", "kernels, chunk 128", "windows of 512 tokens", rate=None))
    assert jobs_summary(tmp_path).splitlines()[6:] == [
        "| 130m | documents of 500 | transformers 5.18.0.dev0, chunk 256 | 800,000 | 600,000 | 3.50 | 1.0e-03 |",
        "| 130m | documents of 500 | windows of 512 tokens, of b | 800,000 | 600,000 | 3.50 | 1.0e-03 |",
        "| 130m | documents of 500 | kernels, chunk 128 | 800,000 | not usable: No module named 'x' |  |  |",
        "",
        "* measured on NVIDIA H200, driver 580.1, bf16, 2026-01-02, commit new",
        "* measured on NVIDIA H200, driver 580.1, bf16, 2026-01-03, commit broken",
    ]


def test_a_job_on_a_cpu_takes_no_gpus_row(tmp_path: Path) -> None:
    put(tmp_path, "a.json", "job", facts("2026-01-01", "old"), JOB)
    put(tmp_path, "b.json", "job", facts("2026-01-02", "new") | {"gpu": None}, JOB | {"device": "cpu", "workers": 2, "device_peak_mb": 0.0})
    lines = jobs_summary(tmp_path).splitlines()
    assert [line.partition(" in ")[0] for line in lines[2:4]] == [
        "| 130m | documents of 500 | 40,000,000 | 1,750,000",
        "| 130m | documents of 500; cpu | 40,000,000 | 1,750,000",
    ]
    assert ", 2 workers |" in lines[3]
    assert lines[-2:] == [
        "* measured on NVIDIA H200, driver 580.1, bf16, 2026-01-01, commit old",
        "* measured on a CPU, 2026-01-02, commit new",
    ]

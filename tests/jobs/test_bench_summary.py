"""The README's table is what the command prints from the results that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from longscan.jobs import bench
from longscan.jobs.benchmark.summary import BEGIN, END, NOTHING, summary, write_summary
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


def put(folder: Path, name: str, kind: str, known: dict[str, Any], *rows: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps({"kind": kind, "facts": known, "rows": rows}))


def test_the_readme_has_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["table"]) == 0
    printed = capsys.readouterr().out.strip()
    between = README.read_text("utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert printed
    assert between == printed


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
    assert [line for line in lines if "Measured" in line] == [
        "Measured on NVIDIA H200, driver 580.1, 2026-02-01, commit new; bf16.",
        "Measured on NVIDIA H200, driver 580.1, 2026-02-02, commit later; bf16.",
    ]


def test_what_was_wrong_or_alone_is_in_the_table_too(tmp_path: Path) -> None:
    put(tmp_path, "a.json", "kernels", facts("2026-01-01"), operator(None))
    assert "| wrong: more than 0.003 |" in summary(tmp_path)
    put(tmp_path, "a.json", "kernels", facts("2026-01-01"), operator(0.2, None))
    assert "| 0.200 ms, 0.110 ns a token and head | 1.50 |  |  |" in summary(tmp_path)


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    put(tmp_path, "a.json", "model", facts("2026-01-01"), NETWORK)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_summary(readme, tmp_path)
    assert readme.read_text() == f"before\n{BEGIN}\n\n{summary(tmp_path)}\n\n{END}\nafter\n"
    readme.write_text("no marks\n")
    with pytest.raises(OutputError, match="expected the marks"):
        write_summary(readme, tmp_path)

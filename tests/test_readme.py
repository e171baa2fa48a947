"""Every command in the README does what it says there; `.ci/run` runs the two of the first minute."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import tiny_checkpoint
from longscan.jobs import bench, convert, inspect
from longscan.jobs.compose import all_keys
from longscan.jobs.run import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
COMMAND = re.compile(r"^    ((?:pip|longscan|pytest|python)\b.*)$", re.MULTILINE)
FIRST_FILE = COMMAND.findall(README.partition("## A first file of your own")[2].partition("\n## ")[0])
JOBS = [command for command in COMMAND.findall(README) if command.startswith("longscan ") and command not in FIRST_FILE]
TOOLS = [command for command in COMMAND.findall(README) if command.startswith("longscan-")]
OTHERS = [command for command in COMMAND.findall(README) if not command.startswith("longscan")]


@pytest.mark.parametrize("command", JOBS)
def test_jobs_run_as_they_are_written(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_checkpoint(tmp_path / "MODEL", tokenizer=True)
    (tmp_path / "DOCUMENTS").mkdir()
    pq.write_table(pa.table({"text": ["It is a truth.", "However little known."]}), tmp_path / "DOCUMENTS" / "a.parquet")
    words = shlex.split(command)[1:]
    for name in ("MODEL", "DOCUMENTS", "OUT"):
        words = [word.replace(f"={name}", f"={tmp_path / name}") for word in words]
    assert main(words) == 0
    if "dry_run=true" in words:
        assert "tokens" in capsys.readouterr().out
        assert not (tmp_path / "OUT").exists()
    else:
        assert (tmp_path / "OUT" / "_SUCCESS").exists()
        assert pq.read_table(tmp_path / "OUT" / "documents").num_rows == 2


def test_a_first_file_goes_through_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("one", "It is a truth."), ("two", "However little known: naïve."), ("three", "")):
        Path(f"{name}.txt").write_text(text, "utf-8")
    make, embed, show = (shlex.split(command) for command in FIRST_FILE)
    subprocess.run([sys.executable, *make[1:]], check=True)
    assert main(embed[1:]) == 0
    shown = subprocess.run([sys.executable, *show[1:]], check=True, capture_output=True, text=True).stdout
    assert all(word in shown for word in ("one.txt", "two.txt", "three.txt", "embedding", "num_tokens"))
    found = pq.read_table("OUT/documents").to_pylist()
    assert [row["doc_id"] for row in found] == ["one.txt", "three.txt", "two.txt"]
    assert (found[1]["num_tokens"], found[1]["embedding"]) == (0, None)


def test_tools_run_as_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_checkpoint(tmp_path / "MODEL", tokenizer=True)
    mains = {"longscan-inspect": inspect.main, "longscan-convert": convert.main, "longscan-bench": bench.main}
    assert sorted(mains) == sorted(command.split()[0] for command in TOOLS)
    for command in TOOLS:
        name, *words = shlex.split(command)
        assert mains[name]([str(tmp_path / word) if word.isupper() else word for word in words]) == 0
    assert "hugging_face" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "TARGET").iterdir()) == sorted(path.name for path in (tmp_path / "MODEL").iterdir())


def test_the_table_of_keys_has_every_key_and_no_other() -> None:
    told: list[str] = []
    for line in README.partition("\n## Keys\n")[2].partition("\n## ")[0].splitlines():
        if line.startswith("| `"):
            for name in re.findall(r"`([\w.]+)`", line.split("|")[1]):
                told.append(told[-1].rpartition(".")[0] + name if name.startswith(".") else name)
    by_group = {"task": "task.name", "cluster": "cluster.mode"}
    keys = all_keys()
    leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    assert sorted(by_group.get(key, key) for key in told) == sorted(leaves)


def test_the_commands_of_the_first_minute_are_those_that_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    first = [command for command in OTHERS if command.startswith("pip ")]
    assert first == ["pip install -e . && longscan", "pip install -e '.[test]' && pytest"]
    assert all(f"readme_has {shlex.quote(command)}" in ci or f'readme_has "{command}"' in ci for command in first)


def test_test_commands_select_tests(pytestconfig: pytest.Config) -> None:
    selected = {" ".join(command.split("  ")[0].split()[1:]) for command in OTHERS if command.startswith("pytest")}
    assert selected == {"", "-m slow", "-m gpu"}
    registered = {marker.partition(":")[0] for marker in pytestconfig.getini("markers")}
    for marker in ("slow", "gpu"):
        assert marker in registered
        assert any(re.search(rf"pytest\.mark\.{marker}\b", path.read_text("utf-8")) for path in (ROOT / "tests").rglob("test_*.py"))


def test_slow_results_are_recorded() -> None:
    record = (ROOT / "tests" / "SLOW.md").read_text("utf-8")
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "@pytest.mark.slow" in path.read_text("utf-8") and path != Path(__file__):
            assert path.relative_to(ROOT).as_posix() in record, f"tests/SLOW.md has no result of {path.name}"

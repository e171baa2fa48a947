"""A test run that is told to end does end, and no test is called a failure for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import subprocess
import time

import sigterm
from longscan.jobs.run import main


def outside():
    subprocess.run(["sh", "-c", "kill $PPID"], check=True)


def stopped(patch, by):
    def run(config):
        by()
        time.sleep(60)

    patch.setattr("longscan.pipeline.run.run", run)
    return main(["task=embed", "input.path=in", "output.path=out"])


def test_its_own(monkeypatch):
    assert stopped(monkeypatch, sigterm.send) == 75


def test_from_outside(monkeypatch):
    assert stopped(monkeypatch, outside) == 0


def test_behind():
    pass
"""


def test_a_time_limit_on_all_tests_ends_them_while_one_runs_the_command(tmp_path: Path) -> None:
    """A test's own signal is its own affair."""
    (tmp_path / "test_inside.py").write_text(TESTS)
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "conftest", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == pytest.ExitCode.INTERRUPTED, ended.stdout
    assert "SIGTERM from another process during test_inside.py::test_from_outside" in ended.stdout
    assert " 1 passed" in ended.stdout, "the one before; not the one behind"
    assert "failed" not in ended.stdout

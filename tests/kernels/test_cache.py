"""Compiled kernels are kept in a folder that can be written, whatever home there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from longscan.kernels import cache
from longscan.kernels.cache import VARIABLE, use_cache
from longscan.pipeline.model import load_model

SETTLE = """
from longscan.kernels.cache import use_cache
use_cache()
"""
LOAD = """
import sys, torch
from longscan.pipeline.model import load_model
load_model(sys.argv[1], dtype=torch.bfloat16, device="cpu", backend="cutile")
"""
COMPILE = """
import os
print(os.environ["CUDA_TILE_CACHE_DIR"])
from longscan.kernels.compile import compile_launch, launches
launch = next(found for found in launches(["conv1d"], arch="sm_90") if found.name == "join_tails")
print(compile_launch(launch, "sm_90").registers)
"""


@pytest.fixture(autouse=True)
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()


def test_it_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert use_cache() == os.environ[VARIABLE] == str(tmp_path / "home" / ".cache" / "cutile-python")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert use_cache() == str(tmp_path / "xdg" / "cutile-python")


def test_who_computes_with_pytorch_keeps_none(model: Path) -> None:
    load_model(model, dtype=torch.float32, device="cpu", backend="torch")
    assert VARIABLE not in os.environ


def test_what_the_environment_says_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "shared"))
    assert use_cache() == str(tmp_path / "shared")
    for word in ("off", "0", "None", ""):
        monkeypatch.setenv(VARIABLE, word)
        assert use_cache() == "off"
        assert os.environ[VARIABLE] == word


def test_without_a_home_it_is_a_folder_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", "/proc/nobody")
    assert use_cache() == str(tmp_path / "tmp" / f"cutile-python-{os.getuid()}")
    assert "cannot be written" in caplog.text
    assert (tmp_path / "tmp" / f"cutile-python-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_without_any_folder_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_is_writable", lambda _: False)
    assert use_cache() == "off"
    assert os.environ[VARIABLE] == "off"


def test_a_folder_of_somebody_elses_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert not cache._is_writable(tmp_path)


@pytest.mark.parametrize("first", [SETTLE, LOAD], ids=["settled", "by_a_worker_that_loads_its_model"])
def test_kernels_are_compiled_without_a_home_and_found_again(first: str, model: Path, tmp_path: Path) -> None:
    """CUDA Tile itself fails there; and what one process compiled is in the cache of the next."""
    pytest.importorskip("cuda.tile", reason="cuda-tile is only on Linux")
    environment = {**os.environ, "HOME": "/proc/nobody", "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-c", first + COMPILE, str(model)]
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        folder, registers = done.stdout.split()
        assert folder == str(tmp_path / "tmp" / f"cutile-python-{os.getuid()}")
        assert int(registers) > 0
    from cutile_cache._cache import _connect  # type: ignore[import-untyped,unused-ignore]

    (count,) = _connect(folder).execute("SELECT count(*) FROM cache").fetchone()
    assert count == 1

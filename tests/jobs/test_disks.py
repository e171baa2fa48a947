"""Outputs on a real file system that is full or read-only for a while: what is said, what is kept, and how the run goes on."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import tiny_checkpoint
from longscan.jobs.run import main
from tiny_jobs import same_tables, success, texts, words, write_input

Capture = pytest.CaptureFixture[str]

TASK = ("task=embed_score", "task.score.per_token=true", "task.embedding.window_tokens=64", "task.score.window_tokens=64")
JOB = (*TASK, "output.shard_tokens=2000", "engine.checkpoint_tokens=128")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_input(tmp_path_factory.mktemp("in") / "in.parquet", texts(60), row_group=20)


@pytest.fixture(scope="module")
def plain(model: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "out"
    assert main(words(model, source, out, *JOB)) == 0
    return out


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, in memory, of 20 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(place)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"only root can mount a file system: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def remount(disk: Path, option: str) -> bool:
    return not subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], capture_output=True, check=False).returncode


@pytest.mark.parametrize(("size", "code"), [("4k", 2), ("40k", 75), ("320k", 75)], ids=["lock", "rows and carries", "commit"])
def test_a_disk_that_is_full_until_room_is_made(
    disk: Path, model: Path, source: Path, plain: Path, capsys: Capture, size: str, code: int
) -> None:
    assert remount(disk, f"size={size}")
    job = words(model, source, disk / "out", *JOB)
    assert main(job) == code
    said = capsys.readouterr().err
    assert said.count("longscan: error: ") == 1
    for part in (f"{disk}/out", "cannot be written", "No space left on device", "Free some space", "run the same command again"):
        assert part in said.partition("longscan: error: ")[2], said
    assert not (disk / "out" / "_SUCCESS").exists()
    assert remount(disk, "size=20m")
    assert main(job) == 0
    same_tables(disk / "out", plain)
    left = [path for path in (disk / "out").rglob("*") if ".longscan-" in path.name or path.name in ("tmp", "carries")]
    assert not left


def test_a_read_only_disk(disk: Path, model: Path, source: Path, capsys: Capture) -> None:
    assert remount(disk, "ro")
    assert main(words(model, source, disk / "out", *JOB)) == 2
    said = capsys.readouterr().err
    for part in (f"longscan: error: {disk}/out", "Read-only file system", "Set output.path to a place that this user may write to"):
        assert part in said


def test_a_disk_that_becomes_read_only(disk: Path, model: Path, source: Path, plain: Path, capsys: Capture) -> None:
    """As disks do on which an error is found. The system refuses while a file is open for writing, so it is asked until it does not."""
    codes: list[int] = []
    job = words(model, source, disk / "out", *JOB)

    def turn() -> None:
        while not list(disk.glob("out/_run/manifest/*.json")):
            time.sleep(0.001)
        while not remount(disk, "ro") and not codes:
            pass

    turning = threading.Thread(target=turn)
    turning.start()
    codes.append(main(job))
    turning.join()
    said = capsys.readouterr().err
    assert remount(disk, "rw")
    if codes != [0]:  # else the run was faster
        assert codes[0] in (2, 75)
        assert "Read-only file system" in said.partition("longscan: error: ")[2]
        assert not (disk / "out" / "_SUCCESS").exists()
    assert main(job) == 0
    same_tables(disk / "out", plain)
    assert success(disk / "out")["documents"] == 60

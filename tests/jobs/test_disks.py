"""Outputs on a real file system that is full or read-only for a while: what is said, what is kept, and how the run goes on."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from longscan.jobs.run import main
from longscan.pipeline import run
from longscan.pipeline.shards import ShardReport
from longscan.pipeline.storage.location import Location
from longscan.pipeline.worker import worker
from longscan.pipeline.write import writer as write
from tiny_jobs import same_tables, success, texts, words, write_input
from waiting import until

Capture = pytest.CaptureFixture[str]

PAGE = 4096
"""What a file in memory is made of."""

TASK = ("task=embed_score", "task.score.per_token=true", "task.embedding.window_tokens=64", "task.score.window_tokens=64")
JOB = (*TASK, "output.shard_tokens=2000", "engine.checkpoint_tokens=128")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_input(tmp_path_factory.mktemp("in") / "in.parquet", texts(60), row_group=20)


@pytest.fixture(scope="module")
def plain(model: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "out"
    assert main(words(model, source, out, *JOB)) == 0
    return out


@pytest.fixture(autouse=True)
def tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for a shard: more waits are no other case."""
    monkeypatch.setattr(worker, "TRIES", 2)


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


def room(files: Iterable[Path]) -> int:
    """Bytes that files take on a disk, in whole pages."""
    return sum(-(-file.stat().st_size // PAGE) * PAGE for file in files)


def full_until_room_is_made(disk: Path, job: list[str], plain: Path, code: int, capsys: Capture, make_room: Callable[[], None]) -> str:
    """The run on a full disk says so and exits with `code`, and ends as any other once there is room. Returns what the first start said."""
    assert main(job) == code
    said = capsys.readouterr().err
    assert said.count("longscan: error: ") == 1
    for part in (f"{disk}/out", "cannot be written", "No space left on device", "Free some space", "run the same command again"):
        assert part in said.partition("longscan: error: ")[2], said
    assert not (disk / "out" / "_SUCCESS").exists()
    make_room()
    assert main(job) == 0
    same_tables(disk / "out", plain)
    left = [path for path in (disk / "out").rglob("*") if ".longscan-" in path.name or path.name in ("tmp", "carries")]
    assert not left
    return said


@pytest.mark.parametrize("case", ["lock", "rows and carries", "last shard"])
def test_a_disk_that_is_full_until_room_is_made(disk: Path, model: Path, source: Path, plain: Path, capsys: Capture, case: str) -> None:
    """The sizes hold what comes before, and surely not what is named: of what comes and goes on the disk, none is counted on."""
    begun = room(path for path in (plain / "_run").rglob("*") if path.name in ("plan.json", "fingerprint.json", "000001"))
    parts = list(plain.glob("*/part-*"))
    size, code = {
        "lock": (PAGE, 2),
        "rows and carries": (40 << 10, 75),
        "last shard": (begun + room([*parts, *plain.glob("_run/manifest/*")]) - PAGE, 75),
    }[case]
    if case != "lock":
        # Each shard opens a file of each table, and none is whole without all of its own.
        smallest = min(room(path for path in parts if path.name == name) for name in {path.name for path in parts})
        assert begun <= 40 << 10 < smallest
    assert remount(disk, f"size={size}")
    full_until_room_is_made(disk, words(model, source, disk / "out", *JOB), plain, code, capsys, lambda: remount(disk, "size=20m"))


def test_a_disk_that_is_full_when_a_shard_is_committed(
    disk: Path, model: Path, source: Path, plain: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are in their places, and there is no room for the line that says so. One shard at a time, so that none makes room."""
    filler = disk / "filler"
    true_report = write.write_report

    def report_on_a_full_disk(output: Location, report: ShardReport) -> None:
        if list(disk.glob("out/_run/manifest/*")):
            until(
                lambda: not set(os.listdir(disk / "out" / "_run" / "carries")) - {f"{report.index:05d}"}
            )  # the other shard's are removed behind it
            fill(filler)
        true_report(output, report)

    monkeypatch.setattr(write, "write_report", report_on_a_full_disk)
    monkeypatch.setattr(run, "SHARDS_AT_ONCE", 1)
    job = words(model, source, disk / "out", *TASK, "output.shard_tokens=2000")  # no document is long enough for a carry

    def make_room() -> None:
        assert len(list(disk.glob("out/_run/manifest/*"))) == 1
        monkeypatch.undo()
        filler.unlink()

    said = full_until_room_is_made(disk, job, plain, 75, capsys, make_room)
    assert re.search(r"_run/manifest/0000\d\.json: cannot be written.*; trying again", said), said


def fill(filler: Path) -> None:
    """Take what room is left on a disk, to the last page."""
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(PAGE))


def test_a_read_only_disk(disk: Path, model: Path, source: Path, capsys: Capture) -> None:
    assert remount(disk, "ro")
    assert main(words(model, source, disk / "out", *JOB)) == 2
    said = capsys.readouterr().err
    for part in (f"longscan: error: {disk}/out", "Read-only file system", "Set output.path to a place that this user may write to"):
        assert part in said


def test_a_disk_that_becomes_read_only(
    disk: Path, model: Path, source: Path, plain: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As disks do on which an error is found, here behind the first shard. The system refuses while a file is open for writing: one shard
    is under way at a time, and it is asked until it does not."""
    true_begin = worker.begin_attempt

    def begin(*arguments: Any, **named: Any) -> int:
        if list(disk.glob("out/_run/manifest/*.json")):
            until(lambda: remount(disk, "ro"))
        return true_begin(*arguments, **named)

    monkeypatch.setattr(worker, "begin_attempt", begin)
    monkeypatch.setattr(run, "SHARDS_AT_ONCE", 1)
    job = words(model, source, disk / "out", *JOB)
    assert main(job) == 75
    said = capsys.readouterr().err
    assert "2 of 3 shards failed" in said
    assert "Read-only file system" in said.partition("longscan: error: ")[2]
    assert not (disk / "out" / "_SUCCESS").exists()
    assert remount(disk, "rw")
    monkeypatch.undo()
    assert main(job) == 0
    same_tables(disk / "out", plain)
    assert success(disk / "out")["documents"] == 60

"""Parquet files with bytes changed, cut out or put in: each planned row comes out once, or the error says what is wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from longscan.pipeline.config import InputConfig
from longscan.pipeline.errors import InputError
from longscan.pipeline.plan.planner import make_plan
from longscan.pipeline.read.find import find_files
from longscan.pipeline.read.reader import Reader
from longscan.pipeline.read.scan import scan
from longscan.pipeline.records import Document, ErrorRow

ROWS = 40
CONFIG = InputConfig(id_column="id", passthrough=["tags"])

Edit = tuple[int, int, bytes]
"""Where, as a fraction of the file in 65536ths counted from its end; how many bytes go; what comes in their place."""

EDITS = st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 9), st.binary(max_size=9)), min_size=1, max_size=4)


def seed_file(folder: Path, kind: str) -> Path:
    """Of each kind of encoding that texts come in."""
    options: dict[str, dict[str, Any]] = {
        "plain": {"use_dictionary": False, "compression": "none"},
        "dictionary": {"compression": "snappy", "write_page_checksum": True},
        "delta": {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}, "compression": "zstd"},
        "pages": {"data_page_version": "2.0", "data_page_size": 64, "compression": "gzip"},
    }
    columns = {"text": [f"text {n % 7} é " * (n % 5) for n in range(ROWS)], "id": list(range(ROWS)), "tags": [["a", None]] * ROWS}
    path = folder / f"{kind}.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=16, **options[kind])
    return path


LONGEST_S = 180.0
"""A page may claim 2^31 values by the format, which Arrow believes and looks for: half a minute on a core."""

KINDS = ("plain", "dictionary", "delta", "pages")


def edited(data: bytes, edits: list[Edit]) -> bytes:
    for place, cut, put in edits:
        at = len(data) - len(data) * place // 65536
        data = data[:at] + put + data[at + cut :]
    return data


def read_all(path: Path) -> int:
    """Scan, plan and read a file; how many rows came. The errors that a user may meet are all that may be raised."""
    try:
        found = scan(find_files(str(path)), CONFIG)
        plan = make_plan(found.files, shard_tokens=1 << 20, limit=10_000)
        reader = Reader(CONFIG, found.passthrough)
        came = 0
        for shard in plan.shards:
            rows = list(reader.read(shard))
            assert len(rows) == shard.num_rows
            for ordinal, row in enumerate(rows):
                assert row.ordinal == ordinal
                assert not isinstance(row, ErrorRow) or row.message
                assert not isinstance(row, Document) or row.text is None or bytes(row.text).decode() is not None
            came += len(rows)
        return came
    except InputError:
        return -1


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(edits=EDITS)
@example(edits=[(0, 0, b"x")])
@example(edits=[(65535, 4, b"")])
def test_a_file_whose_bytes_are_not_as_written(tmp_path: Path, kind: str, edits: list[Edit]) -> None:
    path = seed_file(tmp_path, kind)
    assert read_all(path) == ROWS
    path.write_bytes(edited(path.read_bytes(), edits))
    read_all(path)


def fuzz(folder: Path, seconds: float, seed: int) -> tuple[int, float]:
    """Edits at random, the file of each kept until the next, so that a crash leaves what it came of.

    Returns how many were read, and the seconds that the slowest took.
    """
    chance, count, end = random.Random(seed), 0, time.monotonic() + seconds
    longest = 0.0
    seeds = {kind: seed_file(folder, kind).read_bytes() for kind in KINDS}
    path = folder / "fuzzed.parquet"
    while time.monotonic() < end:
        data = seeds[chance.choice(KINDS)]
        near = 65536 if chance.random() < 0.5 else 20000  # half of them near the footer
        edits = [
            (chance.randrange(near), chance.choice([0, 1, 1, 2, 8]), chance.randbytes(chance.choice([0, 1, 1, 2, 8])))
            for _ in range(chance.randint(1, 3))
        ]
        path.write_bytes(edited(data, edits))
        before = time.monotonic()
        read_all(path)
        longest = max(longest, time.monotonic() - before)
        count += 1
    assert longest < LONGEST_S, f"a file of a few kilobytes took {longest:.0f} s"
    return count, longest


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_ten_minutes_of_it_in_a_process_that_may_crash(tmp_path: Path) -> None:
    """A crash of the reader's library is not longscan's to catch, and must be known: it is counted, and what it came of is shown."""
    seconds, seed = float(os.environ.get("LONGSCAN_FUZZ_S", "600")), int(os.environ.get("LONGSCAN_FUZZ_SEED", "0"))
    code = (
        "import resource, sys; from pathlib import Path; import test_read_fuzz as t; "
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)); "
        f"print('read', *t.fuzz(Path(sys.argv[1]), {seconds}, {seed}))"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    crash = signal.Signals(-done.returncode).name if done.returncode < 0 else done.stderr[-3000:]
    assert done.returncode == 0, f"{crash}; the file is {tmp_path / 'fuzzed.parquet'}"
    assert int(done.stdout.split()[1]) > 100
    print(done.stdout)

"""One document of over twelve million tokens, from Parquet to Parquet: it completes, and its length costs no memory."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import tiny_checkpoint
from longscan.jobs.run import DEMO_FOLDER

PACKAGE = "dict-gcide"
"""Debian's package of a dictionary of 40 MB in one file (GPL: fetched here, never shipped)."""
SHORT_CHARACTERS = 209_000
"""About 100,000 tokens of the demo's tokenizer."""
SLACK_BYTES = 300_000_000

MEASURED = """
import re, sys
from pathlib import Path
from longscan.jobs.run import main
code = main(sys.argv[1:])
# Not getrusage: its peak begins with that of the process that forked this one.
print("PEAK", int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def dictionary(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gcide")
    subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True, capture_output=True)
    subprocess.run(["dpkg", "-x", str(next(folder.glob("*.deb"))), "."], cwd=folder, check=True)
    packed = next(folder.rglob("gcide.dict.dz")).read_bytes()
    return gzip.decompress(packed).decode("utf-8", "replace")


def peak(folder: Path, name: str, text: str) -> tuple[int, dict[str, object]]:
    """Peak resident bytes of the command on one document, and the document's row."""
    pq.write_table(pa.table({"id": [name], "text": [text]}), folder / f"{name}.parquet", use_dictionary=False)
    words = ["task=embed_score", f"model.path={folder / 'model'}", f"input.path={folder / f'{name}.parquet'}", "input.id_column=id"]
    sizes = ["task.score.window_tokens=65536", "task.embedding.window_tokens=65536", "task.score.per_token=true", "engine.lanes=2"]
    command = [sys.executable, "-c", MEASURED, *words, *sizes, f"output.path={folder / name}", "cluster=inprocess"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = pq.read_table(folder / name / "documents").to_pylist()
    return int(done.stdout.rpartition("PEAK")[2]), row


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twelve_million_tokens_need_no_more_memory_than_a_hundred_thousand(dictionary: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", vocab_size=2048, d_model=32, num_layers=2)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / file).write_bytes((DEMO_FOLDER / "model" / file).read_bytes())
    low, short = peak(tmp_path, "short", dictionary[:SHORT_CHARACTERS])
    high, long = peak(tmp_path, "long", dictionary)
    print(json.dumps({"tokens": [short["num_tokens"], long["num_tokens"]], "peak_mib": [low >> 20, high >> 20]}))
    assert 95_000 < int(str(short["num_tokens"])) < 105_000
    assert int(str(long["num_tokens"])) > 12_800_000
    assert long["num_bytes"] == len(dictionary.encode())
    rows = pq.read_table(tmp_path / "long" / "tokens", columns=["token_start"]).num_rows
    assert rows == -(-int(str(long["num_tokens"])) // 8192)
    assert high - low <= SLACK_BYTES, f"{(high - low) >> 20} MiB more"

"""What a bounded look at the input finds: the longest rows, what another may have at most, and the bytes of a token."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import tiny_checkpoint
from longscan.pipeline.config import InputConfig
from longscan.pipeline.read.columns import Columns
from longscan.pipeline.read.find import find_files
from longscan.pipeline.read.sample import Sample, look
from longscan.pipeline.read.scan import scan
from longscan.pipeline.tokenize import load_tokenizer

LENGTHS = [100, 5, 40_000, 7, 9, 10, 300, 200]
"""A giant among short rows, in the first of two row groups."""


def looked(folder: Path, column: pa.Array, *, config: InputConfig | None = None, group: int = 4, **more: int) -> Sample:
    config = config or InputConfig()
    pq.write_table(pa.table({config.tokens_column or "text": column}), folder / "x.parquet", row_group_size=group, compression="none")
    found = scan(find_files(str(folder)), config)
    tokenizer = None if config.tokens_column else load_tokenizer(str(tiny_checkpoint(folder / "model", tokenizer=True)))
    return look(found.files, Columns.of(config), tokenizer, **more)


def test_the_longest_of_all_rows_is_no_mean(tmp_path: Path) -> None:
    found = looked(tmp_path, pa.array(["x" * length for length in LENGTHS]))
    assert (found.longest, found.rows, found.beyond) == (40_000, 8, 0)


def test_what_is_not_looked_at_has_a_bound(tmp_path: Path) -> None:
    found = looked(tmp_path, pa.array(["x" * length for length in LENGTHS]), most_bytes=90)
    assert (found.longest, found.rows) == (100, 1)
    assert 40_000 <= found.beyond < 40_200, "of the first row group, what is left"


def test_a_row_group_of_one_row_is_known_without_a_look(tmp_path: Path) -> None:
    found = looked(tmp_path, pa.array(["x" * length for length in LENGTHS]), group=1, most_bytes=0)
    assert (found.rows, found.beyond) == (8, 0)
    assert 40_000 <= found.longest < 40_100


def test_only_rows_within_the_limit_count(tmp_path: Path) -> None:
    found = looked(tmp_path, pa.array(["x" * length for length in LENGTHS]), limit=2)
    assert (found.longest, found.rows, found.beyond) == (100, 2, 0)


def test_token_ids_count_four_bytes_each(tmp_path: Path) -> None:
    ids = pa.array([[1] * 500, [2] * 30, None], pa.list_(pa.int16()))
    found = looked(tmp_path, ids, config=InputConfig(tokens_column="ids"))
    assert found == Sample(longest=2000, rows=3, beyond=0, bytes_per_token=4.0)


def test_bytes_of_a_token_are_the_tokenizer_s(tmp_path: Path) -> None:
    texts = ["It is a truth, however little known. ", "", None, "naïve " * 30]
    found = looked(tmp_path, pa.array(texts))
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    given = [text for text in texts if text]
    tokens = sum(len(one.ids) for one in tokenizer.encode(given))
    assert found.bytes_per_token == pytest.approx(sum(len(text.encode()) for text in given) / tokens)


@pytest.mark.parametrize("texts", [[], [None, None], [""]])
def test_nothing_to_tokenize(texts: list[str | None], tmp_path: Path) -> None:
    assert looked(tmp_path, pa.array(texts, pa.string())).bytes_per_token is None


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    config = InputConfig()
    pq.write_table(pa.table({"text": ["x" * 50, "y" * 60, "z" * 70]}), tmp_path / "x.parquet", compression="none", use_dictionary=False)
    files = scan(find_files(str(tmp_path)), config).files
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    data[4:30] = bytes(26)
    time = (tmp_path / "x.parquet").stat().st_mtime_ns
    (tmp_path / "x.parquet").write_bytes(data)
    os.utime(tmp_path / "x.parquet", ns=(time, time))
    found = look(files, Columns.of(config), None)
    assert (found.longest, found.rows, found.bytes_per_token) == (0, 0, None)
    assert found.beyond >= 180

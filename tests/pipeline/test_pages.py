"""Small files that stand for a lot: each row comes once, what is too large as an error that names the limit, in bounded memory."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from longscan.pipeline.config import InputConfig
from longscan.pipeline.plan.planner import make_plan
from longscan.pipeline.read.find import find_files
from longscan.pipeline.read.pages import Header, Pages, TooLarge, read_header
from longscan.pipeline.read.parquet import GroupRows, ParquetSource
from longscan.pipeline.read.reader import Reader
from longscan.pipeline.read.scan import scan
from longscan.pipeline.records import Document, ErrorRow

MIB = 1 << 20


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **{"compression": "zstd", "write_statistics": False, "store_schema": False} | options)
    return path


def read(path: Path, **config: Any) -> list[Document | ErrorRow]:
    asked = InputConfig(**config)
    found = scan(find_files(str(path)), asked)
    (shard,) = make_plan(found.files, shard_tokens=1 << 40).shards
    rows = list(Reader(asked, found.passthrough).read(shard))
    assert [row.ordinal for row in rows] == list(range(shard.num_rows))
    return rows


def kinds(rows: list[Document | ErrorRow]) -> list[str]:
    return [row.error if isinstance(row, ErrorRow) else "" for row in rows]


def lengths(path: Path, most_bytes: int) -> list[int]:
    """Rows of each batch of the first row group."""
    (file,) = find_files(str(path))
    source = ParquetSource(file, most_bytes=most_bytes)
    group = GroupRows(source, 0, ["text"])
    sizes: list[int] = []
    while group.row < group.num_rows:
        sizes.append(group.take(group.num_rows).num_rows)
    source.close()
    return sizes


@pytest.mark.parametrize("compression", ["zstd", "gzip", "snappy", "brotli", "lz4"])
def test_a_page_that_expands_beyond_the_limit_is_not_expanded(tmp_path: Path, compression: str) -> None:
    texts = ["a", "b" * (4 * MIB), "c", "d"]
    path = write(tmp_path / "in.parquet", {"text": texts}, row_group_size=1, use_dictionary=False, compression=compression)
    assert path.stat().st_size < 250_000
    rows = read(path, max_read_bytes=2 * MIB)
    assert kinds(rows) == ["", "TooLarge", "", ""]
    said = str(rows[1])
    for part in ("row group 1", f"expected at most {2 * MIB} bytes", "input.max_read_bytes", "higher where this file is to be trusted"):
        assert part in said
    assert kinds(read(path)) == [""] * 4


def test_pages_of_all_columns_count_together(tmp_path: Path) -> None:
    many = pa.array([{f"field{n}": "x" * MIB for n in range(8)}])
    path = write(tmp_path / "in.parquet", {"text": ["a"], "many": many}, use_dictionary=False)
    assert kinds(read(path, passthrough=["many"], max_read_bytes=4 * MIB)) == ["TooLarge"]
    assert kinds(read(path, passthrough=["many"], max_read_bytes=32 * MIB)) == [""]
    assert kinds(read(path, max_read_bytes=4 * MIB)) == [""], "of columns that are not read nothing is"


def test_a_value_that_comes_again_and_again_makes_small_batches(tmp_path: Path) -> None:
    """A dictionary's long value behind short ones: a batch of as many rows as before would take a hundred times the file's pages."""
    values = pa.array(["x", "y" * MIB])
    numbers = pa.array(np.repeat([0, 1, 0], [300, 200, 50]).astype(np.int32))
    text = pa.DictionaryArray.from_arrays(numbers, values)
    path = write(tmp_path / "in.parquet", {"text": text}, dictionary_pagesize_limit=1 << 30)
    assert path.stat().st_size < 5000
    sizes = lengths(path, 8 * MIB)
    assert sum(sizes) == 550
    assert max(sizes) == 7
    rows = read(path, max_read_bytes=8 * MIB)
    assert kinds(rows) == [""] * 550
    assert len(rows[300].text or b"") == MIB


def test_values_that_share_a_beginning_make_small_batches(tmp_path: Path) -> None:
    texts = ["x"] * 300 + ["y" * MIB] * 40 + ["z"]
    options = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}, "data_page_size": 64 * MIB}
    path = write(tmp_path / "in.parquet", {"text": texts}, **options)
    assert path.stat().st_size < 20_000
    assert max(lengths(path, 8 * MIB)) <= 8
    assert [len(row.text or b"") for row in read(path, max_read_bytes=8 * MIB) if isinstance(row, Document)] == list(map(len, texts))


def test_a_list_without_end_is_not_read(tmp_path: Path) -> None:
    count = 3_000_000
    ids = pa.ListArray.from_arrays(pa.array([0, 2, 2 + count, 4 + count], pa.int32()), pa.array(np.zeros(4 + count, np.int32)))
    path = write(tmp_path / "in.parquet", {"ids": ids}, row_group_size=1)
    assert path.stat().st_size < 10_000
    assert kinds(read(path, tokens_column="ids", max_read_bytes=16 * MIB)) == ["", "TooLarge", ""]
    assert kinds(read(path, tokens_column="ids", max_read_bytes=64 * MIB)) == [""] * 3


def test_memory_of_a_file_that_would_take_much_more(tmp_path: Path) -> None:
    """The reader alone, in a process of its own: from 10 kB on disk, a page of 256 MiB."""
    text = pa.array(["a" * (1 << 28)], pa.large_string())
    path = write(tmp_path / "in.parquet", {"text": text}, use_dictionary=False)
    del text
    assert path.stat().st_size < 20_000
    code = (
        "import resource, sys; from pathlib import Path; import test_pages as t; t.read(Path(sys.argv[1]), max_read_bytes=1 << 20); "
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; before = peak(); "
        "rows = t.read(Path(sys.argv[1]), max_read_bytes=1 << 27); print(peak() - before, *t.kinds(rows))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    grown, kind = done.stdout.split()
    assert kind == "TooLarge"
    assert int(grown) < 20_000, f"{grown} kB more"


def varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def page(kind: int, size: int, body: bytes, *, values: int = 1, encoding: int = 0, statistics: bytes = b"") -> bytes:
    """A page as it lies in a file, in Thrift's compact protocol."""

    def number(step: int, value: int) -> bytes:
        return bytes([step << 4 | 5]) + varint(value << 1)

    inner = number(1, values) + number(1, encoding) + number(1, 3) + number(1, 3)
    inner += b"\x1c\x18" + varint(len(statistics)) + statistics + b"\0" if statistics else b""
    field = b"\x2c" if kind == 0 else b"\x4c"
    return number(1, kind) + number(1, size) + number(1, len(body)) + field + inner + b"\0\0" + body


HEADERS = st.lists(st.tuples(st.sampled_from([0, 2]), st.binary(max_size=40), st.integers(1, 1000), st.binary(max_size=300)), max_size=5)


@given(pages=HEADERS, steps=st.lists(st.integers(1, 97), min_size=1))
def test_headers_are_seen_however_the_file_is_read(pages: list[tuple[int, bytes, int, bytes]], steps: list[int]) -> None:
    """A page that is too large is stopped at, wherever the reads of a column end; smaller ones pass."""
    data = b"".join(page(kind, len(body), body, values=values, statistics=more) for kind, body, values, more in pages)
    data += page(0, 50_000, b"!" * 10)
    file = Pages(io.BytesIO(b"PAR1" + data), 49_000)
    file.seek(4)
    file.watch(lists=False)
    with pytest.raises(TooLarge, match="50000 of them"):
        list(iter(lambda: file.read(steps[file.tell() % len(steps)]), b""))
    assert file.tell() > 4 + len(data) - 10 - 30 - 1


def test_a_header_says_what_was_written(tmp_path: Path) -> None:
    path = write(tmp_path / "in.parquet", {"text": ["a", "b", "a"] * 100}, use_dictionary=True, compression="none")
    chunk = pq.read_metadata(path).row_group(0).column(0)
    data = path.read_bytes()
    first = read_header(data, chunk.dictionary_page_offset)
    assert (first.kind, first.size, first.num_values) == (2, 10, 2)
    second = read_header(data, chunk.dictionary_page_offset + first.num_bytes + first.compressed)
    assert (second.kind, second.num_values, second.encoding) == (0, 300, 8)
    assert first.num_bytes + first.compressed + second.num_bytes + second.compressed == chunk.total_compressed_size


def test_a_page_of_values_that_cannot_be() -> None:
    data = page(0, 10, b"0123456789", values=(1 << 31) - 1)
    file = Pages(io.BytesIO(data), 1 << 32)
    file.watch(lists=False)
    with pytest.raises(TooLarge, match="claims 2147483647 values at byte 0"):
        file.read(100)


@pytest.mark.parametrize("data", [b"\x1d" * 20, page(0, 5, b"12345")[:3] + b"\x03" + page(0, 5, b"12345")[4:]], ids=["no type", "negative"])
def test_what_is_no_header_ends_the_column(data: bytes) -> None:
    """At once if there is more to come; what nobody asks for, behind the last page, is nobody's concern."""
    file = Pages(io.BytesIO(data + bytes(100)), 1 << 20)
    file.watch(lists=False)
    assert file.read(len(data)) == data
    with pytest.raises(OSError, match="expected a page header at byte"):
        file.read(1)


def test_numbers_beyond_32_bits_are_taken_as_arrow_takes_them() -> None:
    data = b"\x15\x00\x15" + varint((1 << 33) + 14) + b"\x15" + varint(6) + b"\x00"
    assert read_header(data, 0) == Header(len(data), 0, 7, 3, 0, 0)

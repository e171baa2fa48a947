"""Every planned row comes out once, in order: a document, or what is wrong with it."""

from __future__ import annotations

import datetime
import decimal
import gc
import os
import subprocess
import sys
import textwrap
import uuid
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from longscan.pipeline.config import InputConfig
from longscan.pipeline.errors import InputError
from longscan.pipeline.plan.planner import make_plan
from longscan.pipeline.read import parquet
from longscan.pipeline.read.find import find_files
from longscan.pipeline.read.parquet import BATCH_ROWS, GroupRows
from longscan.pipeline.read.reader import Reader
from longscan.pipeline.read.scan import scan
from longscan.pipeline.records import Document, ErrorRow
from longscan.pipeline.shards import Piece, Shard

TEXTS = ["one", "", "zwei ünïcödé 日本 🙂", "a\x00b", "four " * 1000]


def write(path: Path, columns: dict[str, Any] | pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def shards(path: Path | str, config: InputConfig, shard_tokens: int = 1 << 40) -> tuple[Reader, tuple[Shard, ...]]:
    found = scan(find_files(str(path)), config)
    return Reader(config, found.passthrough), make_plan(found.files, shard_tokens=shard_tokens).shards


def rows(path: Path | str, **config: Any) -> list[Document | ErrorRow]:
    reader, (shard,) = shards(path, InputConfig(**config))
    found = list(reader.read(shard))
    assert [row.ordinal for row in found] == list(range(shard.num_rows))
    return found


def documents(path: Path | str, **config: Any) -> list[Document]:
    found = rows(path, **config)
    assert all(isinstance(row, Document) for row in found), found
    return [row for row in found if isinstance(row, Document)]


def text(document: Document | ErrorRow) -> str:
    assert isinstance(document, Document)
    assert document.text is not None
    return bytes(document.text).decode()


def kinds(found: list[Document | ErrorRow]) -> list[str]:
    return ["" if isinstance(row, Document) else row.error for row in found]


TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int32(), pa.large_string()),
]


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_every_type_of_text(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array([*TEXTS, None, "last", "one"], pa.string())
    column = column.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else column.cast(kind)
    path = write(tmp_path / "x.parquet", {"text": column}, row_group_size=3)
    found = rows(path)
    assert kinds(found) == [""] * 5 + ["NullText"] + [""] * 2
    assert [text(row) for row in found if isinstance(row, Document)] == [*TEXTS, "last", "one"]
    first, missing = found[0], found[5]
    assert isinstance(first, Document)
    assert isinstance(missing, ErrorRow)
    assert first.text is not None
    assert first.text.format == "B", "unsigned bytes"
    assert (first.doc_id, first.file, first.row, first.token_ids) == ("x.parquet#0", "x.parquet", 0, None)
    assert missing == ErrorRow(5, "x.parquet#5", "x.parquet", 5, "read", "NullText", "expected a text, found null")


def test_a_column_of_nulls_only(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"text": pa.nulls(2), "ids": pa.nulls(2)})
    assert kinds(rows(path)) == ["NullText"] * 2
    assert kinds(rows(path, tokens_column="ids")) == ["NullTokenIds"] * 2


def test_files_groups_and_ordinals(tmp_path: Path) -> None:
    write(tmp_path / "in" / "b" / "2.parquet", {"text": ["3", "4", "5"]}, row_group_size=2)
    write(tmp_path / "in" / "a.parquet", {"text": ["0", "1", "2"]}, row_group_size=1)
    write(tmp_path / "in" / "a0.parquet", {"text": pa.array([], pa.string())})
    found = documents(tmp_path / "in")
    assert [text(row) for row in found] == list("012345")
    assert [row.doc_id for row in found] == [f"a.parquet#{i}" for i in range(3)] + [f"b/2.parquet#{i}" for i in range(3)]


def test_a_remote_file(tmp_path: Path) -> None:
    import fsspec

    uri = f"memory://{uuid.uuid4().hex}/x.parquet"
    path = write(tmp_path / "x.parquet", {"text": TEXTS})
    with fsspec.open(uri, "wb") as file:
        file.write(path.read_bytes())
    assert [text(row) for row in documents(uri)] == TEXTS


@pytest.mark.parametrize("name", ["a b=1,[2]{3}#~?.parquet", "日本.parquet", "a::b.parquet", "x:y.parquet"])
def test_a_file_of_any_name(tmp_path: Path, name: str) -> None:
    write(tmp_path / "plain.parquet", {"text": ["x"]}).rename(tmp_path / name)
    assert [row.doc_id for row in documents(tmp_path / name)] == [f"{name}#0"]


def test_a_column_with_a_dot_beside_a_struct(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"a": [{"b": 1}], "a.b": ["here"], "a.c": ["there"]})
    assert [text(row) for row in documents(path, text_column="a.b")] == ["here"]


UTC = datetime.UTC
IDS: list[tuple[pa.DataType, Any, str]] = [
    (pa.string(), "née", "née"),
    (pa.large_string(), "x/../y", "x/../y"),
    (pa.string_view(), "v", "v"),
    (pa.binary(), b"bytes", "bytes"),
    (pa.int64(), -(2**63), str(-(2**63))),
    (pa.uint64(), 2**64 - 1, str(2**64 - 1)),
    (pa.float64(), 0.5, "0.5"),
    (pa.bool_(), True, "true"),
    (pa.date32(), datetime.date(2024, 1, 31), "2024-01-31"),
    (pa.timestamp("s"), datetime.datetime(2024, 1, 31, 12, 30), "2024-01-31 12:30:00"),
    (pa.decimal128(9, 2), decimal.Decimal("1234.50"), "1234.50"),
    (pa.binary(2), b"\x00\xff", "00ff"),
    (pa.dictionary(pa.int8(), pa.string()), "d", "d"),
]


@pytest.mark.parametrize(("kind", "value", "expected"), IDS, ids=[str(kind) for kind, _, _ in IDS])
def test_ids_of_every_type_are_strings(tmp_path: Path, kind: pa.DataType, value: Any, expected: str) -> None:
    column = pa.array([value, None], kind.value_type if pa.types.is_dictionary(kind) else kind)
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column
    found = rows(write(tmp_path / "x.parquet", {"text": ["a", "b"], "key": column}), id_column="key")
    assert isinstance(found[0], Document)
    assert found[0].doc_id.removesuffix(".000") == expected
    assert found[1] == ErrorRow(1, None, "x.parquet", 1, "read", "NullId", "expected an id, found null")


def test_an_error_keeps_the_id_that_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"text": [None, "b", None], "key": [7, 7, None]})
    found = rows(path, id_column="key")
    assert [row.doc_id for row in found] == ["7", "7", None]
    assert kinds(found) == ["NullText", "", "NullId"]


BAD_UTF8 = [b"\xff", b"ok \xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"x" * 70_000 + b"\xe2\x82", b"\xf0\x9f\x99" + b"x"]


@pytest.mark.parametrize("kind", ["plain", "dictionary"])
def test_bytes_that_are_no_utf8_are_the_rows_own_error(tmp_path: Path, kind: str) -> None:
    good = ["é".encode() * 50_000, b"", "🙂".encode()]
    column = pa.array([*good, *BAD_UTF8, b"after"], pa.binary())
    found = rows(write(tmp_path / "x.parquet", {"text": column.dictionary_encode() if kind == "dictionary" else column}))
    assert kinds(found) == [""] * 3 + ["InvalidUtf8"] * len(BAD_UTF8) + [""]
    messages = [row.message for row in found if isinstance(row, ErrorRow)]
    assert messages[0] == "expected UTF-8, found byte 0xff at 0 of 1 (invalid start byte)"
    assert messages[1].startswith("expected UTF-8, found byte 0xc0 at 3 of 5")
    assert "at 70000 of 70002" in messages[4]


def test_an_id_that_is_no_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"text": ["a", "b"], "key": pa.array([b"ok", b"\xff"], pa.binary())})
    found = rows(path, id_column="key")
    assert kinds(found) == ["", "InvalidUtf8"]
    assert found[1].doc_id is None


ID_TYPES = [pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.uint64()]
LIST_TYPES = [pa.list_, pa.large_list]


@pytest.mark.parametrize("kind", [make(item) for make in LIST_TYPES for item in ID_TYPES], ids=str)
def test_token_ids_of_every_integer(tmp_path: Path, kind: pa.DataType) -> None:
    path = write(tmp_path / "x.parquet", {"ids": pa.array([[1, 2, 127], [], None, [0], [5, None]], kind)}, row_group_size=2)
    found = rows(path, tokens_column="ids")
    assert kinds(found) == ["", "", "NullTokenIds", "", "InvalidTokenIds"]
    lists = [row.token_ids for row in found if isinstance(row, Document)]
    assert [ids is not None and ids.dtype == np.int32 for ids in lists] == [True] * 3
    assert [ids.tolist() for ids in lists if ids is not None] == [[1, 2, 127], [], [0]]
    assert all(isinstance(row, ErrorRow) or row.text is None for row in found)


def test_token_ids_in_lists_of_one_length(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"ids": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))})
    assert [row.token_ids.tolist() for row in documents(path, tokens_column="ids") if row.token_ids is not None] == [[1, 2], [3, 4]]


def test_token_ids_out_of_range(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"ids": pa.array([[0, 2**31 - 1], [-1, 5], [2**31], [2**40, -7]], pa.list_(pa.int64()))})
    found = rows(path, tokens_column="ids")
    assert kinds(found) == ["", "InvalidTokenIds", "InvalidTokenIds", "InvalidTokenIds"]
    assert "from 0 to 2147483647, found -1" in str(found[1])
    assert "found 2147483648" in str(found[2])


PASSTHROUGH = {
    "number": pa.array([1, 2, None], pa.int16()),
    "name": pa.array(["a", None, "c"]),
    "tags": pa.array([["x", "y"], [], None]),
    "nested": pa.array([{"a": 1, "b": [{"c": "z"}]}, None, {"a": None, "b": []}]),
    "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int32())),
    "when": pa.array([datetime.datetime(2024, 1, 1, tzinfo=UTC)] * 3, pa.timestamp("us", "UTC")),
    "price": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("-2.00")], pa.decimal128(12, 2)),
    "kind": pa.array(["u", "v", "u"]).dictionary_encode(),
    "vector": pa.array([[1, 2], [3, 4], None], pa.list_(pa.float32(), 2)),
    "blob": pa.array([b"\xff\x00", b"", None]),
}


def test_passthrough_columns_of_any_type(tmp_path: Path) -> None:
    table = pa.table({"text": ["0", "1", "2"], **PASSTHROUGH})
    found = documents(write(tmp_path / "x.parquet", table, row_group_size=2), passthrough=list(PASSTHROUGH))
    assert all(row.passthrough.num_rows == 1 for row in found)
    together = pa.Table.from_batches([row.passthrough for row in found])
    assert together.schema.names == list(PASSTHROUGH)
    assert together.to_pylist() == table.select(list(PASSTHROUGH)).to_pylist()
    assert [row.passthrough.num_columns for row in documents(tmp_path / "x.parquet")] == [0] * 3


def test_the_text_itself_may_pass_through(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"text": ["a", "b"]})
    assert [row.passthrough.to_pylist() for row in documents(path, passthrough=["text"])] == [[{"text": "a"}], [{"text": "b"}]]


def test_passthrough_of_another_type_is_cast_where_it_fits(tmp_path: Path) -> None:
    write(tmp_path / "in" / "0.parquet", {"text": ["a"], "n": pa.array([1], pa.int16())})
    write(tmp_path / "in" / "1.parquet", {"text": ["b", "c"], "n": pa.array([2, 70_000], pa.int64())})
    write(tmp_path / "in" / "2.parquet", {"text": ["d"], "n": pa.array([[1]])})
    found = rows(tmp_path / "in", passthrough=["n"])
    assert kinds(found) == ["", "", "InvalidPassthrough", "InvalidPassthrough"]
    assert isinstance(found[1], Document)
    assert found[1].passthrough.to_pydict() == {"n": [2]}
    assert "expected n as int16, as in the first file" in str(found[2])


def test_passthrough_that_is_no_utf8_is_the_rows_own_error(tmp_path: Path) -> None:
    bad = pa.array([b"good", b"\xff"], pa.binary()).view(pa.string())
    found = rows(write(tmp_path / "x.parquet", {"text": ["a", "b"], "note": bad}), passthrough=["note"])
    assert kinds(found) == ["", "InvalidPassthrough"]


def test_a_file_of_another_schema_gives_error_rows_that_name_its_columns(tmp_path: Path) -> None:
    write(tmp_path / "in" / "0.parquet", {"text": ["a"]})
    write(tmp_path / "in" / "1.parquet", {"body": ["b", "c"], "n": [1, 2]})
    write(tmp_path / "in" / "2.parquet", {"text": [1, 2]})
    write(tmp_path / "in" / "3.parquet", {"text": ["d"]})
    found = rows(tmp_path / "in")
    assert kinds(found) == ["", "WrongColumns", "WrongColumns", "WrongColumns", "WrongColumns", ""]
    assert "input.text_column=text: found no such column; the columns are body, n" in str(found[1])
    assert "expected strings, found int64" in str(found[3])
    assert isinstance(found[2], ErrorRow)
    assert (found[2].file, found[2].row, found[2].doc_id) == ("1.parquet", 1, "1.parquet#1")


def test_a_column_name_that_comes_twice(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pytest.raises(InputError, match="found 2 columns of this name"):
        rows(write(tmp_path / "x.parquet", table))


def damaged(path: Path, row_group: int, at: float) -> Path:
    """Overwrite bytes of the first column of a row group, at a fraction of its length; version and size stay."""
    chunk = pq.read_metadata(path).row_group(row_group).column(0)
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(chunk.data_page_offset + int(chunk.total_compressed_size * at))
        file.write(b"\x5a\xa5" * 40)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return path


def incompressible(rows: int, size: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [bytes(rng.integers(97, 123, size, dtype=np.uint8)).decode() for _ in range(rows)]


@pytest.mark.parametrize("checksum", [False, True], ids=["plain", "crc"])
def test_a_damaged_page_costs_the_rows_from_it_on_and_no_other_group(tmp_path: Path, checksum: bool) -> None:
    texts = incompressible(300, 3000)
    options = {"use_dictionary": False, "compression": "zstd", "data_page_size": 30_000, "write_batch_size": 1}
    path = write(tmp_path / "x.parquet", {"text": texts}, row_group_size=100, write_page_checksum=checksum, **options)
    config = InputConfig()
    reader, (shard,) = shards(path, config)
    damaged(path, 1, 0.5)
    found = list(reader.read(shard))
    assert [row.ordinal for row in found] == [row.row for row in found] == list(range(300))
    wrong = [row for row in found if isinstance(row, ErrorRow)]
    assert {row.error for row in wrong} == {"UnreadableRows"}
    first = wrong[0].ordinal
    assert 140 <= first <= 150, "rows of the pages before the damaged one are read"
    assert [row.ordinal for row in wrong] == list(range(first, 200))
    assert [text(row) for row in found if isinstance(row, Document)] == texts[:first] + texts[200:]
    assert "row group 1 is damaged from here on" in wrong[0].message


def test_a_damaged_page_in_a_group_that_is_cut(tmp_path: Path) -> None:
    options = {"use_dictionary": False, "data_page_size": 30_000, "write_batch_size": 1, "write_page_checksum": True}
    path = write(tmp_path / "x.parquet", {"text": incompressible(100, 3000)}, **options)
    reader, parts = shards(path, InputConfig(), shard_tokens=10_000)
    assert len(parts) > 3
    damaged(path, 0, 0.5)
    found = [row for shard in parts for row in reader.read(shard)]
    assert [row.row for row in found] == list(range(100))
    assert kinds(found)[:40] == [""] * 40
    assert set(kinds(found)[50:]) == {"UnreadableRows"}


def test_a_file_without_a_footer_is_one_error_row(tmp_path: Path) -> None:
    write(tmp_path / "in" / "0.parquet", {"text": ["a"]})
    (tmp_path / "in" / "1.parquet").write_bytes(b"PAR1 but not for long")
    (tmp_path / "in" / "2.parquet").write_bytes(b"")
    write(tmp_path / "in" / "3.parquet", {"text": ["b"]})
    found = rows(tmp_path / "in", id_column=None)
    assert kinds(found) == ["", "UnreadableFile", "UnreadableFile", ""]
    assert isinstance(found[1], ErrorRow)
    assert (found[1].file, found[1].row, found[1].doc_id) == ("1.parquet", None, None)
    assert "expected a Parquet file" in found[1].message
    assert "0 bytes" in str(found[2])


def test_a_file_that_changed_since_the_plan(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"text": ["a", "b"]})
    reader, (shard,) = shards(path, InputConfig())
    os.utime(path, ns=(1, 1))
    found = list(reader.read(shard))
    assert kinds(found) == ["FileChanged"] * 2
    assert "run it again with a new output" in str(found[0])


def test_a_file_that_changes_while_it_is_read_fails_the_shard(tmp_path: Path) -> None:
    """Its rows may be of two versions: none of them counts, and the next attempt finds a file that is not the planned one."""
    path = write(tmp_path / "x.parquet", {"text": ["a", "b"]})
    reader, (shard,) = shards(path, InputConfig())
    rows = reader.read(shard)
    next(rows)
    with path.open("r+b") as file:
        file.seek(4)
        file.write(b"?")
    os.utime(path, ns=(1, 1))
    with pytest.raises(InputError, match=r"x\.parquet: changed while it was read"):
        list(rows)
    assert kinds(list(reader.read(shard))) == ["FileChanged"] * 2


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"text": ["a", "b"]})
    reader, (shard,) = shards(path, InputConfig())
    rows = reader.read(shard)
    found = [next(rows)]
    write(tmp_path / "y.parquet", {"text": ["c", "d", "e"]}).replace(path)
    assert kinds(found + list(rows)) == ["", ""]
    assert kinds(list(reader.read(shard))) == ["FileChanged"] * 2


def test_a_document_that_is_longer_than_allowed_is_an_error_row(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"text": ["é" * 5, "e" * 11, ""], "ids": [[1, 2], [1, 2, 3], []]})
    for config, wrong in ((InputConfig(max_document_bytes=10), 11), (InputConfig(tokens_column="ids", max_document_bytes=8), 12)):
        reader, (shard,) = shards(path, config)
        found = list(reader.read(shard))
        assert kinds(found) == ["", "TooLong", ""]
        assert f"expected at most {config.max_document_bytes} bytes (input.max_document_bytes), found {wrong}" in str(found[1])


def test_a_file_that_is_gone_fails_the_shard_and_not_its_rows(tmp_path: Path) -> None:
    """It may be a disk that is not mounted: another attempt, or another worker, may find it."""
    path = write(tmp_path / "x.parquet", {"text": ["a", "b"]})
    reader, (shard,) = shards(path, InputConfig())
    path.unlink()
    with pytest.raises(InputError, match=r"x\.parquet: cannot be opened: .*No such file"):
        list(reader.read(shard))


def test_a_network_that_breaks_fails_the_shard_and_not_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", {"text": incompressible(200, 100_000)}, row_group_size=100)
    reader, (shard,) = shards(path, InputConfig())
    found = reader.read(shard)
    next(found)

    class Broken(pq.ParquetFile):  # type: ignore[misc]
        def iter_batches(self, *_: Any, **__: Any) -> Iterator[Any]:
            raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", Broken.iter_batches)
    with pytest.raises(InputError, match=r"x\.parquet: row group 1 cannot be read: .*Connection reset"):
        list(found)


def batch_sizes(path: Path) -> list[int]:
    (file,) = find_files(str(path))
    source = parquet.ParquetSource(file)
    group = parquet.GroupRows(source, 0, ["text"])
    sizes: list[int] = []
    while group.row < group.num_rows:
        sizes.append(group.take(group.num_rows).num_rows)
    source.close()
    return sizes


def test_short_rows_come_by_the_hundred(tmp_path: Path) -> None:
    """Guards the way in which the rows of a batch are set while a row group is read."""
    sizes = batch_sizes(write(tmp_path / "x.parquet", {"text": ["short"] * 5000}))
    assert sum(sizes) == 5000
    assert sizes[:9] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert max(sizes) == parquet.BATCH_ROWS


def test_giants_come_alone(tmp_path: Path) -> None:
    texts = ["short"] * 1000 + ["giant" * 300_000] * 60 + ["short"] * 1000
    sizes = batch_sizes(write(tmp_path / "x.parquet", {"text": texts}, use_dictionary=False, write_batch_size=1))
    assert sum(sizes) == 2060
    assert max(sizes) == parquet.GIANT_GROUP_ROWS
    assert sizes.count(1) >= 60 - parquet.GIANT_GROUP_ROWS


def test_one_reader_reads_a_cut_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{i} " + "x" * 1000 for i in range(1000)]
    reader, parts = shards(write(tmp_path / "x.parquet", {"text": texts}), InputConfig(), shard_tokens=30_000)
    assert len(parts) > 4
    assert [shard.reads_on for shard in parts] == [False] + [True] * (len(parts) - 1)
    opened: list[str] = []
    init = parquet.ParquetSource.__init__

    def counted(self: Any, file: Any, **limits: Any) -> None:
        opened.append(file.name)
        init(self, file, **limits)

    monkeypatch.setattr(parquet.ParquetSource, "__init__", counted)
    found = [row for shard in parts for row in reader.read(shard)]
    assert [text(row) for row in found] == texts
    assert [row.row for row in found] == list(range(1000))
    assert len(opened) == 1
    again = [text(row) for row in reader.read(parts[2])]
    assert again == texts[parts[2].pieces[0].start : parts[2].pieces[0].stop], "and any of them alone"
    reader.close()


def test_a_reader_left_early_closes_its_file(tmp_path: Path) -> None:
    reader, (shard,) = shards(write(tmp_path / "x.parquet", {"text": TEXTS}), InputConfig())
    found = reader.read(shard)
    next(found)
    handles = Path("/proc/self/fd")
    before = [os.readlink(handle) for handle in handles.iterdir() if handle.is_symlink() and os.path.exists(handle)]
    assert any(name.endswith("x.parquet") for name in before)
    found.close()  # type: ignore[attr-defined]
    after = [os.readlink(handle) for handle in handles.iterdir() if handle.is_symlink() and os.path.exists(handle)]
    assert not any(name.endswith("x.parquet") for name in after)


def test_a_shard_without_rows(tmp_path: Path) -> None:
    assert rows(write(tmp_path / "x.parquet", {"text": pa.array([], pa.string())})) == []


@dataclass
class Burden:
    """What reading rows asks of the machine, whatever its speed."""

    calls: int = 0
    """Of functions, Python's and C's, in this thread."""
    batches: int = 0
    num_bytes: int = 0
    """Of all batches, as Arrow gave them."""


def burden(reader: Reader, shard: Shard, expected: Sequence[str]) -> Burden:
    """Of reading a shard whose rows are `expected`. They are read a second time to be weighed, which takes calls as well."""
    found, load = Burden(), GroupRows._load

    def weighed(rows: GroupRows) -> pa.RecordBatch:
        batch = load(rows)
        found.batches += 1
        found.num_bytes += batch.nbytes
        return batch

    def count(_frame: object, event: str, _argument: object) -> None:
        found.calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        deque(reader.read(shard), maxlen=0)
    finally:
        sys.setprofile(before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupRows, "_load", weighed)
        assert [text(row) for row in reader.read(shard)] == list(expected)
    return found


def test_millions_of_short_rows_are_no_burden(tmp_path: Path) -> None:
    texts = ["a short text"] * 50_000
    reader, (shard,) = shards(write(tmp_path / "x.parquet", {"text": texts}), InputConfig())
    found = burden(reader, shard, texts)
    assert found.calls < 25 * len(texts), "16 a row"
    assert found.batches < 1.1 * len(texts) / BATCH_ROWS


def test_dictionaries_of_many_texts_are_no_burden_either(tmp_path: Path) -> None:
    """Arrow would give all values of the row group with every batch."""
    texts = [f"{i} " + "word " * 40 for i in range(20_000)]
    reader, (shard,) = shards(write(tmp_path / "x.parquet", {"text": pa.array(texts).dictionary_encode()}), InputConfig())
    found = burden(reader, shard, texts)
    assert found.calls < 25 * len(texts), "16 a row"
    assert found.batches < 1.2 * len(texts) / BATCH_ROWS
    assert found.num_bytes < 1.1 * sum(map(len, texts))


def test_giants_in_a_dictionary_do_not_pile_up(tmp_path: Path) -> None:
    texts = incompressible(12, 2_000_000)
    path = write(tmp_path / "x.parquet", {"text": pa.array(texts).dictionary_encode()}, use_dictionary=False, write_batch_size=1)
    reader, (shard,) = shards(path, InputConfig())
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    for row, expected in zip(reader.read(shard), texts, strict=True):
        assert text(row) == expected
        assert pool.bytes_allocated() - before < 12_000_000


def test_other_columns_keep_their_types_beside_a_dictionary(tmp_path: Path) -> None:
    columns = {
        "text": pa.array(["a", "b"]).dictionary_encode(),
        "lasts": pa.array([5, None], pa.duration("ms")),
        "large": pa.array(["x", None], pa.large_string()),
        "vector": pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2)),
        "kind": pa.array([None, "k"]).dictionary_encode(),
    }
    names = list(columns)
    found = documents(write(tmp_path / "x.parquet", columns), passthrough=names)
    expected = [pa.string(), pa.duration("ms"), pa.large_string(), pa.list_(pa.float32(), 2), pa.string()]
    assert [kind.equals(want) for kind, want in zip(found[0].passthrough.schema.types, expected, strict=True)] == [True] * 5
    assert [row.passthrough.to_pylist()[0] for row in found] == pa.table(columns).to_pylist()


def test_a_document_keeps_no_more_than_its_batch(tmp_path: Path) -> None:
    reader, (shard,) = shards(write(tmp_path / "x.parquet", {"text": incompressible(8, 2_000_000)}, use_dictionary=False), InputConfig())
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    kept = [row for row in reader.read(shard) if row.ordinal == 3]
    gc.collect()
    assert len(text(kept[0])) == 2_000_000
    assert pool.bytes_allocated() - before < 3_000_000


GIANT = """
    import re, sys
    from pathlib import Path
    from longscan.pipeline.config import InputConfig
    from longscan.pipeline.read.find import find_files
    from longscan.pipeline.read.reader import Reader
    from longscan.pipeline.records import Document
    from longscan.pipeline.shards import Piece, Shard

    (file,) = find_files(sys.argv[1])
    read = 0
    for row in Reader(InputConfig()).read(Shard(0, 1, (Piece(file, 0, 0, 50, 0),), 0)):
        assert isinstance(row, Document), row
        read += len(row.text)
    # Not getrusage: its peak begins with that of the process that forked this one.
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    print(read, int(peak[1]) * 1024)
"""


def read_alone(path: Path) -> tuple[int, int]:
    """Bytes of text in a file of 50 rows, and the peak of a process that only reads them."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(GIANT), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read, peak = map(int, done.stdout.split())
    return read, peak


def test_a_process_that_only_reads(tmp_path: Path) -> None:
    """What the giant below is measured with, every time."""
    pq.write_table(pa.table({"text": ["some text"] * 50}), tmp_path / "small.parquet")
    read, peak = read_alone(tmp_path / "small.parquet")
    assert read == 9 * 50
    assert peak <= 0.6e9


@pytest.mark.slow
def test_fifty_documents_of_45_mb_in_one_row_group(tmp_path: Path) -> None:
    """2.25 GB in one row group: in a process of its own, reading takes at most 0.6 GB at its peak."""
    path = tmp_path / "giant.parquet"
    size, count = 45_000_000, 50
    few = [pa.array(incompressible(1, size - i)) for i in range(5)]
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), use_dictionary=False, write_batch_size=1) as writer:
        writer.write_table(pa.table({"text": pa.chunked_array(few * (count // 5))}), row_group_size=count)
    assert pq.read_metadata(path).num_row_groups == 1
    read, peak = read_alone(path)
    path.unlink()
    print(f"peak {peak / 1e9:.3f} GB")
    assert read == sum(size - i for i in range(5)) * (count // 5)
    assert peak <= 0.6e9


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("most", [None, 1 << 30])
def test_a_text_of_two_gigabytes(tmp_path: Path, most: int | None) -> None:
    """As long as a page can be. In a process of its own, for its peak of memory: the page and the value, which Arrow copies out of it."""
    size = (1 << 31) - (1 << 20)
    code = (
        "import resource, sys; from pathlib import Path; import test_read as t; "
        "t.pq.write_table(t.pa.table({'text': t.pa.array(['a' * int(sys.argv[2]), 'short'], t.pa.large_string())}), "
        "sys.argv[1], use_dictionary=False, compression='zstd', write_statistics=False)"
    )
    look = (
        "import resource, sys; from pathlib import Path; import test_read as t; "
        "found = t.rows(Path(sys.argv[1]), max_document_bytes=int(sys.argv[2]) or None); "
        "print(*[row.error if isinstance(row, t.ErrorRow) else len(row.text) for row in found], "
        "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    path = str(tmp_path / "in.parquet")
    said = []
    for words in ([code, path, str(size)], [look, path, str(most or 0)]):
        done = subprocess.run([sys.executable, "-c", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        said = done.stdout.split()
    first, second, peak = said
    assert (first, second) == ("TooLong" if most else str(size), "5")
    print(f"peak {int(peak) / 1e6:.2f} GB")
    assert int(peak) < 5.2e6


def test_pieces_of_one_file_share_its_footer(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"text": [str(i) for i in range(10)]}, row_group_size=2)
    reader, (shard,) = shards(path, InputConfig())
    assert len(shard.pieces) == 5
    last = replace(shard, pieces=tuple(Piece(piece.file, piece.row_group, 0, 1, piece.first_row) for piece in shard.pieces))
    assert [text(row) for row in reader.read(last)] == ["0", "2", "4", "6", "8"]


def test_views_outlive_the_reader(tmp_path: Path) -> None:
    reader, (shard,) = shards(write(tmp_path / "x.parquet", {"text": TEXTS}), InputConfig())
    alive = weakref.ref(reader)
    kept = list(reader.read(shard))
    del reader
    gc.collect()
    assert alive() is None
    assert [text(row) for row in kept] == TEXTS

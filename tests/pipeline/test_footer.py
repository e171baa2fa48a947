"""Sizes from a footer, equal to Arrow's; and footers, pages and lengths that anything has happened to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from longscan.pipeline.config import InputConfig
from longscan.pipeline.errors import InputError
from longscan.pipeline.plan.planner import make_plan
from longscan.pipeline.read.find import find_files
from longscan.pipeline.read.footer import column_sizes
from longscan.pipeline.read.reader import Reader
from longscan.pipeline.read.scan import scan
from longscan.pipeline.records import Document, ErrorRow

TABLE = pa.table(
    {
        "text": [f"text {i}" * (i % 5) for i in range(60)],
        "texts": ["another"] * 60,
        "ids": pa.array([[i] * (i % 3) for i in range(60)], pa.list_(pa.int64())),
        "nest": [{"a": i, "b": [str(i)]} for i in range(60)],
        "kind": pa.array(["a", "b", None] * 20).dictionary_encode(),
        "flag": [True, None] * 30,
    }
)

WRITERS: list[dict[str, Any]] = [
    {},
    {"use_dictionary": False, "compression": "zstd", "data_page_version": "2.0"},
    {"write_page_index": True, "write_page_checksum": True, "store_decimal_as_integer": True},
    {"sorting_columns": [pq.SortingColumn(0)], "write_statistics": False},
    {"bloom_filter_options": {"text": {"ndv": 100}}},
]


def footer_of(data: bytes) -> bytes:
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def written(**options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink, row_group_size=20, **options)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("options", WRITERS, ids=lambda options: next(iter(options), "default"))
@pytest.mark.parametrize("column", ["text", "ids", "nest", "kind", "flag", "gone"])
def test_sizes_are_those_that_arrow_gives(column: str, options: dict[str, Any]) -> None:
    data = written(**options)
    metadata = pq.read_metadata(pa.BufferReader(data))
    sizes = column_sizes(footer_of(data), column, most_chunks=1000)
    assert len(sizes) == 3
    for g, size in enumerate(sizes):
        group = metadata.row_group(g)
        chunks = [group.column(j) for j in range(group.num_columns)]
        mine = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == column]
        assert size.num_bytes == sum(chunk.total_uncompressed_size for chunk in mine)
        assert size.num_values == sum(chunk.num_values for chunk in mine)
        assert size.total_bytes == group.total_byte_size


def test_only_as_many_row_groups_as_asked_for() -> None:
    footer = footer_of(written())
    assert [len(column_sizes(footer, "text", most_chunks=most)) for most in (1, 7, 8, 14, 15, 1000)] == [1, 1, 2, 2, 3, 3]


@given(damage=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=20), cut=st.floats(0, 1))
def test_a_damaged_footer_gives_sizes_or_a_value_error(damage: list[tuple[float, int]], cut: float) -> None:
    footer = bytearray(footer_of(DATA[0]))
    for at, value in damage:
        footer[int(at * len(footer))] = value
    try:
        sizes = column_sizes(bytes(footer[: int(cut * len(footer)) + 1]), "text", most_chunks=1000)
    except ValueError:
        return
    assert all(isinstance(size.num_bytes, int) for size in sizes)


DATA = [written(**options) for options in WRITERS[:3]]
CONFIGS = [InputConfig(), InputConfig(tokens_column="ids"), InputConfig(id_column="kind", passthrough=["nest", "flag", "kind"])]


@settings(max_examples=250, deadline=None)
@given(
    which=st.integers(0, len(DATA) - 1),
    config=st.integers(0, len(CONFIGS) - 1),
    in_footer=st.booleans(),
    damage=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=5),
    cut=st.one_of(st.none(), st.floats(0, 1)),
)
def test_whatever_happened_to_a_file_each_planned_row_comes_once(
    tmp_path_factory: pytest.TempPathFactory, which: int, config: int, in_footer: bool, damage: list[tuple[float, int]], cut: float | None
) -> None:
    data = bytearray(DATA[which])
    start = len(data) - 8 - len(footer_of(DATA[which])) if in_footer else 0
    for at, value in damage:
        data[start + int(at * (len(data) - start))] = value
    path = tmp_path_factory.getbasetemp() / "damaged.parquet"
    path.write_bytes(data if cut is None else data[: int(cut * len(data))])
    try:
        found = scan(find_files(str(path)), CONFIGS[config])
    except InputError:  # the columns that are asked for have lost their names or types
        return
    for shard in make_plan(found.files, shard_tokens=1 << 60).shards:
        rows = list(Reader(CONFIGS[config], found.passthrough).read(shard))
        assert [row.ordinal for row in rows] == list(range(shard.num_rows))
        assert all(isinstance(row, Document | ErrorRow) for row in rows)


def test_row_counts_that_contradict_each_other(tmp_path: Path) -> None:
    """Else a damaged number would ask for as many error rows."""
    data = DATA[1]
    footer = footer_of(data)
    count = b"\x16\x78"  # 60 rows as field 3 of FileMetaData: an i64, zigzag
    assert footer.count(count) == 1
    path = tmp_path / "x.parquet"
    path.write_bytes(data.replace(footer, footer.replace(count, b"\x16\x7a")))
    with pytest.raises(InputError, match=re.escape("its footer contradicts itself: 61 rows, and row groups of [20, 20, 20]")):
        scan(find_files(str(path)), InputConfig())
    (tmp_path / "good.parquet").write_bytes(data)
    damaged, good = sorted(scan(find_files(str(tmp_path)), InputConfig()).files, key=lambda file: file.error is None)
    assert damaged.error is not None
    assert "61 rows, and row groups of [20, 20, 20]" in damaged.error
    assert good.num_rows == 60

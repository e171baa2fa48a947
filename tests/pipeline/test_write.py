"""A shard's rows end in files that plain readers open, in the input's order, all of them or none."""

from __future__ import annotations

import datetime
import errno
import json
import os
import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from longscan.pipeline.commit import ledger
from longscan.pipeline.commit.ledger import attempts, begin_attempt, read_reports
from longscan.pipeline.config import EmbeddingConfig, ScoreConfig, TaskConfig
from longscan.pipeline.errors import ConfigError, OutputError
from longscan.pipeline.records import Document, DocumentRow, ErrorRow, Outcome, TokensRow, WindowRow
from longscan.pipeline.schemas import ERRORS_SCHEMA, STATES_SCHEMA, TOKENS_SCHEMA, documents_schema, windows_schema
from longscan.pipeline.shards import Piece, Shard, ShardReport, SourceFile
from longscan.pipeline.storage.location import Location, children, exists, locate
from longscan.pipeline.write import tables
from longscan.pipeline.write import writer as writing
from longscan.pipeline.write.tables import PartFile
from longscan.pipeline.write.writer import Writer

WIDTH = 4
EVERYTHING = TaskConfig(
    "embed_score",
    EmbeddingConfig(pooling=["mean", "last"], window_tokens=64),
    ScoreConfig(per_token=True, window_tokens=64),
)
PASSTHROUGH = pa.schema([("title", pa.string()), ("tags", pa.list_(pa.int32())), ("when", pa.timestamp("us", "UTC"))])
PROVENANCE = {"model": {"hash": "abc"}, "fingerprint": "f"}


def shard(rows: int, index: int = 0, total: int = 1) -> Shard:
    file = SourceFile("/in/x.parquet", "x.parquet", 1, "", ())
    return Shard(index, total, (Piece(file, 0, 0, rows, 0),), 100)


def document(ordinal: int, passthrough: bool = True) -> Document:
    columns = {"title": [f"title {ordinal}"], "tags": [[ordinal] * (ordinal % 3)], "when": [ordinal if ordinal % 2 else None]}
    batch = pa.RecordBatch.from_pydict(columns, PASSTHROUGH) if passthrough else pa.RecordBatch.from_arrays([], names=[])
    return Document(ordinal, f"x.parquet#{ordinal}", "x.parquet", ordinal, None, None, batch)


def vector(*seed: int, width: int = WIDTH, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(width).astype(dtype)


def outcomes(ordinal: int) -> list[Outcome]:
    """What becomes of row `ordinal`: every fifth is an error, every seventh a document of no tokens."""
    if ordinal % 5 == 4:
        return [ErrorRow(ordinal, None, "x.parquet", ordinal, "read", "NullText", f"row {ordinal} is null")]
    row = document(ordinal)
    if ordinal % 7 == 6:
        return [DocumentRow(row, 0, {"mean": None, "last": None}, 0.0, 0, 0, None)]
    tokens = 100 + ordinal
    bounds = [(0, 64), (64, tokens)]
    windows = [
        WindowRow(row, i, *bound, bound[0] * 3, bound[1] * 3, {"mean": vector(ordinal, i), "last": vector(ordinal, i, 1)}, -1.5 * i)
        for i, bound in enumerate(bounds)
    ]
    ids = np.arange(tokens, dtype=np.int32)
    logprobs = -ids.astype(np.float32)
    logprobs[0] = np.nan
    rows = [TokensRow(row, start, ids[start : start + 64], logprobs[start : start + 64]) for start in range(0, tokens, 64)]
    vectors = {"mean": vector(ordinal), "last": vector(ordinal, 9)}
    return [*windows, *rows, DocumentRow(row, tokens, vectors, -2.5 * tokens, tokens - 1, 3 * tokens, 1.25)]


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return locate(str(tmp_path / "out") if request.param == "local" else f"memory://{uuid.uuid4().hex}/out")


def writer(place: Location, task: TaskConfig = EVERYTHING, width: int = WIDTH) -> Writer:
    return Writer(place, task, width, PASSTHROUGH, PROVENANCE)


def commit(to: Writer, rows: int = 20, order: list[int] | None = None, index: int = 0, total: int = 1) -> ShardReport:
    with to.open(shard(rows, index, total)) as part:
        for ordinal in order or range(rows):
            for outcome in outcomes(ordinal):
                part.add(outcome)
        return part.commit()


def table(place: Location, name: str, part: str = "part-00000-of-00001.parquet") -> pa.Table:
    with place.fs.open((place / name / part).path, "rb") as file:
        return pq.read_table(file)


def content(place: Location) -> dict[str, bytes]:
    names = ["documents", "errors", "windows", "tokens"]
    return {f"{name}/{part}": place.fs.cat_file((place / name / part).path) for name in names for part in children(place / name)}


def test_every_table_has_its_schema_and_its_rows(place: Location) -> None:
    report = commit(writer(place))
    documents, errors = table(place, "documents"), table(place, "errors")
    assert documents.schema.remove_metadata().equals(documents_schema(EVERYTHING, WIDTH, PASSTHROUGH))
    assert errors.schema.remove_metadata().equals(ERRORS_SCHEMA)
    assert table(place, "windows").schema.remove_metadata().equals(windows_schema(EVERYTHING, WIDTH))
    assert table(place, "tokens").schema.remove_metadata().equals(TOKENS_SCHEMA)
    assert report == replace(
        ShardReport(0, num_documents=16, num_errors=4, num_tokens=0, num_windows=0, seconds=0),
        num_tokens=sum(documents.column("num_tokens").to_pylist()),
        num_windows=table(place, "windows").num_rows,
        seconds=report.seconds,
    )
    assert 0 <= report.seconds < 60
    assert read_reports(place) == {0: report}
    assert documents.num_rows + errors.num_rows == 20


def test_values_come_back_as_they_were(place: Location) -> None:
    commit(writer(place))
    rows = table(place, "documents").to_pylist()
    assert [row["doc_id"] for row in rows] == [f"x.parquet#{i}" for i in range(20) if i % 5 != 4]
    assert rows[1] == {
        "doc_id": "x.parquet#1",
        "num_tokens": 101,
        "title": "title 1",
        "tags": [1],
        "when": datetime.datetime(1970, 1, 1, microsecond=1, tzinfo=datetime.UTC),
        "embedding_mean": vector(1).tolist(),
        "embedding_last": vector(1, 9).tolist(),
        "log_likelihood": -252.5,
        "num_scored_tokens": 100,
        "num_bytes": 303,
        "bits_per_byte": 1.25,
    }
    empty = next(row for row in rows if row["doc_id"] == "x.parquet#6")
    assert (empty["num_tokens"], empty["embedding_mean"], empty["log_likelihood"], empty["bits_per_byte"]) == (0, None, 0.0, None)
    window = table(place, "windows").to_pylist()[1]
    assert (window["token_start"], window["token_end"]) == (64, 100)
    assert (window["char_start"], window["char_end"], window["log_likelihood"]) == (192, 300, -1.5)
    assert window["embedding_last"] == vector(0, 1, 1).tolist()
    tokens = [row for row in table(place, "tokens").to_pylist() if row["doc_id"] == "x.parquet#0"]
    assert [row["token_start"] for row in tokens] == [0, 64]
    assert [i for row in tokens for i in row["token_ids"]] == list(range(100))
    assert tokens[0]["logprobs"][:3] == [None, -1.0, -2.0]
    error = table(place, "errors").to_pylist()[0]
    assert error == {"doc_id": None, "file": "x.parquet", "row": 4, "stage": "read", "error": "NullText", "message": "row 4 is null"}


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(20)), group=st.sampled_from([1, 200, 500, 5000]))
def test_any_order_of_arrival_gives_the_same_bytes(tmp_path_factory: pytest.TempPathFactory, order: list[int], group: int) -> None:
    """With row groups so small that rows wait in the spool."""
    folder = tmp_path_factory.mktemp("order")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "GROUP_BYTES", group)
        for name, rows in {"straight": list(range(20)), "mixed": order}.items():
            commit(writer(locate(str(folder / name))), order=rows)
    for kind in ("documents", "errors"):
        straight, mixed = (folder / name / kind / "part-00000-of-00001.parquet" for name in ("straight", "mixed"))
        assert straight.read_bytes() == mixed.read_bytes()
    ids = pq.read_table(folder / "mixed" / "documents").column("doc_id").to_pylist()
    assert ids == [f"x.parquet#{i}" for i in range(20) if i % 5 != 4]
    assert not list((folder / "mixed" / "_run" / "tmp").iterdir())


def test_rows_that_wait_for_a_giant_do_not_wait_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "GROUP_BYTES", 1 << 20)
    task, width, rows = TaskConfig("embed"), 1024, 5000
    to = Writer(locate(str(tmp_path / "out")), task, width)
    before = pa.default_memory_pool().bytes_allocated()
    with to.open(shard(rows)) as part:
        for ordinal in [*range(1, rows), 0]:
            values = np.full(width, ordinal, dtype=np.float32)
            part.add(DocumentRow(document(ordinal, passthrough=False), 1, {"mean": values}))
            waiting = sum(vectors["mean"].nbytes for row, _ in part._ordered["documents"]._rows.values() if (vectors := row.vectors))
            assert waiting <= 1 << 20
        assert pa.default_memory_pool().bytes_allocated() - before < 4 << 20, "20 MB wait in the spool"
        part.commit()
    found = pq.read_table(tmp_path / "out" / "documents").column("embedding").combine_chunks().flatten().to_numpy()
    assert (found.reshape(rows, width)[:, 0] == np.arange(rows)).all()
    metadata = pq.read_metadata(tmp_path / "out" / "documents" / "part-00000-of-00001.parquet")
    assert metadata.num_row_groups > 10
    assert max(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)) * width * 4 <= 1 << 20


def test_equal_rows_are_equal_bytes_and_the_footer_says_where_they_are_from(tmp_path: Path) -> None:
    for name in ("one", "two"):
        commit(writer(locate(str(tmp_path / name))))
    one, two = (content(locate(str(tmp_path / name))) for name in ("one", "two"))
    assert one == two
    assert sorted(one) == [f"{name}/part-00000-of-00001.parquet" for name in ("documents", "errors", "tokens", "windows")]
    for name in ("documents", "errors", "tokens", "windows"):
        metadata = pq.read_metadata(tmp_path / "one" / name / "part-00000-of-00001.parquet").metadata
        assert set(metadata) <= {b"longscan", b"ARROW:schema"}
        assert json.loads(metadata[b"longscan"]) == PROVENANCE


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("truncate", [None, 2])
def test_vectors_of_each_type(tmp_path: Path, dtype: str, truncate: int | None) -> None:
    task = TaskConfig("embed", EmbeddingConfig(dtype=dtype, truncate_dim=truncate))
    width = truncate or WIDTH
    rows: list[Any] = [vector(i, width=width, dtype=dtype) for i in range(3)]
    with Writer(locate(str(tmp_path)), task, WIDTH).open(shard(4)) as part:
        for i, row in enumerate([*rows, None]):
            part.add(DocumentRow(document(i, passthrough=False), 5 if row is not None else 0, {"mean": row}))
        part.commit()
    found = pq.read_table(tmp_path / "documents")
    assert found.schema.names == ["doc_id", "num_tokens", "embedding"]
    assert found.schema.field("embedding").type == pa.list_(pa.float16() if dtype == "float16" else pa.float32(), width)
    assert [row and np.array(row, dtype=dtype).tolist() for row in found.column("embedding").to_pylist()] == [
        *[row.tolist() for row in rows],
        None,
    ]
    with Writer(locate(str(tmp_path)), task, WIDTH).open(shard(1)) as part:
        part.add(DocumentRow(document(0, passthrough=False), 5, {"mean": np.zeros(width + 1, dtype=dtype)}))
        with pytest.raises(ValueError, match="expected fixed_size_list"):
            part.commit()


READERS = ["pyarrow", "pandas", "polars", "duckdb", "datasets"]


def opened(reader: str, folder: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """Rows of a table, by a reader that knows nothing of longscan."""
    files = str(folder / "*.parquet")
    if reader == "pyarrow":
        import pyarrow.dataset as ds

        return list(ds.dataset(folder).to_table().to_pylist())
    if reader == "pandas":
        import pandas as pd

        return [dict(row) for row in pd.read_parquet(folder).to_dict("records")]
    if reader == "polars":
        import polars as pl

        return list(pl.read_parquet(files).to_dicts())
    if reader == "duckdb":
        import duckdb

        found = duckdb.sql(f"select * from '{files}'")
        return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]
    import datasets

    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    return [dict(row) for row in loaded]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_plain_readers_open_the_output(tmp_path: Path, reader: str, dtype: str) -> None:
    task = replace(EVERYTHING, embedding=replace(EVERYTHING.embedding, pooling=["mean"], dtype=dtype))
    to = writer(locate(str(tmp_path / "out")), task)
    for index in range(2):
        with to.open(shard(10, index, 2)) as part:
            for ordinal in range(10):
                for outcome in outcomes(ordinal + 10 * index):
                    part.add(shifted(outcome, -10 * index, dtype))
            part.commit()
    rows = opened(reader, tmp_path / "out" / "documents", tmp_path)
    assert [row["doc_id"] for row in rows] == [f"x.parquet#{i}" for i in range(20) if i % 5 != 4]
    for i, row in zip([i for i in range(20) if i % 5 != 4], rows, strict=True):
        assert row["title"] == f"title {i}"
        assert list(row["tags"]) == [i] * (i % 3)
        if i % 7 == 6:
            assert row["embedding"] is None
        else:
            assert np.array_equal(np.array(row["embedding"], dtype=dtype), vector(i).astype(dtype))
            assert row["log_likelihood"] == -2.5 * (100 + i)
    errors = opened(reader, tmp_path / "out" / "errors", tmp_path)
    assert [row["row"] for row in errors] == [4, 9, 14, 19]
    assert len(opened(reader, tmp_path / "out" / "windows", tmp_path)) == 2 * sum(i % 7 != 6 for i in range(20) if i % 5 != 4)
    tokens = opened(reader, tmp_path / "out" / "tokens", tmp_path)
    assert sum(len(row["token_ids"]) for row in tokens) == sum(row["num_tokens"] for row in rows)


def shifted(outcome: Outcome, by: int, dtype: str) -> Outcome:
    """The same row, at another ordinal, its vectors of another type."""
    if isinstance(outcome, ErrorRow):
        return replace(outcome, ordinal=outcome.ordinal + by)
    outcome = replace(outcome, document=replace(outcome.document, ordinal=outcome.document.ordinal + by))
    if isinstance(outcome, TokensRow):
        return outcome
    return replace(outcome, vectors={key: None if v is None else v.astype(dtype) for key, v in outcome.vectors.items()})


@pytest.mark.parametrize(
    ("task", "names"),
    [
        (TaskConfig("embed"), {"documents", "errors"}),
        (TaskConfig("score", score=ScoreConfig(per_token=True)), {"documents", "errors", "tokens"}),
        (TaskConfig("score", score=ScoreConfig(window_tokens=64)), {"documents", "errors", "windows"}),
        (TaskConfig("embed", EmbeddingConfig(window_tokens=64), ScoreConfig(per_token=True)), {"documents", "errors", "windows"}),
    ],
    ids=["embed", "per_token", "score_windows", "embed_windows"],
)
def test_a_shard_without_rows_still_has_a_file_of_each_table(place: Location, task: TaskConfig, names: set[str]) -> None:
    with writer(place, task).open(Shard(0, 1, (), 0)) as part:
        report = part.commit()
    assert (report.num_documents, report.num_errors) == (0, 0)
    assert set(children(place)) == names | {"_run"}
    for name in names:
        assert table(place, name).num_rows == 0
    assert table(place, "documents").schema.remove_metadata().equals(documents_schema(task, WIDTH, PASSTHROUGH))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 1], "expected 3 rows, 1 did not come, the first of them row 2"),
        ([2], "expected 3 rows, 2 did not come, the first of them row 0"),
        ([0, 1, 1], "row 1 came twice"),
        ([0, 3], "row 3 is not one of its 3"),
        ([-1], "row -1 is not one of its 3"),
    ],
)
def test_no_row_is_lost_and_none_comes_twice(place: Location, rows: list[int], message: str) -> None:
    def all_of_them() -> None:
        with writer(place).open(shard(3)) as part:
            for ordinal in rows:
                part.add(ErrorRow(ordinal, None, "x", 0, "read", "E", "m"))
            part.commit()

    with pytest.raises(OutputError, match=f"shard 0: {message}; nothing of it is committed"):
        all_of_them()
    assert content(place) == {}
    assert read_reports(place) == {}


def test_a_file_that_cannot_be_read_is_one_row(place: Location) -> None:
    file = SourceFile("/in/bad.parquet", "bad.parquet", 1, "", (), "no footer")
    good = shard(1).pieces[0]
    mixed = Shard(0, 1, (Piece(file, -1, 0, 1, 0), good), 0)
    with writer(place).open(mixed) as part:
        part.add(ErrorRow(0, None, "bad.parquet", None, "read", "UnreadableFile", "no footer"))
        part.add(ErrorRow(1, "x.parquet#0", "x.parquet", 0, "read", "NullText", "null"))
        part.commit()
    assert table(place, "errors").column("row").to_pylist() == [None, 0]


def leftovers(place: Location) -> list[str]:
    return children(place / "_run" / "tmp") if place.is_local else []


def test_what_is_not_committed_is_not_there(place: Location) -> None:
    def fail() -> None:
        with writer(place).open(shard(20)) as part:
            for outcome in outcomes(0):
                part.add(outcome)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert content(place) == {}
    assert leftovers(place) == []
    with writer(place).open(shard(20)):
        pass
    assert content(place) == {}
    assert read_reports(place) == {}


CRASHES = ["windows", "tokens", "errors", "documents", "manifest"]


@pytest.mark.parametrize("at", CRASHES)
def test_a_crash_in_the_commit_leaves_whole_files_and_a_shard_that_is_not_done(
    place: Location, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        """Not caught by anything on the way."""

    whole = writing.commit_file

    def crashing(path: str, to: Location) -> None:
        if to.parent.name == at:
            raise Crash
        whole(path, to)

    def dead(*_: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(writing, "commit_file", crashing)
        if at == "manifest":
            patch.setattr(writing, "write_report", dead)
        with pytest.raises(Crash):
            commit(writer(place))
    visible = content(place)
    assert sorted(name.partition("/")[0] for name in visible) == sorted(CRASHES[: CRASHES.index(at)])
    for name in visible:
        assert table(place, *name.split("/")).num_rows > 0, "no half file"
    assert read_reports(place) == {}
    commit(writer(place))
    assert list(read_reports(place)) == [0]
    again = content(place)
    assert {name: again[name] for name in visible} == visible, "the next attempt writes the same files"


def test_a_late_attempt_cannot_commit(place: Location) -> None:
    to = writer(place)
    late = to.open(shard(5))
    newer = to.open(shard(5))
    for part in (late, newer):
        for ordinal in range(5):
            for outcome in outcomes(ordinal):
                part.add(outcome)
    with late, pytest.raises(OutputError, match="shard 0: attempt 1 is late: attempt 2 has begun"):
        late.commit()
    assert content(place) == {}
    with newer:
        newer.commit()
    assert list(read_reports(place)) == [0]
    assert leftovers(place) == []


def test_attempts_are_counted_and_no_two_are_the_same(place: Location) -> None:
    assert attempts(place, 7) == 0
    with ThreadPoolExecutor(8 if place.is_local else 1) as pool:
        numbers = list(pool.map(lambda _: begin_attempt(place, 7), range(20)))
    assert sorted(numbers) == list(range(1, 21))
    assert attempts(place, 7) == 20
    assert attempts(place, 8) == 0
    with writer(place).open(shard(0, 7, 8), attempt=20) as part:
        part.commit()
    assert attempts(place, 7) == 20, "an attempt that the caller has begun is not begun again"


def test_a_report_that_cannot_be_read(place: Location) -> None:
    commit(writer(place))
    place.fs.pipe_file((place / "_run" / "manifest" / "00003.json").path, b"{}")
    with pytest.raises(OutputError, match=r"00003\.json: expected the report of a shard, found something else"):
        read_reports(place)
    ledger.forget_report(place, 3)
    ledger.forget_report(place, 3)
    assert list(read_reports(place)) == [0]


@pytest.mark.parametrize("name", ["documents", "errors", "tokens", "windows"])
def test_a_full_disk(tmp_path: Path, name: str) -> None:
    """The temporary file of one table lies on a device that is really full."""
    place = locate(str(tmp_path / "out"))
    tmp = tmp_path / "out" / "_run" / "tmp"
    tmp.mkdir(parents=True)
    (tmp / f"00000-000001-{name}.parquet").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"out/_run/tmp: cannot be written: .*No space left on device.*Free some space"):
        commit(writer(place))
    assert content(place) == {}
    assert read_reports(place) == {}
    assert leftovers(place) == []
    commit(writer(place))
    assert list(read_reports(place)) == [0]


def test_a_full_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "GROUP_BYTES", 100)
    place = locate(str(tmp_path / "out"))
    tmp = tmp_path / "out" / "_run" / "tmp"
    tmp.mkdir(parents=True)
    (tmp / "00000-000001-documents.parquet.spool").symlink_to("/dev/full")
    with pytest.raises(OutputError, match="No space left on device"):
        commit(writer(place), order=list(reversed(range(20))))
    assert content(place) == {}
    assert leftovers(place) == []


def test_an_output_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="a part of this path is a file"):
        commit(writer(locate(str(tmp_path / "file" / "out"))))

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "makedirs", read_only)
    with pytest.raises(OutputError, match=r"Read-only file system.*Set output.path to a place that this user may write to"):
        commit(writer(locate(str(tmp_path / "out"))))


def test_a_store_that_fails_in_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    place = locate(f"memory://{uuid.uuid4().hex}/out")

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("403 https://store?sig=s3cr3t")

    with monkeypatch.context() as patch:
        patch.setattr(type(place.fs), "put_file", refuse)
        with pytest.raises(OutputError, match=r"cannot be written: 403 https://store\?\*\*\*\. Set output\.path"):
            commit(writer(place))
    assert read_reports(place) == {}


@pytest.mark.parametrize("names", [["doc_id"], ["a", "a"], ["embedding_mean"], ["log_likelihood", "title"]])
def test_passthrough_columns_that_stand_in_the_way(names: list[str], tmp_path: Path) -> None:
    schema = pa.schema([pa.field(name, pa.string()) for name in names])
    with pytest.raises(ConfigError, match=f"input.passthrough: expected each column once .* found {names[0]}"):
        Writer(locate(str(tmp_path)), EVERYTHING, WIDTH, schema)


def test_messages_that_quote_names_that_are_no_utf8(tmp_path: Path) -> None:
    place = locate(str(tmp_path))
    with writer(place).open(shard(1)) as part:
        part.add(ErrorRow(0, "caf\udce9", "caf\udce9", 0, "read", "E", "no \udce9\n\x07"))
        part.commit()
    (row,) = table(place, "errors").to_pylist()
    assert (row["doc_id"], row["message"]) == ("caf\\udce9", "no \\udce9\n\x07")


def test_several_parts_at_once(place: Location) -> None:
    to = writer(place)

    def one(index: int) -> ShardReport:
        order = list(range(20))
        random.Random(index).shuffle(order)
        return commit(to, order=order, index=index, total=8)

    with ThreadPoolExecutor(4 if place.is_local else 1) as pool:
        reports = list(pool.map(one, range(8)))
    assert read_reports(place) == dict(enumerate(reports))
    assert children(place / "documents") == [f"part-{i:05d}-of-00008.parquet" for i in range(8)]
    assert leftovers(place) == []


def test_a_giant_that_passes_through_has_a_row_group_of_its_own(tmp_path: Path) -> None:
    schema = pa.schema([("text", pa.string())])
    place = locate(str(tmp_path))
    with Writer(place, TaskConfig("embed"), WIDTH, schema).open(shard(5)) as part:
        for ordinal in range(5):
            batch = pa.RecordBatch.from_arrays([pa.array(["x" * (20_000_000 if ordinal == 2 else 10)])], schema=schema)
            part.add(DocumentRow(replace(document(ordinal), passthrough=batch), 1, {"mean": vector(ordinal)}))
        part.commit()
    metadata = pq.read_metadata(tmp_path / "documents" / "part-00000-of-00001.parquet")
    assert [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)] == [2, 1, 2]
    assert [len(text) for text in table(place, "documents").column("text").to_pylist()] == [10, 10, 20_000_000, 10, 10]
    assert not exists(place / "_run" / "tmp" / "00000-000001-documents.parquet")


def test_only_states_are_written_without_compression_and_statistics(tmp_path: Path) -> None:
    """Other columns of their type are whatever a user passes through: polars writes all its binary columns so."""
    documents = pa.schema([("doc_id", pa.string()), ("blob", pa.large_binary()), ("embedding", pa.list_(pa.float32(), 2))])
    values: dict[str, list[Any]] = {"doc_id": ["a"], "blob": [b"0" * 100_000], "embedding": [[0.0, 1.0]]}
    kept = {"doc_id": ["a"], "position": [64], "prefix_length": [9], "prefix_sha256": ["0"], "state": [b"0" * 100_000]}
    found = {}
    for name, schema, columns in (("documents", documents, values), ("states", STATES_SCHEMA, kept)):
        file = PartFile(str(tmp_path / name), schema.with_metadata({b"longscan": b"{}"}))
        file.write([pa.RecordBatch.from_pydict(columns, schema)])
        file.close()
        group = pq.read_metadata(tmp_path / name).row_group(0)
        found[name] = [(column.compression, column.is_stats_set) for column in map(group.column, range(group.num_columns))]
    assert found["documents"] == [("ZSTD", True)] * 3
    assert found["states"] == [("ZSTD", False)] * 4 + [("UNCOMPRESSED", False)]

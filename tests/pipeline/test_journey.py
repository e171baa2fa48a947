"""Every verb meets the next, each row once; what fails takes its own shard down and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_model import CountingModel, document, engine_of, stream
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.errors import OutputError
from longscan.pipeline.journey import Tools, process_shard
from longscan.pipeline.records import Carry, Document, DocumentRow, ErrorRow, Outcome, Reached, TokenStream
from longscan.pipeline.shards import Carried, Shard, ShardReport

LENGTHS = [5, 0, 300, 64, 1]


class FakeReader:
    def read(self, shard: Shard) -> Iterator[Document | ErrorRow]:
        for ordinal in range(len(LENGTHS)):
            yield document(ordinal, f"{shard.index} {ordinal}".encode())
        yield ErrorRow(len(LENGTHS), None, "corpus.parquet", len(LENGTHS), "read", "InputError", "null text")


class FakeTokenizer:
    """A document of shard 3 cannot be cut beyond token 200."""

    def tokenize(self, documents: Iterator[Document | ErrorRow]) -> Iterator[TokenStream | ErrorRow]:
        for item in documents:
            if isinstance(item, ErrorRow):
                yield item
            else:
                assert item.text is not None
                shard = int(bytes(item.text).split()[0])
                yield stream(item.ordinal, [shard % 11] * LENGTHS[item.ordinal], block=50, fails_at=200 if shard == 3 else None)


@dataclass
class FakePart:
    shard: Shard
    full_at: int | None
    attempt: int = 1
    rows: list[Outcome] = field(default_factory=list)
    left_with: list[Any] = field(default_factory=list)

    def __enter__(self) -> FakePart:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.left_with.append(kind)

    def add(self, outcome: Outcome) -> None:
        if len(self.rows) == self.full_at:
            raise OutputError("the disk is full")
        self.rows.append(outcome)

    def commit(self, _carried: Carried) -> ShardReport:
        assert not self.left_with, "committed before it is left"
        errors = sum(isinstance(row, ErrorRow) for row in self.rows)
        tokens = sum(row.num_tokens for row in self.rows if isinstance(row, DocumentRow))
        return ShardReport(self.shard.index, len(self.rows) - errors, errors, tokens, 0, 0.0)


class FakeWriter:
    def __init__(self, full_at: int | None = None) -> None:
        self.full_at = full_at
        self.parts: dict[int, FakePart] = {}

    def open(self, shard: Shard, attempt: int | None = None) -> FakePart:
        assert attempt is None
        self.parts[shard.index] = FakePart(shard, self.full_at)
        return self.parts[shard.index]


class FakeKeeper:
    """Keeps nothing."""

    checkpoint_tokens = 1 << 20
    carried = Carried()

    def open(self, _shard: Shard, _attempt: int) -> FakeKeeper:
        return self

    def __enter__(self) -> FakeKeeper:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def resume(self, documents: Iterator[Document | ErrorRow], _rows: Any) -> Iterator[Document | ErrorRow]:
        return documents

    def keep(self, news: list[Any]) -> list[Outcome]:
        return [item for item in news if not isinstance(item, Carry | Reached)]

    def clear(self) -> None:
        pass


def tools(engine: Engine, writer: FakeWriter) -> Tools:
    return Tools(FakeReader(), FakeTokenizer(), engine, writer, FakeKeeper())  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[Engine]:
    sizes = {"lanes": 2, "step_tokens": 256, "segment_tokens": 64}
    with engine_of(CountingModel(), TaskConfig("embed"), **sizes) as engine:
        yield engine


def shard(index: int) -> Shard:
    return Shard(index, 8, (), 0)


def test_every_row_ends_in_one_table(engine: Engine) -> None:
    writer = FakeWriter()
    report = process_shard(shard(0), tools(engine, writer))
    assert report == ShardReport(0, num_documents=5, num_errors=1, num_tokens=370, num_windows=0, seconds=0.0)
    part = writer.parts[0]
    assert sorted(row.ordinal if isinstance(row, ErrorRow) else row.document.ordinal for row in part.rows) == list(range(6))
    assert part.left_with == [None]


def test_several_shards_at_once_through_one_engine(engine: Engine) -> None:
    writer = FakeWriter()
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda index: process_shard(shard(index), tools(engine, writer)), range(8)))
    assert [(report.index, report.num_errors) for report in reports] == [(index, 2 if index == 3 else 1) for index in range(8)]
    (broken,) = [row for row in writer.parts[3].rows if isinstance(row, ErrorRow) and row.stage == "tokenize"]
    assert broken.ordinal == 2
    for index, part in writer.parts.items():
        vectors = [row.vectors["mean"] for row in part.rows if isinstance(row, DocumentRow) and row.num_tokens]
        assert all(vector is not None and vector.argmax() == index for vector in vectors), "rows of one shard in another's part"


def test_a_part_that_cannot_be_written_ends_its_shard_and_leaves_the_engine_free(engine: Engine) -> None:
    full = FakeWriter(full_at=2)
    with pytest.raises(OutputError, match="the disk is full"):
        process_shard(shard(1), tools(engine, full))
    assert full.parts[1].left_with == [OutputError]
    assert process_shard(shard(2), tools(engine, FakeWriter())).num_documents == 5

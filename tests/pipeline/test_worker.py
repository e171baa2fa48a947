"""A worker whose engine has failed lets go: one clear end, not a failure for every shard that it is handed. And how it uses its cores."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import tiny_checkpoint
from longscan.pipeline.commit.ledger import attempts
from longscan.pipeline.config import JobConfig
from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.errors import Stopped
from longscan.pipeline.meter import BEFORE_FIRST, BETWEEN, DEVICE
from longscan.pipeline.run import run
from longscan.pipeline.shards import SHARDS_AT_ONCE
from longscan.pipeline.storage.location import locate
from longscan.pipeline.worker import build

SHARDS = 12
PAUSE_S = 0.3


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    (tmp_path / "in").mkdir()
    for i in range(SHARDS):
        pq.write_table(pa.table({"text": [f"It is a truth universally acknowledged {i}. " * 40]}), tmp_path / "in" / f"{i:02d}.parquet")
    made = JobConfig()
    made.model.path = str(tiny_checkpoint(tmp_path / "model", tokenizer=True))
    made.input.path, made.output.path = str(tmp_path / "in"), str(tmp_path / "out")
    made.cluster.mode, made.output.shard_tokens = "inprocess", 64
    return made


class OnALostDevice(Engine):
    """Every step fails, as after an error that poisons a GPU's context."""

    def __init__(self, model: Any, *rest: Any, **options: Any) -> None:
        super().__init__(model, *rest, **options)

        def step(*_: Any) -> Any:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        model.step = step


def test_a_lost_device_stops_the_run_at_once_and_the_next_start_does_what_is_left(
    config: JobConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "Engine", OnALostDevice)
        with pytest.raises(Stopped, match="illegal memory access"):
            run(config)
    begun = sum(attempts(locate(config.output.path), shard) > 0 for shard in range(SHARDS))
    assert begun <= SHARDS_AT_ONCE, "no shard was begun on a device that is lost"
    assert not [record for record in caplog.records if record.exc_info], "the error is told once, in the exception"
    summary = run(config)
    assert isinstance(summary, dict)
    assert summary["documents"] == SHARDS


@pytest.mark.parametrize(
    ("cores", "device", "threads"), [(16, "cuda", 14), (8, "cuda", 7), (4, "cuda", 4), (1, "cuda", 1), (16, "cpu", 16)]
)
def test_beside_a_gpu_some_cores_are_left_to_the_threads_that_feed_it(cores: int, device: str, threads: int) -> None:
    assert build.tokenizing_threads(cores, device) == threads


def test_a_worker_tokenizes_with_as_many_threads(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    asked: list[tuple[int, str]] = []

    class Counted(build.DocumentTokenizer):
        def __init__(self, *rest: Any, workers: int, **options: Any) -> None:
            made.append(workers)
            super().__init__(*rest, workers=workers, **options)

    def three(cores: int, device: str) -> int:
        asked.append((cores, device))
        return 3

    monkeypatch.setattr(build, "DocumentTokenizer", Counted)
    monkeypatch.setattr(build, "tokenizing_threads", three)
    config.cluster.cpus_per_worker = 1
    summary = run(config)
    assert isinstance(summary, dict)
    assert summary["documents"] == SHARDS
    assert (asked, made) == ([(1, "cpu")], [3])


def test_a_worker_s_time_holds_what_its_device_waited(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits from when the engine is there, also while the rest of a worker is made."""
    made = build._keeper

    def slowly(*given: Any) -> Any:
        time.sleep(PAUSE_S)
        return made(*given)

    monkeypatch.setattr(build, "_keeper", slowly)
    run(config)
    metrics = json.loads((Path(config.output.path) / "_run" / "metrics.json").read_text())
    waited, between, computed = (metrics["stages"][name]["seconds"] for name in (BEFORE_FIRST, BETWEEN, DEVICE))
    assert waited >= PAUSE_S
    assert waited + between + computed <= metrics["worker_seconds"] + 0.002, "rounded"

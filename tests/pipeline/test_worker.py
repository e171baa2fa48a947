"""A worker whose engine has failed lets go: one clear end, not a failure for every shard that it is handed."""

from __future__ import annotations

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
from longscan.pipeline.run import run
from longscan.pipeline.storage.location import locate
from longscan.pipeline.worker import build
from longscan.pipeline.worker.worker import SHARDS_AT_ONCE

SHARDS = 12


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

"""What carries cost at the default interval where they fall due as often as on a fast GPU: a device that sleeps, states of real size."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fakes import tiny_checkpoint
from longscan.jobs import bench_fake
from longscan.jobs.compose import compose_job
from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.meter import Meter
from longscan.pipeline.run import run
from longscan.pipeline.worker.job import Job

RATE = 1.9e6
"""Tokens/s, as mamba2-130m has on an H200."""
STATE = 19_400_000 // 4
"""Numbers of fp32: the carry of mamba2-130m."""
DOCUMENTS, TOKENS = 3, 8 << 20
PAIRS = 4


class Stateful(bench_fake.SleepingModel):
    """With states, of which carries are made."""

    def new_state(self, slots: int) -> Any:
        return torch.zeros(slots, STATE)

    def lane(self, state: Any, lane: int) -> dict[str, torch.Tensor]:
        return {"state": state[lane]}

    def step(self, ids_T: torch.Tensor, segments: Any, state: Any) -> Any:
        hidden, _ = super().step(ids_T, segments, None)
        return hidden, state


def stateful(job: Job, folder: str, on_tokens: Callable[[int, int], None] | None, meter: Meter) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_fake, "SleepingModel", Stateful)
        return bench_fake.sleeping_engine(RATE)(job, folder, on_tokens, meter)


def measured(folder: Path, name: str, *more: str) -> Mapping[str, Any]:
    words = [
        f"model.path={folder / 'model'}",
        f"input.path={folder / 'in.parquet'}",
        "input.tokens_column=ids",
        f"output.path={folder / name}",
    ]
    sizes = ("engine.step_tokens=65536", "engine.lanes=4", "engine.segment_tokens=8192")
    run(compose_job([*words, *sizes, "cluster=inprocess", *more]), build=stateful)
    found: dict[str, Any] = json.loads((folder / name / "_run" / "metrics.json").read_text())
    return found


@pytest.mark.slow
def test_carries_cost_less_than_a_hundredth_of_the_time(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    ids = pa.array([np.ones(TOKENS, np.int32)] * DOCUMENTS, pa.list_(pa.int32()))
    pq.write_table(pa.table({"ids": ids}), tmp_path / "in.parquet", row_group_size=1)
    runs: dict[str, list[Mapping[str, Any]]] = {"with": [], "without": []}
    for n in range(PAIRS):
        runs["without"].append(measured(tmp_path, f"without-{n}", f"engine.checkpoint_tokens={1 << 40}"))
        runs["with"].append(measured(tmp_path, f"with-{n}"))
    assert {found["carries"]["carries_written"] for found in runs["without"]} == {0}
    assert min(found["carries"]["carries_written"] for found in runs["with"]) >= DOCUMENTS * (TOKENS // (1 << 20) - 2)
    seconds = {name: min(found["seconds"] for found in some) for name, some in runs.items()}
    launch = {name: min(found["stages"]["launch"]["cpu_seconds"] for found in some) for name, some in runs.items()}
    print(f"seconds {seconds}, CPU seconds of the engine's thread at launching steps {launch}")
    assert launch["with"] - launch["without"] < 0.01 * DOCUMENTS * TOKENS / RATE
    assert seconds["with"] < 1.01 * seconds["without"], "on a machine with other work, again"

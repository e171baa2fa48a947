"""The host's side of a job, on a device that only sleeps: steps stay full, and what a token costs the host has a bound."""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import tiny_checkpoint
from longscan.jobs.bench_fake import sleeping_engine
from longscan.jobs.bench_job import add_arguments, bench_job
from longscan.jobs.command import DEMO_MODEL
from longscan.jobs.compose import compose_job
from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.engine.results import Launched
from longscan.pipeline.meter import Meter
from longscan.pipeline.run import run
from longscan.pipeline.worker.job import Job
from longscan.pipeline.worker.worker import COLLECT_AT
from tiny_jobs import table
from waiting import HANG_S

STEP = 4096

CALLS_PER_TOKEN = 18
"""CPU time beside tokenization, for documents of 500 tokens, in calls of a Python function that does nothing: 7 to 12 on busy cores, where
such a call took 37 to 53 ns. What a process does once is a part of it: two thirds are left of it in six times as many tokens."""


def options(lengths: str, tokens: int, rate: float, *keys: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--lengths", lengths, "--tokens", str(tokens), "--fake-rate", str(rate), "--model", str(DEMO_MODEL), "--keys", *keys]
    return parser.parse_args(words)


def patient_engine(total: int, job: Job, folder: str, on_tokens: Callable[[int, int], None] | None, meter: Meter) -> Engine:
    """On a device that is slower than the host, whatever the host: no step ends before the next one is there, up to the last of `total`."""
    engine = sleeping_engine(rate=20 * STEP, width=64)(job, folder, on_tokens, meter)
    true_finished, since = engine._forward.finished, [time.monotonic()]

    def finished(launched: Launched) -> bool:
        ready, booked = engine._lanes.ready_rows, engine.totals.tokens
        there = ready >= STEP or booked + ready == total
        since[0] = time.monotonic() if there else since[0]
        return true_finished(launched) and (there or time.monotonic() - since[0] > HANG_S)

    engine._forward.finished = finished  # type: ignore[method-assign]
    return engine


def test_steps_stay_full_across_the_borders_of_small_shards(tmp_path: Path) -> None:
    """Shards of five quarters of a step: each alone would take two steps, the second of them almost empty."""
    shards, documents = 24, 10
    ids = [[1] * (STEP // 8)] * (shards * documents)
    pq.write_table(pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))}), tmp_path / "in.parquet", row_group_size=documents)
    model = tiny_checkpoint(tmp_path / "model")
    words = [f"model.path={model}", f"input.path={tmp_path / 'in.parquet'}", "input.tokens_column=ids", f"output.path={tmp_path / 'out'}"]
    words += [
        f"engine.step_tokens={STEP}",
        "engine.segment_tokens=1024",
        "engine.lanes=8",
        f"output.shard_tokens={STEP}",
        "cluster=inprocess",
    ]
    run(compose_job(words), build=partial(patient_engine, shards * documents * STEP // 8))
    metrics = json.loads((tmp_path / "out" / "_run" / "metrics.json").read_text())
    assert metrics["shards"] == shards
    full = shards * documents / 8
    assert full <= metrics["steps"] <= full + 2, "the first, of what had come by then, and the last"
    assert metrics["waste"] < 0.07
    assert table(tmp_path / "out", "documents").num_rows == shards * documents


def seconds_of_a_call() -> float:
    """CPU time that this machine takes, as it is now, to call a Python function that does nothing."""

    def nothing(number: int) -> int:
        return number

    began = time.thread_time()
    for number in range(500_000):
        nothing(number)
    return (time.thread_time() - began) / 500_000


def test_the_host_costs_little_beside_tokenization() -> None:
    """At one of three tries, since others on the same cores slow either down."""
    found = []
    while len(found) < 3 and min(found, default=math.inf) >= CALLS_PER_TOKEN:
        before = seconds_of_a_call()
        record = bench_job(options("constant:500", 1_000_000, 4e6))
        call = (before + seconds_of_a_call()) / 2
        host = sum(cost["cpu_seconds"] for stage, cost in record.stages.items() if stage != "tokenize")
        found.append(host / record.tokens / call)
    assert min(found) < CALLS_PER_TOKEN, found


@pytest.mark.parametrize(("size", "most"), [(1000, 0.05), (500, 0.05)])
def test_little_is_lost_to_the_alignment_of_short_documents(size: int, most: float) -> None:
    """Of the rows of tiles in use: whether steps are full is the host's speed."""
    assert 0 < bench_job(options(f"constant:{size}", 200_000, 2e6, "engine.step_tokens=16384")).alignment_waste < most


def test_documents_on_their_way_are_not_looked_through_again_and_again() -> None:
    """A full collection of garbage holds Python's lock for as long as several small steps take."""
    collections = [0, 0, 0]

    def count(phase: str, about: dict[str, int]) -> None:
        if phase == "stop" and gc.get_threshold() == COLLECT_AT:
            collections[about["generation"]] += 1

    before = gc.get_threshold()
    gc.callbacks.append(count)
    try:
        bench_job(options("constant:50", 400_000, 4e6, "engine.step_tokens=16384"))
    finally:
        gc.callbacks.remove(count)
    assert gc.get_threshold() == before != COLLECT_AT
    assert collections[0] > 0
    assert collections[2] == 0

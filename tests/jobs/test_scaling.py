"""Workers on Ray: twice as many do twice as much, where a device each is what there is too little of."""

from __future__ import annotations

import argparse

import pytest
from longscan.jobs.bench_job import add_arguments, bench_job
from longscan.jobs.command import DEMO_MODEL

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, on import and at its end

RATE = 100_000
"""Tokens a second of each device, so that two cores can feed four."""
SECONDS = 20
SHARD_TOKENS = 200_000
"""Some ten a worker: it has four in hand."""
SHARE = 0.8
"""Of what all devices could do: a worker's first and last step are not full, and workers do not begin at once."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_throughput_grows_with_the_workers() -> None:
    for workers in (1, 2, 4):
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        words = ["--lengths", "constant:4000", "--tokens", str(workers * RATE * SECONDS), "--fake-rate", str(RATE)]
        words += ["--cluster", "local", "--model", str(DEMO_MODEL)]
        words += ["--keys", f"cluster.workers={workers}", "cluster.cpus_per_worker=1", f"output.shard_tokens={SHARD_TOKENS}"]
        record = bench_job(parser.parse_args(words))
        assert record.workers == workers
        assert SHARE * workers * RATE < record.tokens_per_second < workers * RATE

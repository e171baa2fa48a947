"""What a run did and how fast, for whoever runs it: OUT/_run/metrics.json, of the start that wrote it last, and of all starts.

It is written as shards end, every few seconds, and when a start ends or is stopped: so a start that is killed loses its last
seconds here, and nothing else. What stops cost a shard is in its report, over all attempts at it, and so are the sums of
"run" that come from reports; they miss nothing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import reduce
from typing import Any

from longscan.pipeline.commit.ledger import RUN
from longscan.pipeline.shards import Carried, ShardReport
from longscan.pipeline.storage.location import Location, atomic_write, read_bytes
from longscan.pipeline.worker.job import Result, Usage

WRITE_S = 10.0
SUMMED = ("seconds", "computed_tokens")
"""What each start adds to those before it."""

log = logging.getLogger(__name__)


class Metrics:
    """Of one start of a run."""

    def __init__(
        self,
        place: Location,
        *,
        start: int,
        done: Iterable[ShardReport],
        num_shards: int,
        about: Mapping[str, Any],
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """start: its number. done: shards that earlier starts have committed. about: what it runs on, as it is.

        check: raises OutputError where the output is another run's by now, whose numbers stay as they are.
        """
        self._check = check
        self._file, self._start, self._about, self._clock = place / RUN / "metrics.json", start, about, clock
        self._done, self._num_shards = list(done), num_shards
        self._results: list[Result] = []
        self._usage = Usage()
        self._before = self._earlier()
        self._began = self._written = clock()

    @property
    def seconds(self) -> float:
        return round(self._clock() - self._began, 3)

    @property
    def due(self) -> bool:
        """The next `add` writes: so the caller makes sure before that the output is still this run's."""
        return self._clock() - self._written >= WRITE_S

    def add(self, result: Result, computed_tokens: int) -> None:
        """A shard has ended. computed_tokens: that went through the model in this start so far."""
        self._results.append(result)
        self.spend(result.usage)
        if self.due:
            self.write(computed_tokens)

    def spend(self, usage: Usage | None) -> None:
        """What a worker has done, whatever came of it."""
        if usage is not None:
            self._usage = self._usage.plus(usage)

    def write(self, computed_tokens: int) -> None:
        """Never raises: numbers that cannot be written are told of, and end nothing."""
        self._written = self._clock()
        try:
            self._check()
            atomic_write(self._file, json.dumps(self._content(computed_tokens), indent=2).encode())
        except Exception as error:  # each file system has exceptions of its own
            log.warning("the run's metrics cannot be written: %s", error)

    def _content(self, computed_tokens: int) -> dict[str, Any]:
        seconds, usage = self.seconds, self._usage
        reports = [result.report for result in self._results if result.report is not None]
        mine = {"seconds": seconds, "computed_tokens": computed_tokens}
        everything = [*self._done, *reports]
        return {
            **mine,
            "shards": len(reports),
            "failed_shards": len(self._results) - len(reports),
            **_counts(reports),
            # Not by the reports: their tokens may be those of earlier starts and of an earlier run, and what is under way is in none.
            "tokens_per_second": round(computed_tokens / seconds, 1) if seconds else None,
            **self._about,
            "carries": _carried(reports),
            "workers_at_work": usage.workers,
            "worker_seconds": round(usage.seconds, 3),
            "longest_worker_seconds": round(usage.longest, 3),
            "steps": usage.steps.steps,
            "waste": round(usage.steps.waste, 4),
            "alignment_waste": round(usage.steps.alignment_waste, 4),
            "stages": {
                stage: {"cpu_seconds": round(cost.cpu, 3), "seconds": round(cost.wall, 3)} for stage, cost in sorted(usage.costs.items())
            },
            "run": {
                "starts": self._start,
                **{name: round(mine[name] + self._before.get(name, 0), 3) for name in SUMMED},
                "shards": len(everything),
                "shards_left": self._num_shards - len(everything),
                **_counts(everything),
                "carries": _carried(everything),
            },
        }

    def _earlier(self) -> Mapping[str, Any]:
        """What the starts before this one came to; nothing where it cannot be read."""
        try:
            run = json.loads(read_bytes(self._file) or b"{}").get("run", {})
            return {name: float(run[name]) for name in SUMMED if name in run}
        except Exception as error:  # each file system has exceptions of its own
            log.warning("%s: the numbers of earlier starts cannot be read: %s", self._file, error)
            return {}


def _counts(reports: Iterable[ShardReport]) -> dict[str, int]:
    names = {"documents": "num_documents", "errors": "num_errors", "tokens": "num_tokens", "windows": "num_windows"}
    reports = list(reports)
    return {name: sum(getattr(report, field) for report in reports) for name, field in names.items()}


def _carried(reports: Iterable[ShardReport]) -> dict[str, float]:
    """What stops cost these shards."""
    carried = asdict(reduce(Carried.plus, (report.carried for report in reports), Carried()))
    return {name: round(value, 3) for name, value in carried.items()}

"""What a run's folder says of its shards: who began one, and which are committed.

A worker leaves `_run/attempts/<shard>/<n>` before it begins, made only where none is: attempts are counted, whoever
made them, and a late one is found out, because a higher number is there. `_run/manifest/<shard>.json` is the last thing
that is written of a shard: with it the shard is done, without it nothing is.
"""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from longscan.pipeline.errors import OutputError
from longscan.pipeline.records import ShardReport
from longscan.pipeline.storage import Location, atomic_write, children, create_exclusive, read_bytes, remove, writing

RUN = "_run"
THREADS = 16


def begin_attempt(output: Location, shard: int) -> int:
    """Leave a mark that an attempt at `shard` begins, and return its number, from 1. No two get the same."""
    who = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
    number = attempts(output, shard) + 1
    while not create_exclusive(_attempts(output, shard) / f"{number:06d}", who):
        number += 1
    return number


def attempts(output: Location, shard: int) -> int:
    """How many attempts at `shard` have begun, in all starts of the run."""
    with writing(output):
        return max((int(name) for name in children(_attempts(output, shard)) if name.isdigit()), default=0)


def check_newest(output: Location, shard: int, attempt: int) -> None:
    """Raise OutputError where a newer attempt than `attempt` has begun: this one is late, and its work is not wanted."""
    newest = attempts(output, shard)
    if newest > attempt:
        raise OutputError(
            f"{output}: shard {shard}: attempt {attempt} is late: attempt {newest} has begun, so nothing of this one is "
            "committed; the newer one commits the shard"
        )


def write_report(output: Location, report: ShardReport) -> None:
    """Commit a shard whose files are all there."""
    atomic_write(_manifest(output) / f"{report.index:05d}.json", json.dumps(asdict(report)).encode())


def forget_report(output: Location, shard: int) -> None:
    """Take a shard's commit back: the next start does it anew."""
    remove(_manifest(output) / f"{shard:05d}.json")


def report_of(output: Location, shard: int) -> ShardReport | None:
    """The report of a committed shard; None where it is not committed."""
    place = _manifest(output) / f"{shard:05d}.json"
    return None if read_bytes(place) is None else _read_report(place)


def read_reports(output: Location) -> dict[int, ShardReport]:
    """Reports of the committed shards, by their index. OutputError where one cannot be read."""
    names = [name for name in children(_manifest(output)) if name.endswith(".json") and name.partition(".")[0].isdigit()]
    with ThreadPoolExecutor(THREADS) as pool:
        reports = pool.map(lambda name: _read_report(_manifest(output) / name), names)
        return {report.index: report for report in reports}


def _read_report(place: Location) -> ShardReport:
    try:
        return ShardReport(**json.loads(read_bytes(place) or b""))
    except (ValueError, TypeError) as error:
        raise OutputError(
            f"{place}: expected the report of a shard, found something else ({error}); remove it to do the shard anew"
        ) from error


def _attempts(output: Location, shard: int) -> Location:
    return output / RUN / "attempts" / f"{shard:05d}"


def _manifest(output: Location) -> Location:
    return output / RUN / "manifest"

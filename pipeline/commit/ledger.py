"""What a run's folder says of its shards: who began one, and which are committed.

A worker leaves `_run/attempts/<shard>/<n>` before it begins, made only where none is: attempts are counted, whoever
made them, and a late one is found out, because a higher number is there. `<n>.ended` beside it says that its process
outlived it; without that and without a report, the process died under it, and `<n>.at` says, if it is there, at which
rows alone it was. `_run/manifest/<shard>.json` is the last thing that is written of a shard: with it the shard is done,
without it nothing is.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from longscan.pipeline.commit.gate import gate
from longscan.pipeline.errors import OutputError
from longscan.pipeline.shards import Carried, ShardReport
from longscan.pipeline.storage.location import Location, atomic_write, children, create_exclusive, exists, read_bytes, remove, writing

RUN = "_run"
THREADS = 16

log = logging.getLogger(__name__)


class Late(OutputError):
    """This attempt at a shard is not the newest any more, or its run has been taken over: its work is not wanted."""


Mark = tuple[int, int]
"""How far a shard is, as `leftover.Leftover.mark` has it."""
NOTHING: Mark = (0, 0)


@dataclass(frozen=True, slots=True)
class Loss:
    """An attempt at a shard whose process ended under it."""

    attempt: int
    start: int
    """Number of the run's start that it belonged to."""
    rows: range | None = None
    """Ordinals of the rows that it was at and no others, where it worked on them one after the other."""
    stage: str = ""
    """What it did with them: "read" or "engine"; or "commit", behind all of them."""
    position: int = 0
    """Where the document began in it, if it was in the engine and `rows` is one: 0, or behind a carry."""
    fruitless: bool = True
    """It left nothing that the next attempt had not to do again."""


def begin_attempt(output: Location, shard: int, *, start: int = 0, in_driver: bool = True, mark: Mark = NOTHING) -> int:
    """Leave a mark that an attempt at `shard` begins, and return its number, from 1. No two get the same.

    start: number of the run's start. in_driver: the worker's process is the run's own. mark: how far the shard
    is, by what attempts before have kept.
    """
    who = json.dumps(
        {"host": socket.gethostname(), "pid": os.getpid(), "start": start, "in_driver": in_driver, "mark": list(mark)}
    ).encode()
    number = attempts(output, shard) + 1
    with gate(output, shut=True) if number > 1 else nullcontext():
        while not create_exclusive(_attempts(output, shard) / f"{number:06d}", who):
            number += 1
    return number


def end_attempt(output: Location, shard: int, attempt: int) -> None:
    """Say that an attempt has ended and its process has not. What keeps this from being said is told and passed over."""
    try:
        atomic_write(_attempts(output, shard) / f"{attempt:06d}.ended", b"")
    except OutputError as error:
        log.warning("the end of attempt %d at shard %d cannot be noted: %s", attempt, shard, error)


def note_rows(output: Location, shard: int, attempt: int, rows: range, stage: str, position: int = 0) -> None:
    """Say that an attempt is now at `rows` and at no others; position: where in the document, if it is one."""
    atomic_write(_attempts(output, shard) / f"{attempt:06d}.at", json.dumps([rows.start, rows.stop, stage, position]).encode())


def attempts(output: Location, shard: int) -> int:
    """How many attempts at `shard` have begun, in all starts of the run."""
    with writing(output):
        return max((int(name) for name in children(_attempts(output, shard)) if name.isdigit()), default=0)


def losses(output: Location, shard: int, *, start: int, mark: Mark = NOTHING) -> list[Loss]:
    """Attempts at `shard` whose process ended under them, in their order, as start `start` of the run sees them.

    Where a driver went, its workers went with it: that is no loss of theirs, so a worker's attempt counts only where a later one is
    of the same start. mark: how far the shard is now.
    """
    with writing(output):
        names = children(_attempts(output, shard))
    begun = [(int(name), _json(_attempts(output, shard) / name)) for name in names if name.isdigit()]
    starts = [who.get("start", 0) for _, who in begun] + [start]
    marks = [tuple(who.get("mark", NOTHING)) for _, who in begun] + [mark]
    found = []
    for i, (number, who) in enumerate(begun):
        outlived = who.get("in_driver", True) or starts[i] in starts[i + 1 :]
        if outlived and f"{number:06d}.ended" not in names:
            at = _json(_attempts(output, shard) / f"{number:06d}.at") if f"{number:06d}.at" in names else None
            loss = Loss(number, starts[i], fruitless=marks[i + 1] <= marks[i])
            found.append(replace(loss, rows=range(at[0], at[1]), stage=at[2], position=at[3]) if at else loss)
    return found


def check_newest(output: Location, shard: int, attempt: int, start: int = 0) -> None:
    """Raise Late where a newer attempt than `attempt` has begun, or a newer start of the run than `start`, if it is given.

    Asked by name: numbers have no gaps, and a listing may be late on an object store.
    """
    if exists(_attempts(output, shard) / f"{attempt + 1:06d}"):
        raise Late(
            f"{output}: shard {shard}: attempt {attempt} is late: attempt {attempt + 1} has begun, so nothing of this one is "
            "committed; the newer one commits the shard"
        )
    lock = output / RUN / "lock"
    if start and (exists(lock / f"{start + 1:06d}") or not exists(lock / f"{start:06d}")):
        raise Late(f"{output}: shard {shard}: another run has taken this output over; nothing of this one is committed any more")


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
        values = json.loads(read_bytes(place) or b"")
        return ShardReport(**values | {"carried": Carried(**values.get("carried", {}))})
    except (ValueError, TypeError) as error:
        raise OutputError(
            f"{place}: expected the report of a shard, found something else ({error}); remove it to do the shard anew"
        ) from error


def _json(place: Location) -> Any:
    """What a small file says; nothing where it is torn, which a crash on a disk that makes names before content may leave."""
    try:
        return json.loads(read_bytes(place) or b"{}")
    except ValueError:
        return {}


def _attempts(output: Location, shard: int) -> Location:
    return output / RUN / "attempts" / f"{shard:05d}"


def _manifest(output: Location) -> Location:
    return output / RUN / "manifest"

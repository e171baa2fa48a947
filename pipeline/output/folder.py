"""A run's folder: whose it is, how far it is, and the mark that it is done.

OUT/documents, errors, windows, tokens, states   parts, whole files only
OUT/_SUCCESS                                a summary, JSON; written last
OUT/_run/fingerprint.json                   what the run depends on: with it, the folder is a run
OUT/_run/plan.json                          its shards, written before it
OUT/_run/manifest/, attempts/               see `ledger`
OUT/_run/metrics.json                       what the last start did and how fast, and all of them, see `metrics`
OUT/_run/lock/, gate                        see `lock`, `gate`
OUT/_run/tmp/                               files in the making; what is left there by a crash is removed by the next start
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from longscan.pipeline.commit.ledger import RUN, forget_report, read_reports, report_of
from longscan.pipeline.commit.lock import RunLock
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.errors import OutputError
from longscan.pipeline.plan.fingerprint import NO_KEY, Facts, explain_difference, fingerprint
from longscan.pipeline.plan.planner import Plan
from longscan.pipeline.shards import ShardReport, SourceFile
from longscan.pipeline.storage.disk import TEMPORARY
from longscan.pipeline.storage.location import (
    Location,
    atomic_write,
    children,
    exists,
    locate,
    read_bytes,
    remove,
    remove_all,
    remove_tree,
    writing,
)
from longscan.pipeline.storage.redaction import redact
from longscan.pipeline.wording import plural
from longscan.pipeline.write.writer import TABLES, tables_of

SUCCESS = "_SUCCESS"
BEFORE_A_RUN = {"lock", "gate", "tmp", "plan.json"}
"""What a start leaves in `_run` that ended before its folder became a run."""

_PART = re.compile(r"part-\d{5}-of-\d{5}\.parquet")

log = logging.getLogger(__name__)


def open_output(path: str, facts: Mapping[str, Any], *, overwrite: bool = False) -> RunFolder:
    """The folder at `path` for a run of these facts: a new run, or the same one to go on with, or one that is finished.

    Unless the run is finished, it is locked against others until it is closed.

    Raises OutputError where the folder holds something else, or a run of other facts (it says what changed), where
    another run is at work on it, or where it cannot be written. `overwrite` removes a run, whatever its facts, but nothing else.
    """
    place = locate(path, OutputError)
    wanted: Facts = json.loads(json.dumps(facts))  # as they come back from the file: lists, not tuples
    found = _facts_of(place)
    _check_same(place, found, wanted, overwrite)
    if found is not None and not overwrite and exists(place / SUCCESS):
        return RunFolder(place, wanted, None, started=True)
    lock = RunLock(place)
    try:
        found = _facts_of(place)  # again: it may have become another's run since
        _check_same(place, found, wanted, overwrite)
        with writing(place):
            _remove_leftovers(place)
            if found is not None and overwrite:
                log.info("%s: removing the run that is there, as output.overwrite asks", place)
                _remove_run(place)
                found = None
    except BaseException:
        lock.release()
        raise
    return RunFolder(place, wanted, lock, started=found is not None)


def find_output(path: str, facts: Mapping[str, Any], *, overwrite: bool = False) -> RunFolder | None:
    """The run that `open_output` would go on with, or find finished, to be read only: nothing is locked or written. None for a new run.

    Raises OutputError where `open_output` does because of what is there.
    """
    place = locate(path, OutputError)
    wanted: Facts = json.loads(json.dumps(facts))
    found = _facts_of(place)
    _check_same(place, found, wanted, overwrite)
    return None if found is None or overwrite else RunFolder(place, wanted, None, started=True)


class RunFolder:
    """A run's output, held by this process. As a context: unlocked when it is left."""

    def __init__(self, place: Location, facts: Facts, lock: RunLock | None, *, started: bool) -> None:
        self.place = place
        self.facts = facts
        self.fingerprint = fingerprint(facts)
        self.started = started
        """A plan is there: `plan` reads it. Else `start` writes one."""
        self._lock = lock

    @property
    def number(self) -> int:
        """Of this start, counted from 1; 0 where nothing is left to do."""
        return self._lock.number if self._lock is not None else 0

    @property
    def finished(self) -> bool:
        return exists(self.place / SUCCESS)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def check(self, *, now: bool = False) -> None:
        """Raise OutputError where another run has taken this output over in the meantime. now: not as of some seconds ago."""
        if self._lock is not None:
            self._lock.check(now=now)

    def start(self, plan: Plan) -> None:
        """Make the folder a run with this plan."""
        self.check(now=True)
        atomic_write(self.place / RUN / "plan.json", plan.to_json().encode())
        content = {"fingerprint": self.fingerprint, "facts": self.facts}
        atomic_write(self.place / RUN / "fingerprint.json", json.dumps(content, separators=(",", ":")).encode())
        self.started = True

    def plan(self, files: Sequence[SourceFile]) -> Plan:
        """The plan of the run that is there; `files` are the input's, as found now."""
        data = read_bytes(self.place / RUN / "plan.json")
        if data is None:
            raise OutputError(f"{self.place}: expected its plan in {RUN}/plan.json, found none; start anew with output.overwrite=true")
        return Plan.from_json(data, files)

    def reports(self) -> dict[int, ShardReport]:
        """The shards that are done."""
        return read_reports(self.place)

    def summary(self) -> dict[str, Any]:
        """What `_SUCCESS` holds."""
        summary: dict[str, Any] = json.loads(read_bytes(self.place / SUCCESS) or b"{}")
        return summary

    def finish(self, plan: Plan, task: TaskConfig, *, keep_state: bool = False, **more: Any) -> dict[str, Any]:
        """Mark the run as done, once every shard is, and return its summary. `more`: further JSON values for it.

        keep_state: as `tables_of` takes it.

        Raises OutputError where a shard is not done, or a part of one is gone: the next start does such a shard anew.
        """
        self.check(now=True)
        reports = self.reports()
        for index in {shard.index for shard in plan.shards} - set(reports):  # a listing may be late on an object store: asked by name
            if (report := report_of(self.place, index)) is not None:
                reports[index] = report
        missing = [shard for shard in plan.shards if shard.index not in reports]
        if missing:
            raise OutputError(
                f"{self.place}: {len(missing)} of {plural(len(plan.shards), 'shard')} not done yet; run the same command again, without "
                "output.overwrite=true, to go on"
            )
        self._check_parts(plan, tables_of(task, keep_state=keep_state))
        done = [reports[shard.index] for shard in plan.shards]
        summary = {
            "fingerprint": self.fingerprint,
            "shards": len(done),
            "documents": sum(report.num_documents for report in done),
            "errors": sum(report.num_errors for report in done),
            "tokens": sum(report.num_tokens for report in done),
            "windows": sum(report.num_windows for report in done),
            **more,
        }
        remove_tree(self.place / RUN / "carries")
        remove_tree(self.place / RUN / "tmp")  # before the mark: nothing is touched behind it
        atomic_write(self.place / SUCCESS, json.dumps(summary, indent=2).encode())
        return summary

    def _check_parts(self, plan: Plan, tables: Sequence[str]) -> None:
        gone = []
        for table in tables:
            listed = set(children(self.place / table))
            # A listing may be late on an object store: only what is not there when asked for by name is gone.
            gone += [(table, s) for s in plan.shards if s.part_name not in listed and not exists(self.place / table / s.part_name)]
        for _, shard in gone:
            forget_report(self.place, shard.index)
        if gone:
            table, shard = gone[0]
            raise OutputError(
                f"{self.place}: parts of finished shards that are gone: {len(gone)}, the first {table}/{shard.part_name}; "
                "run the same command again, without output.overwrite=true, to make them anew"
            )


def begun_run(place: Location) -> Facts | None:
    """The facts of the run in a folder; None where there is none, or something else, which `open_output` refuses."""
    try:
        return _facts_of(place)
    except OutputError:
        return None


def _facts_of(place: Location) -> Facts | None:
    """The facts of the run in a folder; None where there is nothing yet. OutputError where there is something else."""
    try:
        names = [name for name in children(place) if not name.startswith(TEMPORARY)]
        data = read_bytes(place / RUN / "fingerprint.json") if names else None
        inside = set(children(place / RUN)) if names == [RUN] and data is None else set()
    except Exception as error:  # each file system has exceptions of its own
        raise OutputError(f"{place}: expected a folder, or nothing yet; it cannot be looked into: {redact(str(error))}") from error
    if data is None:
        if names and not (names == [RUN] and all(name in BEFORE_A_RUN or name.startswith(TEMPORARY) for name in inside)):
            raise OutputError(
                f"{place}: expected an empty folder or a run of longscan, found {', '.join(names[:5])}{', …' * (len(names) > 5)}; "
                "nothing was touched. Set output.path to a folder of its own"
            )
        return None
    try:
        facts: Facts = json.loads(data)["facts"]
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{place / RUN / 'fingerprint.json'}: cannot be read: {error}; set another output.path") from error
    return facts


def _check_same(place: Location, found: Facts | None, facts: Facts, overwrite: bool) -> None:
    if found is None or overwrite or fingerprint(found) == fingerprint(facts):
        return
    settings = explain_difference({**found, "files": []}, {**facts, "files": []})
    changes = "\n".join(f"  {line}" for line in explain_difference(found, facts))
    given = [line for line in settings if not line.endswith(NO_KEY)]
    ways = {
        "set these keys as they were": bool(given),
        "have what is no key as it was (the model's files, the device, what is installed)": bool(settings) and not given,
        "put the input files back as they were": found.get("files") != facts.get("files"),
    }
    how = " and ".join(way for way, counts in ways.items() if counts)
    raise OutputError(
        f"{place}: holds a run of other settings or another input. What changed from that run to this one:\n{changes}\n"
        f"To go on with that run {how}; else set another output.path, or output.overwrite=true to replace it"
    )


def _remove_leftovers(place: Location) -> None:
    """Remove what a crash has left of files in the making. Elsewhere than on a local disk, there are none."""
    remove_tree(place / RUN / "tmp")
    if place.is_local:
        above = [(place.path, children(place))] + [(folder, files) for folder, _, files in os.walk((place / RUN).path)]
        for folder, names in above:
            remove_all(locate(folder), [name for name in names if name.startswith(TEMPORARY)])


def _remove_run(place: Location) -> None:
    """Remove a run and nothing else. Stopped anywhere, what is left is a run with fewer shards done, or nothing."""
    remove(place / SUCCESS)
    remove_tree(place / RUN / "manifest")
    for table in TABLES:
        names = children(place / table)
        remove_all(place / table, [name for name in names if _PART.fullmatch(name)])
        if place.is_local and names and not children(place / table):
            os.rmdir((place / table).path)
    for name in children(place / RUN):
        if name not in ("lock", "gate", "fingerprint.json", "plan.json"):
            remove_tree(place / RUN / name)
    remove(place / RUN / "fingerprint.json")
    remove(place / RUN / "plan.json")

"""What a run's results depend on, its fingerprint; what the states that it keeps depend on, their binding; and differences, in words."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from longscan.pipeline.config import JobConfig
from longscan.pipeline.shards import SourceFile
from longscan.pipeline.wording import file_version

MOST_FILES = 5
"""Changed input files that are named one by one."""

FOLLOW_THE_TASK = ("model.context_id", "model.add_bos")
"""Besides all that is under `task`."""
NO_KEY = " (no key)"
"""Behind what no job is told: it follows from keys, or is of the model's files, the device or what is installed."""

Facts = dict[str, Any]


def run_facts(
    config: JobConfig,
    files: Sequence[SourceFile],
    *,
    model: Mapping[str, Any],
    on: tuple[str, str, int | None],
    versions: Mapping[str, Any],
    states: str | None = None,
) -> Facts:
    """Everything that the rows of the output depend on, as JSON values.

    config: with every "auto" that changes results replaced by what it stands for.
    model: hash of the model's content, of its tokenizer, and what else names them; never a path that may hold secrets.
    on: what the last bits come of: the device's kind (cuda or cpu), the implementation of the operators, and the tiles of its
    scan's spans.
    versions: of longscan, of tuning tables and the like.
    states: fingerprint of the run whose states it goes on from.

    Files count by name, size and version: moving a whole input elsewhere changes nothing.
    """
    device, backend, span_tiles = on
    task: Facts = {"name": config.task.name, "state_norm": config.task.state_norm}
    if config.task.embeds:
        task["embedding"] = asdict(config.task.embedding)
    if config.task.classifies:
        task["classify"] = {"at": config.task.classify.at, "pooling": config.task.classify.pooling}
    if config.task.scores:
        task["score"] = asdict(config.task.score)
    content = ("tokens_column", config.input.tokens_column) if config.input.tokens_column else ("text_column", config.input.text_column)
    places = {name: getattr(config.input, name) for name in ("positions_column", "positions_unit") if config.input.positions_column}
    most = config.input.max_document_bytes
    limits: Facts = {"max_read_bytes": config.input.max_read_bytes, **({} if most is None else {"max_document_bytes": most})}
    if states is not None:
        limits["states"] = states
    names = ("dtype", "add_bos", "append_eos", "decay_scale")
    return {
        "model": {**model, **{name: getattr(config.model, name) for name in names}},
        "input": {
            content[0]: content[1],
            **places,
            **limits,
            "id_column": config.input.id_column,
            "passthrough": list(config.input.passthrough),
        },
        "task": task,
        "device": device,
        "engine": {
            "backend": backend,
            "segment_tokens": config.engine.segment_tokens,
            "reset_tokens": config.engine.reset_tokens,
            "span_tiles": span_tiles,
        },
        **({"output": {"keep_state": True}} if config.output.keep_state else {}),
        "limit": config.limit,
        "seed": config.seed,
        "versions": dict(versions),
        "files": [[file.name, file.size, file.version] for file in files],
    }


def fingerprint(facts: Mapping[str, Any]) -> str:
    """sha256 of the facts in canonical JSON."""
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def provenance(facts: Mapping[str, Any]) -> Facts:
    """What goes into the footer of every output file: the facts and their fingerprint, of the input files only their number."""
    kept = {key: value for key, value in facts.items() if key != "files"}
    return {"fingerprint": fingerprint(facts), **kept, "num_input_files": len(facts["files"])}


def explain_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for each thing that changed from `old` to `new`; empty if and only if their fingerprints are equal.

    Of another task its name alone, without what follows from it. What is no key of a job ends with NO_KEY.
    """
    before, after = dict(_flat(old)), dict(_flat(new))
    tasks = [side.get("task.name", "not set") for side in (before, after)]
    other_task = tasks[0] != tasks[1]
    lines = [f"task: {tasks[0]} -> {tasks[1]}"] if other_task else []
    for key in sorted(before.keys() | after.keys()):
        if other_task and (key.startswith("task.") or key in FOLLOW_THE_TASK):
            continue
        was, now = (json.dumps(side[key], sort_keys=True) if key in side else "not set" for side in (before, after))
        if was != now:
            lines.append(f"{key}: {was} -> {now}{'' if _is_key(key) else NO_KEY}")
    return lines + _file_lines(old.get("files", []), new.get("files", []))


def _is_key(name: str) -> bool:
    """Whether a job can be told it."""
    place: Any = JobConfig()
    for part in name.split("."):
        if not hasattr(place, part):
            return False
        place = getattr(place, part)
    return True


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif prefix or key != "files":
            yield f"{prefix}{key}", value


def _file_lines(old: Sequence[Sequence[Any]], new: Sequence[Sequence[Any]]) -> list[str]:
    before = {name: (size, version) for name, size, version in old}
    after = {name: (size, version) for name, size, version in new}
    lines = []
    for name in [*before, *(name for name in after if name not in before)]:
        was, now = before.get(name), after.get(name)
        if was is None:
            lines.append(f"input file {name} is new")
        elif now is None:
            lines.append(f"input file {name} is gone")
        elif was[0] != now[0]:
            lines.append(f"input file {name} changed size: {was[0]} -> {now[0]} bytes")
        elif was[1] != now[1]:
            lines.append(f"input file {name} was modified: {_change(name, was[1], now[1])}")
    if not lines and [list(row) for row in old] != [list(row) for row in new]:
        lines.append("input files come in another order")
    more = len(lines) - MOST_FILES
    return lines if more <= 0 else [*lines[:MOST_FILES], f"and {more} more input files"]


def _change(name: str, was: str, now: str) -> str:
    """From one version of a file to another."""
    before, after = file_version(was), file_version(now)
    if before == after:
        before, after = file_version(was, exact=True), file_version(now, exact=True)
    local = was.startswith("mtime_ns:") and before != was
    again = f"; if its content is what it was, touch -d '{file_version(was, exact=True)}' {shlex.quote(name)} gives it its time again"
    return f"{before} -> {after}{again if local else ''}"


def state_facts(facts: Mapping[str, Any]) -> Facts:
    """Of a run's facts, or of a provenance, those that the numbers in its documents' states depend on, and which sums are in them."""
    model, task, engine = facts["model"], facts["task"], facts["engine"]
    tokenizer = model.get("tokenizer")
    settings: Facts = {"name": task["name"]}
    if "embedding" in task:
        settings["embedding"] = {name: task["embedding"][name] for name in ("pooling", "window_tokens", "prompt_text")}
    settings |= {name: task[name] for name in ("score", "classify") if name in task}
    return {
        "model": {name: model[name] for name in ("content", "dtype", "decay_scale", "context_id", "prompt_ids")},
        "tokenizer": None if tokenizer is None else {name: value for name, value in tokenizer.items() if name != "commit"},
        "task": settings,
        "device": facts["device"],
        "engine": {name: engine[name] for name in ("backend", "segment_tokens", "reset_tokens", "span_tiles")},
        "versions": facts["versions"],
    }


def binding(facts: Mapping[str, Any]) -> str:
    """Hash of the `state_facts`: only a run of the same one goes on from a state."""
    return fingerprint(state_facts(facts))

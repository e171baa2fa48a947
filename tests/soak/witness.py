"""What the engines of a run under fire have computed, token by token, written down apart from all that the run itself keeps.

A worker's engine is told to note in a file of its process, with the machine's clock: the shards that it opens, the tokens of each step
that it computed, and the documents whose rows are kept. What is noted outlives a kill. From all files together follows what was
computed again: where an attempt began a document, against how far anybody had come with it when that attempt opened its shard.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.engine.steps import Step
from longscan.pipeline.keep.keeper import Keeper
from longscan.pipeline.keep.shardkeeper import ShardKeeper
from longscan.pipeline.meter import Meter
from longscan.pipeline.records import Carry, DocumentRow, Outcome, Reached
from longscan.pipeline.shards import Shard
from longscan.pipeline.worker.build import build_engine
from longscan.pipeline.worker.job import Job

FOLDER = "LONGSCAN_SOAK_WITNESS"
"""Environment: where the notes go."""
RATE = "LONGSCAN_SOAK_RATE"
"""Environment: tokens/s of an engine, which sleeps for the rest: a device that is slow and leaves the machine to others."""


def witnessed(job: Job, folder: str, on_tokens: Callable[[int, int], None] | None, meter: Meter) -> Engine:
    """The engine that `build_engine` makes, with a witness beside it. For one worker in a process."""
    engine = build_engine(job, folder, on_tokens, meter)
    notes = (Path(os.environ[FOLDER]) / f"{os.uname().nodename}-{os.getpid()}").open("ab", buffering=0)

    def note(**what: Any) -> None:
        notes.write(json.dumps({"at": time.monotonic_ns(), **what}).encode() + b"\n")

    launch, deliver, opened, keep = engine._forward.launch, engine._deliver, Keeper.open, ShardKeeper.keep

    def slow_launch(step: Step) -> Any:
        time.sleep(step.num_tokens / float(os.environ[RATE]))
        return launch(step)

    def noted_deliver(step: Step, results: Any) -> None:
        entries = [(e.document.document, e.entry) for e in step.entries]
        # Without a name: nobody's tokens, which a worker tries its engine with.
        note(ran=[[document.row, entry.position, entry.num_tokens] for document, entry in entries if document.doc_id])
        deliver(step, results)

    def noted_open(keeper: Keeper, shard: Shard, attempt: int) -> ShardKeeper:
        note(open=shard.index)
        return opened(keeper, shard, attempt)

    def noted_keep(keeper: ShardKeeper, news: Sequence[Outcome | Carry | Reached]) -> list[Outcome]:
        rows = keep(keeper, news)
        if finished := [row.document.row for row in rows if isinstance(row, DocumentRow)]:
            note(kept=finished)
        return rows

    engine._forward.launch = slow_launch  # type: ignore[method-assign]
    engine._deliver = noted_deliver  # type: ignore[method-assign]
    Keeper.open = noted_open  # type: ignore[method-assign]
    ShardKeeper.keep = noted_keep  # type: ignore[method-assign]
    return engine


@dataclass
class Evidence:
    """What all the notes say."""

    computed: int = 0
    """Tokens, those that were computed again too."""
    again: list[int] = field(default_factory=list)
    """Tokens that were computed again, of each time that a document went on or began anew."""
    finished_again: list[int] = field(default_factory=list)
    """Rows that were begun again though they were kept when the attempt opened their shard."""
    resumed: int = 0
    """Times that a document went on behind its beginning."""


def read_notes(folder: Path, rows_per_shard: int) -> Evidence:
    lines = [(file.name, line) for file in folder.iterdir() for line in file.read_bytes().split(b"\n")]
    notes = [(process, json.loads(line)) for process, line in lines if line.endswith(b"}")]  # the last of a process may be torn
    notes.sort(key=lambda noted: noted[1]["at"])
    evidence = Evidence()
    reached: Counter[int] = Counter()
    kept: set[int] = set()
    attempts: dict[tuple[str, int], tuple[Counter[int], set[int], set[int]]] = {}
    for process, note in notes:
        if "open" in note:
            attempts[process, note["open"]] = Counter(reached), set(kept), set()
        kept.update(note.get("kept", ()))
        for row, position, tokens in note.get("ran", ()):
            reached_then, kept_then, begun = attempts[process, row // rows_per_shard]
            if row not in begun:
                begun.add(row)
                evidence.resumed += position > 0
                if reached_then[row] > position:
                    evidence.again.append(reached_then[row] - position)
                if row in kept_then:
                    evidence.finished_again.append(row)
            evidence.computed += tokens
            reached[row] = max(reached[row], position + tokens)
    return evidence

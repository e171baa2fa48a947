"""A shard's journey: the whole product on one screen.

Every verb is lazy and lives in the room of its name. A worker builds the tools once and sends several shards through
them at once, each in a thread of its own; all meet in the one engine, which keeps the device busy across them.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field

from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.keep.keeper import Keeper
from longscan.pipeline.meter import Meter
from longscan.pipeline.read.reader import Reader
from longscan.pipeline.shards import Shard, ShardReport
from longscan.pipeline.tokenize import DocumentTokenizer
from longscan.pipeline.write.writer import Writer


@dataclass(frozen=True, slots=True)
class Tools:
    """What a worker builds once."""

    reader: Reader
    tokenizer: DocumentTokenizer
    engine: Engine
    writer: Writer
    keeper: Keeper
    meter: Meter = field(default_factory=Meter)


def process_shard(shard: Shard, tools: Tools, attempt: int | None = None) -> ShardReport:
    """Read, tokenize, run and write one shard; what it says is committed when this returns, nothing of it if it raises.

    attempt: its number, where it has begun already.
    """
    with tools.writer.open(shard, attempt) as part, tools.keeper.open(shard, part.attempt) as kept:
        documents = kept.resume(tools.reader.read(shard), part)
        streams = tools.tokenizer.tokenize(documents)
        with closing(tools.engine.process(streams, kept)) as outcomes, tools.meter("write"):  # the verbs before it pay for themselves
            for outcome in outcomes:
                part.add(outcome)
        with tools.meter("commit"):
            report = part.commit(kept.carried)
        kept.clear()
        return report

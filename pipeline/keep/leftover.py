"""How far attempts before have come with a shard, by what they left: names of carries and headers of the journal, nothing more.

Quick and unchecked, for progress and for suspects: what is truly used of it is `keeper`'s to find out, with every checksum.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

from longscan.pipeline.commit.ledger import RUN, THREADS
from longscan.pipeline.keep.carry import named
from longscan.pipeline.keep.frames import read_headers
from longscan.pipeline.keep.journal import SUFFIX, open_binary
from longscan.pipeline.shards import ShardReport
from longscan.pipeline.storage.location import Location, children

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leftover:
    """Of one shard."""

    finished: dict[int, int] = field(default_factory=dict)
    """Ordinal -> tokens of a document whose rows are all in the journal."""
    positions: dict[int, int] = field(default_factory=dict)
    """Ordinal -> position of the newest carry of one that is not finished."""

    @property
    def tokens(self) -> int:
        """That need not be computed again."""
        return sum(self.finished.values()) + sum(self.positions.values())

    @property
    def mark(self) -> tuple[int, int]:
        """Grows with whatever is kept: documents that are finished, then tokens of those that are not."""
        return len(self.finished), sum(self.positions.values())


def leftover(output: Location, shard: int) -> Leftover:
    """What is left of a shard; nothing where it cannot be read, which is told."""
    folder = output / RUN / "carries" / f"{shard:05d}"
    try:
        names = children(folder)
        finished: dict[int, int] = {}
        for name in names:
            if name.endswith(SUFFIX):
                with closing(open_binary(folder / name)) as stream:
                    for header in read_headers(stream):
                        for run in header.get("docs", ()):
                            if run["ends"]:
                                finished[int(run["doc"])] = _tokens(run["rows"])
        positions: dict[int, int] = {}
        for ordinal, position, _ in filter(None, map(named, names)):
            if ordinal not in finished:
                positions[ordinal] = max(position, positions.get(ordinal, 0))
    except Exception as error:  # each file system has exceptions of its own
        log.warning("shard %d: how far it is cannot be read: %s", shard, error)
        return Leftover()
    return Leftover(finished, positions)


@dataclass(frozen=True, slots=True)
class Done:
    """What a start of a run finds done."""

    shards: Mapping[int, ShardReport] = field(default_factory=dict)
    """Those that are committed."""
    kept: Mapping[int, int] = field(default_factory=dict)
    """Tokens of shards that are not, which need not be computed again."""
    states: Sequence[int] = ()
    """Tokens before each state of an earlier run that this one may go on from."""


def kept_tokens(output: Location, shards: Iterable[int]) -> dict[int, int]:
    """Of those of these shards that have been begun, the tokens that need not be computed again."""
    try:
        there = set(children(output / RUN / "carries"))
    except Exception as error:
        log.warning("%s: what earlier starts have kept cannot be read: %s", output, error)
        return {}
    begun = [shard for shard in shards if f"{shard:05d}" in there]
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(begun, pool.map(lambda shard: leftover(output, shard).tokens, begun), strict=True))


def _tokens(rows: Iterable[tuple[str, dict[str, int]]]) -> int:
    return sum(int(described["num_tokens"]) for kind, described in rows if kind == "document")

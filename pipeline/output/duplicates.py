"""Ids that documents share. Allowed, since an input may hold a document twice, but a join by id would multiply their rows."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow.parquet as pq
from longscan.pipeline.plan.planner import Plan
from longscan.pipeline.shards import Shard
from longscan.pipeline.storage.location import Location
from longscan.pipeline.wording import plural

log = logging.getLogger(__name__)

TABLE_SLOTS = 1 << 22
"""8 bytes each. With more ids than this some duplicates go unseen, and no id is ever taken for another's."""
PARTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Duplicates:
    number: int
    """Documents whose id an earlier one has, as far as seen."""
    first: str | None
    """The first such id."""


def warn_of_duplicates(output: Location, plan: Plan) -> int:
    """Say, and return, how many documents of a run whose shards are all committed have an id that an earlier one has too."""
    found = count_duplicates(committed(output, plan, "doc_id"))
    if found.number:
        log.warning(
            "ids that an earlier document has too: %s, the first %r; all are in the output", plural(found.number, "document"), found.first
        )
    return found.number


def count_duplicates(ids: Iterable[str], slots: int = TABLE_SLOTS) -> Duplicates:
    """Duplicates among `ids`, in memory that does not grow with them: an id's hash stays until another one takes its slot."""
    seen = array("q", bytes(8 * slots))
    number, first = 0, None
    for doc_id in ids:
        found = hash(doc_id) or 1  # 0 is an empty slot
        slot = found % slots
        if seen[slot] == found:
            number += 1
            first = doc_id if first is None else first
        seen[slot] = found
    return Duplicates(number, first)


def committed(output: Location, plan: Plan, column: str) -> Iterator[Any]:
    """A column of documents/, from its first row to its last, of a run whose shards are all committed."""

    def read(shard: Shard) -> list[Any]:
        place = output / "documents" / shard.part_name
        with place.fs.open(place.path, "rb") as file:
            values: list[Any] = pq.read_table(file, columns=[column]).column(0).to_pylist()
        return values

    shards = iter(plan.shards)
    with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
        while some := list(islice(shards, PARTS_AT_ONCE)):
            for values in pool.map(read, some):
                yield from values

"""What a step's results become for the callers of its documents: rows, carries, states to keep, and how far each has come.

`tell` makes it, without the engine's lock; `hand_over` puts it where the caller finds it, under the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from longscan.pipeline.engine.lanes import Lanes
from longscan.pipeline.engine.opened import News, OpenDocument
from longscan.pipeline.engine.results import EntryResult
from longscan.pipeline.engine.rows import RowMaker, error_row
from longscan.pipeline.engine.steps import StepEntry
from longscan.pipeline.errors import DocumentError
from longscan.pipeline.records import Carry, Cut, Kept, Reached

Tensors = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class Told:
    """What is to be told of an entry."""

    entry: StepEntry
    news: list[News]
    finished: bool
    """Its document has come to its end, or failed here."""


def tell(e: StepEntry, result: EntryResult, maker: RowMaker) -> Told:
    """News of an entry, in the order in which a keeper takes them: the state before it, its rows, then the carry behind it."""
    document, finished = e.document, e.entry.ends
    if document.gone:
        return Told(e, [], finished=False)
    news: list[News] = []
    if e.kept is not None and document.prefix is not None:
        news.append(Kept(document.document, _carry(document, e.kept, partial(_given, result.before), 0), document.prefix))
    try:
        news += maker.advance(document.document, document.carry, e.taken, result, ends=finished, num_bytes=document.num_bytes)
    except DocumentError as error:
        news.append(error_row(document.document, error))
        finished = True
    if not finished and document.caller.keeper is not None:
        news.append(Reached(document.document.ordinal, document.carry.position))
    if not finished and e.at_risk:
        news.append(_carry(document, e.taken.cut, partial(_given, result.after), e.at_risk))
    return Told(e, news, finished)


def hand_over(told: Told, lanes: Lanes) -> None:
    """Give news to the document's caller; one that is finished leaves the book. Under the lock: the document may be gone by now."""
    e, document, keeper = told.entry, told.entry.document, told.entry.document.caller.keeper
    if keeper is not None and e.at_risk and (document.gone or told.finished):
        keeper.forget()
    if document.gone and e.kept is not None:
        document.caller.keeping -= 1
    if not document.gone:
        document.caller.news.extend(told.news)
        if told.finished:
            lanes.drop(document)


def hand_over_carry(document: OpenDocument, at_risk: int, read: Callable[[int], Tensors]) -> None:
    """Give what a document has come to to its caller, if that keeps anything. Nothing runs.

    at_risk: tokens since its last carry. read: what a slot holds, for as long as the tables are there.
    """
    tensors: Callable[[], Tensors] = partial(read, document.place.lane)
    if document.load is not None:
        tensors = partial(_given, document.load)
    if document.caller.keeper is not None:
        document.caller.news.append(_carry(document, document.tokens.cut, tensors, at_risk))


def _carry(document: OpenDocument, cut: Cut, tensors: Callable[[], Tensors], at_risk: int) -> Carry:
    return Carry(document.document.ordinal, replace(document.carry), cut, tensors, at_risk)


def _given(tensors: Tensors) -> Tensors:
    return tensors

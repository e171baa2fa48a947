"""The nouns inside the engine: callers, their documents between the first token and the last result, and tokens at hand.

Plain records. `lanes` keeps the book of them, under the engine's lock; `steps` has what a step takes of them. What a document
carries on the host (`HostCarry`) is moved on by the rows of its results (`rows`), later than its place in the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from longscan.pipeline.engine.schedule import Candidate
from longscan.pipeline.records import (
    BEGINNING,
    BYTES_PER_TOKEN,
    Carry,
    Cut,
    Document,
    HostCarry,
    Ids,
    Kept,
    Outcome,
    Prefix,
    Reached,
    TokenBlock,
)

Offsets = npt.NDArray[np.int64]
News = Outcome | Carry | Kept | Reached
"""What the engine tells a caller."""

NO_TOKEN = -1
"""As the token after the last: the document has ended."""


@dataclass(slots=True)
class Taken:
    """The tokens of one entry, and the one that follows."""

    ids: Ids
    next_id: int
    char_starts: Offsets | None = None
    char_ends: Offsets | None = None
    next_start: int = 0
    """Where the token of `next_id` begins, in code points, where there are offsets and such a token."""
    cut: Cut = BEGINNING
    """The last safe cut at or before the end of these tokens."""


class TokenQueue:
    """Tokens of one document that are cut and not yet scheduled."""

    def __init__(self, cut: Cut = BEGINNING) -> None:
        """cut: where the tokens begin, or the last safe cut before that."""
        self.held = 0
        self.cut = cut
        """The last safe cut at or before the next token."""
        self._blocks: deque[TokenBlock] = deque()

    def push(self, block: TokenBlock) -> None:
        if len(block.ids):
            self._blocks.append(block)
            self.held += len(block.ids)

    def take(self, count: int) -> Taken:
        """Remove the first `count` tokens."""
        assert 0 < count <= self.held
        if count == self.held and len(self._blocks) == 1:  # as short documents go
            (block,) = self._blocks
            self._blocks.clear()
            self.held, self.cut = 0, block.end or self.cut
            return Taken(block.ids, NO_TOKEN, block.char_starts, block.char_ends, cut=self.cut)
        parts = []
        missing = count
        while missing:
            block = self._blocks.popleft()
            if len(block.ids) > missing:
                self._blocks.appendleft(block.part(missing, len(block.ids)))
                block = block.part(0, missing)
            parts.append(block)
            self.cut = block.end or self.cut
            missing -= len(block.ids)
        self.held -= count
        next_id = int(self._blocks[0].ids[0]) if self._blocks else NO_TOKEN
        starts = [part.char_starts for part in parts if part.char_starts is not None]
        ends = [part.char_ends for part in parts if part.char_ends is not None]
        ids = parts[0].ids if len(parts) == 1 else np.concatenate([part.ids for part in parts])
        if len(starts) < len(parts) or len(ends) < len(parts):
            return Taken(ids, next_id, cut=self.cut)
        after = self._blocks[0].char_starts if self._blocks else None
        return Taken(ids, next_id, np.concatenate(starts), np.concatenate(ends), 0 if after is None else int(after[0]), self.cut)


class Keeper(Protocol):
    """Who keeps what a caller's documents have come to, so that they can go on after a stop."""

    @property
    def checkpoint_tokens(self) -> int:
        """Tokens of a document that a stop may cost: a carry is made, and written, before it has come so far from the one before."""

    def reserve(self) -> bool:
        """Whether a carry may be made now; it then comes through `keep`, or `forget` is called instead. Called under the engine's lock."""

    def forget(self) -> None:
        """A carry that was reserved does not come."""

    def keep(self, news: Sequence[News]) -> list[Outcome]:
        """Take a caller's news in their order, in the caller's thread; returns the rows among them."""


@dataclass(slots=True, eq=False)
class Caller:
    """One call of `Engine.process`: its documents inside the engine, and what waits to be read."""

    keeper: Keeper | None = None
    documents: set[OpenDocument] = field(default_factory=set)
    news: deque[News] = field(default_factory=deque)
    """In the order in which they came to be, for every document: a carry stands behind the rows before its position."""
    held_tokens: int = 0
    """Cut and not yet scheduled. Rows come of tokens only, so a bound on these bounds the rows of a caller that does not read."""
    keeping: int = 0
    """States that are copied for it and that it has not put away yet."""
    idle: bool = False
    """It waits for the engine and has nothing to bring before something changes."""
    fed: bool = False
    """All tokens of all its documents are in the engine, or were: it only reads."""

    @property
    def bringing(self) -> bool:
        """More tokens may come of it, whatever the engine does."""
        return not (self.idle or self.fed)


@dataclass(slots=True, eq=False)
class OpenDocument:
    """A document between its first token and its last result."""

    caller: Caller
    document: Document
    """Without its text or token ids: those live only as long as there is something to cut."""
    num_bytes: int | None
    """Of the text in UTF-8."""
    place: Candidate
    """Where it is in the schedule."""
    estimated_tokens: int = 0
    bytes_per_token: float = BYTES_PER_TOKEN
    """Of its text, as far as that is cut; of token ids, what a plan takes them for."""
    tokens: TokenQueue = field(default_factory=TokenQueue)
    carry: HostCarry = field(default_factory=HostCarry)
    """What it carries on the host, as far as its results are in: behind its place by the steps that are on the device."""
    saved: int = 0
    """Position of the newest carry that was made."""
    load: Mapping[str, torch.Tensor] | None = None
    """The device's part of the carry that it goes on from, or of what its lane held when it was set aside; until its next entry."""
    gone: bool = False
    """Failed, or given up by its caller: results still on their way are dropped."""
    complete: bool = False
    """Its last token is at hand, or was."""
    prefix: Prefix | None = None
    """Of a document whose state is to be kept."""
    keep_at: int | None = None
    """Where it is kept, once that is known: the last border of segments whose next token is settled. An entry begins there."""

    @property
    def keeps(self) -> bool:
        """Its next entry begins where its state is to be kept."""
        return self.keep_at is not None and self.keep_at == self.place.position and self.place.ready > 0

    @property
    def wants_tokens(self) -> bool:
        """It can go into no step until more of its tokens are at hand."""
        return not self.place.ready and not self.place.complete

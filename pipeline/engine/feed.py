"""One caller's streams on their way into the engine: which one to pull next, and how far ahead.

Streams are pulled in the caller's own thread, between the rows that it reads: whoever does not read does not feed, so
a caller's rows are bounded by the tokens it fed, and the engine never waits for a reader. Documents are opened one
after the other, and a next one only when those at hand do not promise enough tokens: the texts of a few giants, or of
many short documents, are in memory, never of many giants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from longscan.kernels.segments import NO_LANE, TILE
from longscan.pipeline.engine.lanes import Lanes
from longscan.pipeline.engine.opened import Caller, OpenDocument
from longscan.pipeline.engine.rows import RowMaker, error_row
from longscan.pipeline.errors import DocumentError
from longscan.pipeline.records import Document, ErrorRow, TokenBlock, TokenStream

STEPS_AHEAD = (6, 5, 3, 2)
"""A caller holds tokens for so many steps, by how many before it still bring some, unless its documents need more to move at all. Steps
take of each as much as its part of what all hold: alike, callers that began together would end together, and none would have tokens
while all are at their ends and beginnings."""

DOCUMENT_STEPS_AHEAD = 2
"""Of these, one document holds at most as many: the step that runs and the next."""

STEPS_ON_DEVICE = 2
"""A caller's open documents take up a tile each, however short they are, of at most the steps ahead and these."""

MIN_OPEN = 2
"""Documents open at a time however long they are, so that the end of one does not leave the engine without the next."""


OPENED_SHARE, MOST_OPENED = 4, 256
"""Short documents are opened together: until they come to this part of a step, or are so many."""


@dataclass(slots=True, eq=False)
class Source:
    """A document whose tokens are not all cut yet."""

    stream: TokenStream
    document: Document
    """The same without its text or token ids."""
    opened: OpenDocument | None = None
    pulled: int = 0
    """Tokens so far, those before its carry included."""

    @property
    def expected(self) -> int:
        """Tokens that are still to come, by estimate."""
        return max(0, self.stream.estimated_tokens - self.pulled)


@dataclass(slots=True)
class Pulled:
    """What came of one pull: the next blocks of a document, or the error that ends it."""

    source: Source
    blocks: list[TokenBlock]
    complete: bool = False
    error: DocumentError | None = None


class Feed:
    """The sources of one caller. `choose` and `give` are called under the engine's lock, what `choose` returns without it."""

    def __init__(
        self, caller: Caller, streams: Iterator[TokenStream | ErrorRow], lanes: Lanes, maker: RowMaker, vocab_size: int | None
    ) -> None:
        self.caller = caller
        self._maker = maker
        self._streams = streams
        self._lanes = lanes
        self._vocab_size = vocab_size
        self._sources: list[Source] = []
        self._exhausted = False

    @property
    def done(self) -> bool:
        """Every stream has been pulled to its end, and the engine has given every result."""
        return self._exhausted and not self._sources and not self.caller.documents

    def choose(self, before: int = 0) -> Callable[[], Pulled | ErrorRow | list[Pulled | ErrorRow | None] | None] | None:
        """What to pull next: call it without the lock and hand its result to `give`. None where nothing is needed now.

        before: callers that began earlier and still bring tokens.
        A document that holds a lane and cannot go on comes first, whatever is at hand elsewhere: nobody else can free its lane.
        """
        self._sources = [s for s in self._sources if s.opened is not None and not s.opened.gone]
        self._tell_fed()
        opened = [(s, s.opened) for s in self._sources if s.opened is not None]
        hungry = [(s, d) for s, d in opened if d.wants_tokens]
        stuck = next((s for s, d in hungry if d.place.lane != NO_LANE), None)
        if stuck is not None:
            return partial(self._pull, stuck)
        ahead = STEPS_AHEAD[min(before, len(STEPS_AHEAD) - 1)]
        if self.caller.held_tokens >= ahead * self._lanes.step_tokens:
            return None
        if hungry:
            return partial(self._pull, hungry[0][0])
        if self._may_open(ahead):
            return self._open_several
        most = DOCUMENT_STEPS_AHEAD * self._lanes.step_tokens
        short = min((d.tokens.held for _, d in opened), default=most)
        return next((partial(self._pull, s) for s, d in opened if d.tokens.held == short < most), None)

    def give(self, pulled: Pulled | ErrorRow | list[Pulled | ErrorRow | None] | None) -> None:
        """Hand what was pulled to the engine; None says that there are no more streams."""
        if isinstance(pulled, list):
            for one in pulled:
                self.give(one)
        elif pulled is None:
            self._exhausted = True
        elif isinstance(pulled, ErrorRow):
            self.caller.news.append(pulled)
        elif pulled.error is not None:
            self._fail(pulled.source, pulled.error)
        else:
            self._push(pulled)
        self._tell_fed()

    def close(self) -> None:
        """Close what was being read, as far as it can be closed."""
        for iterator in (*(source.stream.blocks for source in self._sources), self._streams):
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def _tell_fed(self) -> None:
        self.caller.fed = self._exhausted and not self._sources

    def _may_open(self, ahead: int) -> bool:
        if len(self.caller.documents) * TILE >= (ahead + STEPS_ON_DEVICE) * self._lanes.step_tokens:
            return False
        if self._exhausted or len(self._sources) < MIN_OPEN:
            return not self._exhausted
        expected = sum(source.expected for source in self._sources)
        return self.caller.held_tokens + expected < ahead * self._lanes.step_tokens

    def _open_several(self) -> list[Pulled | ErrorRow | None]:
        """Short documents together, so that the lock, the choice and the engine's waking come once for them: as many as make a
        part of a step, and none behind one that is not all there."""
        opened: list[Pulled | ErrorRow | None] = []
        rows = 0
        while len(opened) < MOST_OPENED and rows * OPENED_SHARE < self._lanes.step_tokens:
            pulled = self._open()
            opened.append(pulled)
            if not isinstance(pulled, Pulled) or not pulled.complete:
                break
            rows += -(-pulled.source.pulled // TILE) * TILE
        return opened

    def _open(self) -> Pulled | ErrorRow | None:
        stream = next(self._streams, None)
        if stream is None or isinstance(stream, ErrorRow):
            return stream
        document = stream.document.without_content()
        if document.carry is None:
            return self._pull(Source(stream, document))
        tensors = document.carry.tensors()  # read here, where the engine does not wait for it
        carry = replace(document.carry, tensors=lambda: tensors)
        return self._pull(Source(stream, replace(document, carry=carry), pulled=carry.position))

    def _pull(self, source: Source) -> Pulled:
        """The next blocks of a document: at least one, and as many as it takes for the document to go into a step."""
        blocks: list[TokenBlock] = []
        held = source.opened.tokens.held if source.opened is not None else 0
        try:
            for block in source.stream.blocks:
                self._check_ids(block, source.pulled)
                blocks.append(block)
                source.pulled += len(block.ids)
                held += len(block.ids)
                if held > self._lanes.segment_tokens:
                    return Pulled(source, blocks)
        except DocumentError as error:
            return Pulled(source, [], error=error)
        return Pulled(source, blocks, complete=True)

    def _check_ids(self, block: TokenBlock, position: int) -> None:
        """An id outside the vocabulary must not reach the device: there it ends the process, not the document."""
        if self._vocab_size is None or not len(block.ids):
            return
        # As unsigned numbers, negative ones are large: one pass tells that all is well.
        if np.maximum.reduce(block.ids.view(np.uint32)) >= self._vocab_size:
            wrong = np.flatnonzero((block.ids < 0) | (block.ids >= self._vocab_size))
            raise DocumentError(
                "engine",
                f"token {position + int(wrong[0])}: expected an id from 0 to {self._vocab_size - 1}, the model's vocabulary, "
                f"found {int(block.ids[wrong[0]])}; were these ids made by another tokenizer?",
            )

    def _push(self, pulled: Pulled) -> None:
        source = pulled.source
        if source.opened is None:
            if not source.pulled:
                self.caller.news.append(self._maker.empty(source.document, source.stream.num_bytes))
                return
            stream = source.stream
            source.opened = self._lanes.admit(
                self.caller, source.document, stream.num_bytes, stream.prefix, estimated_tokens=stream.estimated_tokens
            )
            source.document = source.opened.document  # the carry is large, and the engine has it now
            self._sources.append(source)
            if pulled.blocks and pulled.blocks[0].replaced:
                source.opened.carry.replaced = pulled.blocks[0].replaced
        if pulled.complete:
            self._sources.remove(source)
        if not source.opened.gone:
            self._lanes.push(source.opened, pulled.blocks, complete=pulled.complete)

    def _fail(self, source: Source, error: DocumentError) -> None:
        if source.opened is None or not source.opened.gone:
            self.caller.news.append(error_row(source.document, error))
        if source.opened is not None:
            self._sources.remove(source)
            self._lanes.drop(source.opened)

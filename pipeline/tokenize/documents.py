"""Documents -> token streams, in order, ahead of who reads them, in parallel over documents and inside one giant."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from longscan.pipeline.errors import ConfigError, DocumentError
from longscan.pipeline.meter import Meter, MeteredExecutor
from longscan.pipeline.records import BEGINNING, BYTES_PER_TOKEN, Document, ErrorRow, TokenBlock, TokenStream
from longscan.pipeline.tokenize.blocks import BatchBlocks, EosBlocks, LaterBlocks, checked_ids, close_iterator, encode_batch, id_blocks
from longscan.pipeline.tokenize.prefix import prefix_of_ids, prefix_of_text
from longscan.pipeline.tokenize.prompt import Prompt
from longscan.pipeline.tokenize.texts import PIECE_BYTES, TextBlocks, last_cut
from longscan.pipeline.tokenize.tokenizer import TextTokenizer

SHORT_SHARE = 4
"""A text of at most this part of a piece waits for others, to be tokenized with them in one call."""

MAX_DOCUMENTS_AHEAD = 1024

FIRST_PIECES = 4
"""Pieces that are read before the first document is given. From then on what is read ahead grows by twice what was given, so that a
device begins soon: who reads for it cannot feed it meanwhile, and the cores tokenize in the order of reading."""


class DocumentTokenizer:
    """Gives documents to a tokenizer, with `workers` threads that run outside of Python's lock.

    One may serve several callers at once. Ahead of a caller it reads documents of a few pieces' bytes together, never past
    a long one, and ahead of who reads a text's blocks it tokenizes `workers` + 1 pieces.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        *,
        vocab_size: int,
        workers: int,
        with_offsets: bool = False,
        append_eos: bool = False,
        piece_bytes: int = PIECE_BYTES,
        prompt: Prompt | None = None,
        meter: Meter | None = None,
        prefix_beyond: int | None = None,
        gives_way: bool = False,
    ) -> None:
        """tokenizer: None where documents bring token ids. vocab_size: the model's, for those ids.

        with_offsets: blocks say where in the text their tokens stand. append_eos: after a document's last token; a document
        without tokens stays so. prompt: comes before every text, and is in no block. meter: charged with the stage tokenize.
        prefix_beyond: streams of documents of more bytes of text than this, or ids, have a prefix, and blocks say what is settled; None:
        none have. gives_way: where all cores are busy, the threads that feed a GPU come before these.

        Raises ConfigError where there is no EOS token to append.
        """
        self._eos_id = tokenizer.eos_id if tokenizer is not None and append_eos else None
        if append_eos and self._eos_id is None:
            found = "no tokenizer, because documents bring token ids" if tokenizer is None else "none"
            raise ConfigError(f"model.append_eos: expected a tokenizer with an EOS token, found {found}; set model.append_eos=false")
        self._prompt = prompt
        self._tokenizer, self._vocab_size, self._workers = tokenizer, vocab_size, workers
        self._with_offsets, self.piece_bytes = with_offsets, piece_bytes
        self._prefix_beyond = prefix_beyond
        self.meter = meter or Meter()
        # Threads of our own instead of the library's: as many as asked for, and each takes what is next when it is free.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._executor = MeteredExecutor(workers, meter=self.meter, stage="tokenize", gives_way=gives_way)

    def __enter__(self) -> DocumentTokenizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads. Streams that are still read then fail."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    @property
    def ahead_bytes(self) -> int:
        """Text of documents that are read before they are asked for."""
        return 2 * (self._workers + 1) * self.piece_bytes

    def tokenize(self, documents: Iterator[Document | ErrorRow]) -> Iterator[TokenStream | ErrorRow]:
        """One for each, in order. A document whose token ids no model of this vocabulary takes becomes an error row."""
        ahead = Ahead(self, documents)
        try:
            while (outcome := ahead.next()) is not None:
                yield outcome
        finally:
            ahead.close()

    def stream(self, document: Document) -> TokenStream:
        """The tokens of one document, from its carry on where it has one.

        Raises DocumentError where its token ids are not valid.
        """
        start = BEGINNING if document.carry is None else document.carry.cut
        if document.token_ids is not None:
            ids = checked_ids(document.token_ids, self._vocab_size)
            dressed = self._dressed(id_blocks(ids, start.token), document, with_offsets=False)
            return TokenStream(document, dressed, None, len(ids), prefix_of_ids(ids) if self._has_prefix(len(ids)) else None)
        text = text_of(document)
        settled = last_cut(text, self._text_tokenizer.cuts) if self._has_prefix(text.nbytes) else None
        blocks = TextBlocks(
            text,
            self._text_tokenizer,
            self._executor,
            ahead=self._workers + 1,
            start=start,
            piece_bytes=self.piece_bytes,
            with_offsets=self._with_offsets,
            prompt=self._prompt,
            settled=settled,
        )
        stream = self._text_stream(document, self._dressed(blocks, document, with_offsets=self._with_offsets))
        return replace(stream, prefix=prefix_of_text(text, settled)) if settled else stream

    def short_streams(self, documents: list[Document]) -> list[TokenStream]:
        """The same for several documents of little text, tokenized in one call."""
        texts = [text_of(document) for document in documents]
        batch = self._executor.submit(encode_batch, texts, self._text_tokenizer, self._with_offsets, self._prompt)
        streams = []
        for index, (document, text) in enumerate(zip(documents, texts, strict=True)):
            blocks = BatchBlocks(batch, index, text.nbytes)
            streams.append(self._text_stream(document, self._dressed(blocks, document, with_offsets=self._with_offsets)))
        return streams

    def has_company(self, document: Document) -> bool:
        """Its text is short, and may wait for others to be tokenized with."""
        if document.text is None or document.carry is not None or self._has_prefix(document.text.nbytes):
            return False
        return document.text.nbytes <= self.piece_bytes // SHORT_SHARE

    def _has_prefix(self, length: int) -> bool:
        return self._prefix_beyond is not None and length > self._prefix_beyond

    @property
    def _text_tokenizer(self) -> TextTokenizer:
        assert self._tokenizer is not None, "without a tokenizer, documents bring token ids"
        return self._tokenizer

    def _dressed(self, blocks: Iterator[TokenBlock], document: Document, *, with_offsets: bool) -> Iterator[TokenBlock]:
        """With the EOS token at their end, from the position on that the document has come to."""
        carry = document.carry
        if self._eos_id is not None:
            blocks = EosBlocks(blocks, self._eos_id, start=BEGINNING if carry is None else carry.cut, with_offsets=with_offsets)
        return blocks if carry is None else LaterBlocks(blocks, carry.position - carry.cut.token)

    @staticmethod
    def _text_stream(document: Document, blocks: Iterator[TokenBlock]) -> TokenStream:
        num_bytes = text_of(document).nbytes
        return TokenStream(document, blocks, num_bytes, -(-num_bytes // BYTES_PER_TOKEN))


class Ahead:
    """What one caller's documents have become and has not been asked for yet."""

    def __init__(self, tokenizer: DocumentTokenizer, documents: Iterator[Document | ErrorRow]) -> None:
        self._tokenizer = tokenizer
        self._documents = documents
        self._outcomes: deque[TokenStream | ErrorRow] = deque()
        self._short: list[Document] = []
        self._short_bytes = 0
        self._ready_bytes = self._given_bytes = 0
        self._exhausted = False

    def next(self) -> TokenStream | ErrorRow | None:
        # Not one for one: then the short ones would have no company.
        if 2 * self._ready_bytes <= self._ahead_bytes and 2 * len(self._outcomes) <= MAX_DOCUMENTS_AHEAD:
            with self._tokenizer.meter("tokenize"):
                self._read()
        if not self._outcomes:
            return None
        outcome = self._outcomes.popleft()
        num_bytes = _text_bytes(outcome)
        self._ready_bytes -= num_bytes
        self._given_bytes += num_bytes
        return outcome

    @property
    def _ahead_bytes(self) -> int:
        """Text that is read before it is asked for, as far as the caller has come."""
        return min(FIRST_PIECES * self._tokenizer.piece_bytes + 2 * self._given_bytes, self._tokenizer.ahead_bytes)

    def close(self) -> None:
        for outcome in self._outcomes:
            if isinstance(outcome, TokenStream):
                close_iterator(outcome.blocks)
        self._outcomes.clear()
        close_iterator(self._documents)

    def _read(self) -> None:
        """Read on until enough is under way."""
        while not self._exhausted and not self._is_full():
            document = next(self._documents, None)
            if document is None:
                self._exhausted = True
            elif isinstance(document, ErrorRow):
                self._add([document])
            elif not self._tokenizer.has_company(document):
                self._add([self._stream(document)])
            else:
                self._short.append(document)
                self._short_bytes += text_of(document).nbytes
                if self._short_bytes >= self._tokenizer.piece_bytes:
                    self._add([])
        self._add([])

    def _is_full(self) -> bool:
        documents = len(self._outcomes) + len(self._short)
        return self._ready_bytes + self._short_bytes >= self._ahead_bytes or documents >= MAX_DOCUMENTS_AHEAD

    def _add(self, outcomes: list[TokenStream | ErrorRow]) -> None:
        """Behind the short documents that wait, which wait no longer."""
        if self._short:
            outcomes = [*self._tokenizer.short_streams(self._short), *outcomes]
            self._short, self._short_bytes = [], 0
        self._outcomes += outcomes
        self._ready_bytes += sum(map(_text_bytes, outcomes))

    def _stream(self, document: Document) -> TokenStream | ErrorRow:
        try:
            return self._tokenizer.stream(document)
        except DocumentError as error:
            name, message = type(error).__name__, str(error)
            return ErrorRow(document.ordinal, document.doc_id, document.file, document.row, error.stage, name, message)


def text_of(document: Document) -> memoryview:
    assert document.text is not None, "a document has a text or token ids"
    return document.text


def _text_bytes(outcome: TokenStream | ErrorRow) -> int:
    """Bytes that a document keeps in memory while it waits; token ids count as what they are."""
    if isinstance(outcome, ErrorRow):
        return 0
    document = outcome.document
    return document.token_ids.nbytes if document.token_ids is not None else text_of(document).nbytes

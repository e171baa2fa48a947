"""Documents to token streams: the ids of the whole, in order, ahead, from several threads, and what becomes of the odd ones."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from longscan.pipeline.errors import ConfigError, DocumentError
from longscan.pipeline.records import BEGINNING, Carry, Cut, Document, ErrorRow, HostCarry, Ids, TokenBlock, TokenStream
from longscan.pipeline.tokenize import DocumentTokenizer, TextTokenizer
from tokenizer_zoo import PROVEN, UNPROVEN, WORDS, texts
from tokenizers import Tokenizer

NO_COLUMNS = pa.RecordBatch.from_pylist([{}])
LONG = WORDS * 20


def document(text: str | None = None, ids: Ids | None = None, ordinal: int = 0) -> Document:
    view = None if text is None else memoryview(pa.py_buffer(text.encode()))
    return Document(ordinal, f"a.parquet#{ordinal}", "a.parquet", ordinal, view, ids, NO_COLUMNS)


def carried(document: Document, cut: Cut, beyond: int = 0) -> Document:
    """The document, to go on `beyond` tokens behind a cut."""
    return replace(document, carry=Carry(document.ordinal, HostCarry(cut.token + beyond), cut, dict))


@cache
def tokenizer(name: str) -> TextTokenizer:
    return TextTokenizer({**PROVEN, **UNPROVEN}[name](), eos_id=0)


def whole(name: str, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    backend = Tokenizer.from_str({**PROVEN, **UNPROVEN}[name]().to_str())
    backend.post_processor = None
    backend.encode_special_tokens = True
    encoding = backend.encode(text, add_special_tokens=False)
    return encoding.ids, encoding.offsets


def ids_of(blocks: Iterator[TokenBlock]) -> list[int]:
    return [int(token) for block in blocks for token in block.ids]


def streams_of(outcomes: Iterator[TokenStream | ErrorRow]) -> Iterator[TokenStream]:
    for outcome in outcomes:
        assert isinstance(outcome, TokenStream)
        yield outcome


@pytest.mark.parametrize("name", [*PROVEN, *UNPROVEN])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(parts=st.lists(texts, min_size=1, max_size=4), piece_bytes=st.integers(16, 64))
def test_blocks_together_are_the_whole_and_say_where_they_end(name: str, parts: list[str], piece_bytes: int) -> None:
    text = " ".join(parts)
    ids, offsets = whole(name, text)
    with DocumentTokenizer(tokenizer(name), vocab_size=1000, workers=1, with_offsets=True, piece_bytes=piece_bytes) as tested:
        blocks = list(tested.stream(document(text)).blocks)
    assert ids_of(iter(blocks)) == ids
    starts = [int(start) for block in blocks if block.char_starts is not None for start in block.char_starts]
    ends = [int(end) for block in blocks if block.char_ends is not None for end in block.char_ends]
    assert list(zip(starts, ends, strict=True)) == offsets
    ends_of_blocks = [block.end for block in blocks]
    seen = 0
    for block, end in zip(blocks, ends_of_blocks, strict=True):
        assert end is not None
        seen += len(block.ids)
        assert (end.char, end.token) == (len(text.encode()[: end.byte].decode()), seen)
    if text:
        assert ends_of_blocks[-1] is not None
        assert ends_of_blocks[-1].byte == len(text.encode())
    else:
        assert not blocks


@pytest.mark.parametrize("name", ["neox", "llama3", "llama2", "bert"])
def test_a_stream_goes_on_from_where_any_block_ended(name: str) -> None:
    with DocumentTokenizer(tokenizer(name), vocab_size=1000, workers=2, with_offsets=True, append_eos=True, piece_bytes=100) as tested:
        blocks = list(tested.stream(document(LONG)).blocks)
        assert len(blocks) > 20
        for index, block in enumerate(blocks[:-1]):
            assert block.end is not None
            rest = list(tested.stream(carried(document(LONG), block.end)).blocks)
            assert ids_of(iter(rest)) == ids_of(iter(blocks[index + 1 :]))
            assert [b.end for b in rest] == [b.end for b in blocks[index + 1 :]]
            left = ids_of(iter(blocks[index + 1 :]))
            for beyond in (1, len(rest[0].ids), len(rest[0].ids) + 1, len(left) - 1):
                assert ids_of(tested.stream(carried(document(LONG), block.end, beyond)).blocks) == left[beyond:]
            again, before = rest[0].char_starts, blocks[index + 1].char_starts
            assert again is not None
            assert before is not None
            assert list(again) == list(before)


def test_token_ids_go_on_from_where_a_block_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longscan.pipeline.tokenize.blocks.ID_BLOCK", 7)
    ids = np.arange(40, dtype=np.int32)
    with DocumentTokenizer(None, vocab_size=40, workers=1) as tested:
        blocks = list(tested.stream(document(ids=ids)).blocks)
        assert ids_of(iter(blocks)) == list(ids)
        assert blocks[2].end is not None
        assert ids_of(tested.stream(carried(document(ids=ids), blocks[2].end)).blocks) == list(range(21, 40))


def mixed(count: int) -> list[Document | ErrorRow]:
    """Short and long texts, empty ones, token ids good and bad, and error rows."""
    kinds: list[Document | ErrorRow] = [
        document(WORDS),
        document(""),
        document(LONG),
        document("a"),
        ErrorRow(0, "x", "a.parquet", 4, "read", "DocumentError", "text: expected a value, found null"),
        document(ids=np.array([1, 2, 3], dtype=np.int32)),
        document(ids=np.array([1, 1000, 3], dtype=np.int32)),
        document(ids=np.array([-1], dtype=np.int32)),
        document(ids=np.array([], dtype=np.int32)),
        document(WORDS[:100]),
    ]
    return [replace(kinds[index % len(kinds)], ordinal=index) for index in range(count)]


@pytest.mark.parametrize("piece_bytes", [64, 1000, 1 << 16])
def test_every_document_comes_back_once_in_order_with_its_ids(piece_bytes: int) -> None:
    documents = mixed(60)
    with DocumentTokenizer(tokenizer("neox"), vocab_size=1000, workers=2, piece_bytes=piece_bytes) as tested:
        outcomes = list(tested.tokenize(iter(documents)))
        assert len(outcomes) == len(documents)
        for given_, outcome in zip(documents, outcomes, strict=True):
            if isinstance(outcome, ErrorRow):
                assert outcome == given_ or (isinstance(given_, Document) and outcome.stage == "tokenize")
                continue
            assert outcome.document is given_
            assert isinstance(given_, Document)
            if given_.text is not None:
                text = bytes(given_.text).decode()
                assert (ids_of(outcome.blocks), outcome.num_bytes) == (whole("neox", text)[0], len(text.encode()))
                assert outcome.estimated_tokens == -(-len(text.encode()) // 4)
            else:
                assert given_.token_ids is not None
                assert (ids_of(outcome.blocks), outcome.num_bytes) == (list(given_.token_ids), None)
                assert outcome.estimated_tokens == len(given_.token_ids)


def test_token_ids_outside_the_vocabulary_say_where() -> None:
    bad = document(ids=np.array([1, 2, 50, 3], dtype=np.int32), ordinal=3)
    with DocumentTokenizer(None, vocab_size=50, workers=1) as tested:
        (outcome,) = tested.tokenize(iter([bad]))
        floats = tested.tokenize(iter([document(ids=np.array([1.0, 2.0]))]))
        assert isinstance(next(floats), ErrorRow)
    assert isinstance(outcome, ErrorRow)
    assert (outcome.ordinal, outcome.doc_id, outcome.stage, outcome.error) == (3, "a.parquet#3", "tokenize", "DocumentError")
    assert outcome.message.startswith("token 2: expected an id from 0 to 49, the model's vocabulary, found 50")


def test_streams_can_be_read_in_turns_and_long_after() -> None:
    with DocumentTokenizer(tokenizer("gpt2"), vocab_size=1000, workers=2, piece_bytes=100) as tested:
        streams = list(streams_of(tested.tokenize(iter([document(LONG), document(WORDS), document(LONG)]))))
        read: list[list[int]] = [[] for _ in streams]
        live = dict(enumerate(streams))
        while live:
            for index, stream in list(live.items()):
                block = next(stream.blocks, None)
                if block is None:
                    del live[index]
                else:
                    read[index] += block.ids.tolist()
    assert read == [whole("gpt2", text)[0] for text in (LONG, WORDS, LONG)]


def test_several_callers_share_one() -> None:
    documents = [replace(d, ordinal=i) for i, d in enumerate([document(LONG), document(WORDS), document("a b")] * 15)]
    expected = [whole("qwen", bytes(d.text or b"").decode())[0] for d in documents[:3]] * 15
    with DocumentTokenizer(tokenizer("qwen"), vocab_size=1000, workers=2, piece_bytes=200) as tested, ThreadPoolExecutor(4) as callers:
        results = callers.map(lambda _: [ids_of(s.blocks) for s in streams_of(tested.tokenize(iter(documents)))], range(4))
        assert all(result == expected for result in results)


@pytest.mark.parametrize("text", [WORDS, LONG])
def test_eos_follows_the_last_token_and_stands_behind_the_text(text: str) -> None:
    with DocumentTokenizer(tokenizer("gpt2"), vocab_size=1000, workers=1, append_eos=True, with_offsets=True, piece_bytes=4000) as tested:
        (stream,) = streams_of(tested.tokenize(iter([document(text)])))
        blocks = list(stream.blocks)
    assert ids_of(iter(blocks)) == [*whole("gpt2", text)[0], 0]
    last = blocks[-1]
    assert last.end is None
    assert last.char_starts is not None
    assert last.char_ends is not None
    assert [*last.char_starts, *last.char_ends] == [len(text), len(text)]


def test_no_eos_for_a_document_without_tokens_and_for_none_asked() -> None:
    with DocumentTokenizer(tokenizer("bert"), vocab_size=1000, workers=1, append_eos=True) as tested:
        empty = [document(""), document("\x00\x01"), document("\x00" * 300_000), document(ids=np.array([], dtype=np.int32))]
        assert [ids_of(stream.blocks) for stream in streams_of(tested.tokenize(iter(empty)))] == [[], [], [], []]


def test_eos_after_token_ids_stands_nowhere_in_a_text() -> None:
    given_ = document(ids=np.array([5], dtype=np.int32))
    with DocumentTokenizer(tokenizer("bert"), vocab_size=1000, workers=1, append_eos=True, with_offsets=True) as tested:
        blocks = list(tested.stream(given_).blocks)
    assert ids_of(iter(blocks)) == [5, 0]
    assert [(block.char_starts, block.char_ends) for block in blocks] == [(None, None)] * 2


@pytest.mark.parametrize(("name", "found"), [("gpt2", "found none"), (None, "found no tokenizer, because documents bring token ids")])
def test_an_eos_that_there_is_not_cannot_be_asked_for(name: str | None, found: str) -> None:
    without = TextTokenizer(PROVEN[name]()) if name else None
    with pytest.raises(ConfigError, match=found):
        DocumentTokenizer(without, vocab_size=1000, workers=1, append_eos=True)


class Counted:
    """Documents that say how far they were read."""

    def __init__(self, documents: Iterator[Document]) -> None:
        self._documents = documents
        self.read = 0
        self.closed = False

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Document:
        document = next(self._documents)
        self.read += 1
        return document

    def close(self) -> None:
        self.closed = True


def test_reading_ahead_is_bounded_by_bytes_and_by_documents() -> None:
    with DocumentTokenizer(tokenizer("gpt2"), vocab_size=1000, workers=1, piece_bytes=1000) as tested:
        short = Counted(document("a b") for _ in range(10**9))
        outcomes = tested.tokenize(short)
        for index in range(3000):
            next(outcomes)
            assert short.read - index <= 1024
        long = Counted(document(LONG) for _ in range(10**9))
        outcomes = tested.tokenize(long)
        for index in range(5):
            next(outcomes)
            assert long.read == index + 1


def test_the_first_document_is_given_before_much_is_read() -> None:
    """And more from turn to turn, up to what is read ahead later on."""
    text = "a b " * 25
    documents = Counted(document(text) for _ in range(10**9))
    with DocumentTokenizer(tokenizer("gpt2"), vocab_size=1000, workers=7, piece_bytes=1000) as tested:
        outcomes = tested.tokenize(documents)
        next(outcomes)
        assert documents.read * len(text) == 4 * 1000
        ahead = []
        for given in range(2, 400):
            next(outcomes)
            ahead.append((documents.read - given) * len(text))
            assert ahead[-1] <= 4 * 1000 + 2 * given * len(text)
        assert tested.ahead_bytes / 2 < max(ahead) <= tested.ahead_bytes


def test_a_text_is_tokenized_only_a_few_pieces_ahead() -> None:
    with DocumentTokenizer(tokenizer("gpt2"), vocab_size=1000, workers=2, piece_bytes=64) as tested:
        stream = tested.stream(document(LONG * 50))
        submitted = len(stream.blocks._pieces)  # type: ignore[attr-defined]
        next(stream.blocks)
        assert submitted == len(stream.blocks._pieces) + 1 == 3  # type: ignore[attr-defined]


def test_a_reader_that_stops_early_stops_all_behind_it() -> None:
    with DocumentTokenizer(tokenizer("gpt2"), vocab_size=1000, workers=1, piece_bytes=1000) as tested:
        documents = Counted(document(LONG[:900] if index % 3 else "a b") for index in range(10**9))
        outcomes = tested.tokenize(documents)
        first = next(streams_of(outcomes))
        outcomes.close()  # type: ignore[attr-defined]
        assert documents.closed
        assert ids_of(first.blocks) == whole("gpt2", "a b")[0]
        stream = tested.stream(document(LONG * 50))
        next(stream.blocks)
        stream.blocks.close()  # type: ignore[attr-defined]
        assert list(stream.blocks) == []
        assert ids_of(tested.stream(document("a b")).blocks) == whole("gpt2", "a b")[0]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tokenize")]


def test_a_text_is_let_go_when_its_last_piece_is_on_its_way() -> None:
    class Buffer(bytearray):
        """One that can be watched."""

    with DocumentTokenizer(tokenizer("gpt2"), vocab_size=1000, workers=1) as tested:
        buffer = Buffer(LONG.encode())
        gone = weakref.ref(buffer)
        stream = tested.stream(replace(document(""), text=memoryview(buffer)))
        blocks = stream.blocks
        assert len(list(blocks)) == 1
        del buffer, stream
        gc.collect()
        assert gone() is None


def test_a_text_that_the_tokenizer_fails_on_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """What a panic of the library looks like."""

    encode = TextTokenizer.encode

    def failing(self: TextTokenizer, texts: list[str], **options: bool) -> object:
        if any("bad" in text for text in texts):
            raise Panic("index out of range")
        return encode(self, texts, **options)

    monkeypatch.setattr(TextTokenizer, "encode", failing)
    with DocumentTokenizer(tokenizer("gpt2"), vocab_size=1000, workers=1) as tested:
        good, bad, after = streams_of(tested.tokenize(iter([document("a b"), document("a bad one"), document("c")])))
        long = tested.stream(document(LONG + "bad"))
        assert ids_of(good.blocks) == whole("gpt2", "a b")[0]
        for stream in (bad, long):
            with pytest.raises(DocumentError, match="Panic: index out of range") as raised:
                list(stream.blocks)
            assert raised.value.stage == "tokenize"
        assert ids_of(after.blocks) == whole("gpt2", "c")[0]


def test_a_stretch_without_a_cut_grows_until_there_is_one_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("longscan.pipeline.tokenize.texts.LONG_STRETCH", 5000)
    monkeypatch.setattr("longscan.pipeline.tokenize.texts.FORWARD_WINDOW", 100)
    text = "a" * 3000 + "é" * 3001 + " b " + "c" * 200
    with DocumentTokenizer(tokenizer("gpt2"), vocab_size=1000, workers=1, piece_bytes=64) as tested:
        blocks = list(tested.stream(document(text)).blocks)
    assert ids_of(iter(blocks)) == whole("gpt2", text)[0]
    assert [block.end.byte for block in blocks if block.end] == [9002, 9004, 9205]
    assert ["from byte 0 to 9002" in record.message for record in caplog.records] == [True]


def test_the_beginning_is_where_a_stream_begins_by_default() -> None:
    with DocumentTokenizer(tokenizer("gpt2"), vocab_size=1000, workers=1, piece_bytes=64) as tested:
        assert ids_of(tested.stream(carried(document(LONG), BEGINNING)).blocks) == ids_of(tested.stream(document(LONG)).blocks)

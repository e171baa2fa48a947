"""A prompt before every text: the ids of both are those of the tokenizer on the two as one, for every tokenizer and every border."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from longscan.pipeline.errors import DocumentError
from longscan.pipeline.records import Document, TokenBlock
from longscan.pipeline.tokenize import DocumentTokenizer, TextTokenizer, make_prompt
from longscan.pipeline.tokenize.prompt import MOST_REPLACED
from tokenizer_zoo import PROVEN, WORDS

PROMPTS = ("query: ", "query:", "Instruct: find what is alike\nQuery: ", "search_document\n", "a", "字。", "  ", "x  \n ")
TEXTS = ("hello world", " hello", "\nhello", "字幕", "  two", "ry", ":", "é", ".", "\t", "123", "s' it's", WORDS[:3000])
FIRST = st.text(alphabet=st.sampled_from(" \n\t.,:aeiouxyzAé字12'́"), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def zoo() -> dict[str, TextTokenizer]:
    return {name: TextTokenizer(make()) for name, make in PROVEN.items()}


def document(ordinal: int, text: str) -> Document:
    return Document(ordinal, f"a#{ordinal}", "a", ordinal, memoryview(text.encode()), None, pa.RecordBatch.from_pylist([{}]))


Blocks = list[TokenBlock] | None
"""None for a document that is refused."""


def blocks_of(tokenizer: TextTokenizer, prompt_text: str, texts: Sequence[str], piece_bytes: int = 1 << 17) -> list[Blocks]:
    prompt = make_prompt(prompt_text, tokenizer)
    sizes = {"vocab_size": tokenizer.vocab_size, "workers": 1, "piece_bytes": piece_bytes}
    found: list[Blocks] = []
    with DocumentTokenizer(tokenizer, **sizes, with_offsets=True, prompt=prompt) as tested:
        for stream in tested.tokenize(iter([document(n, text) for n, text in enumerate(texts)])):
            try:
                found.append(list(stream.blocks))
            except DocumentError:
                found.append(None)
    return found


def check(tokenizer: TextTokenizer, prompt_text: str, text: str, blocks: list[TokenBlock]) -> None:
    prompt = make_prompt(prompt_text, tokenizer)
    own = np.concatenate([block.ids for block in blocks]) if blocks else np.empty(0, np.int32)
    replaced = blocks[0].replaced if blocks else 0
    assert all(block.replaced == 0 for block in blocks[1:])
    assert replaced <= prompt.replaceable <= MOST_REPLACED
    whole = tokenizer.encode([prompt_text + text], with_offsets=True)[0]
    assert [*prompt.ids[: len(prompt.ids) - replaced], *own] == whole.ids.tolist()
    assert whole.char_starts is not None
    if blocks:
        starts = np.concatenate([block.char_starts for block in blocks])  # type: ignore[arg-type]
        assert np.array_equal(starts, np.maximum(whole.char_starts[len(whole.ids) - len(own) :] - len(prompt_text), 0))


@pytest.mark.parametrize("name", PROVEN)
def test_ids_are_those_of_the_whole(name: str, zoo: dict[str, TextTokenizer]) -> None:
    for prompt in PROMPTS:
        for piece_bytes in (1 << 17, 256):
            for text, blocks in zip(TEXTS, blocks_of(zoo[name], prompt, TEXTS, piece_bytes), strict=True):
                assert blocks is not None
                check(zoo[name], prompt, text, blocks)


@pytest.mark.parametrize("name", ["neox", "llama2", "llama3", "bert"])
@given(prompt=st.text(alphabet=st.sampled_from(" \n.:aeixé字1'"), min_size=1, max_size=10), text=FIRST)
@settings(max_examples=60, deadline=None)
def test_any_border(name: str, prompt: str, text: str, zoo: dict[str, TextTokenizer]) -> None:
    (blocks,) = blocks_of(zoo[name], prompt, [text])
    if blocks is not None:
        check(zoo[name], prompt, text, blocks)


def test_a_text_takes_the_space_of_the_prompt(zoo: dict[str, TextTokenizer]) -> None:
    neox = zoo["neox"]
    prompt = make_prompt("query: ", neox)
    entries = sorted(PROVEN["neox"]().get_vocab())
    word = next(entry[1:] for entry in entries if entry[:1] == "Ġ" and entry.isascii() < entry[1:].isascii() and entry[2:].isalpha())
    joined, apart = blocks_of(neox, "query: ", [word, "\nthe"])
    assert joined is not None
    assert joined[0].replaced == 1, "the space is the word's"
    assert apart is not None
    assert 0 < prompt.fixed < len(prompt.ids)
    assert joined[0].char_starts is not None
    assert joined[0].char_starts[0] == 0


def test_an_empty_text_stays_empty(zoo: dict[str, TextTokenizer]) -> None:
    assert blocks_of(zoo["neox"], "query: ", ["", "a"])[0] == []


def test_a_tokenizer_without_cuts_keeps_what_it_can(zoo: dict[str, TextTokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is proven: the prompt is tokenized with every text, and a text that changes more than its end is refused."""
    neox = zoo["neox"]
    monkeypatch.setattr(neox.cuts, "reason", "as a test says")
    prompt = "Instruct: find what is alike, and more of the same than fits\nQuery: "
    assert make_prompt(prompt, neox).fixed == 0
    (blocks,) = blocks_of(neox, prompt, ["hello"])
    assert blocks is not None
    check(neox, prompt, "hello", blocks)


def test_a_text_that_changes_too_much_of_the_prompt_is_refused(zoo: dict[str, TextTokenizer]) -> None:
    prompt = replace(make_prompt("query:", zoo["neox"]), ids=tuple(range(1000, 1012)), fixed=0, tail="")
    with pytest.raises(
        DocumentError, match="leaves the prompt's tokens as they are but for the last 7, and this one's beginning changes 12"
    ):
        prompt.before(["hello"], zoo["neox"], with_offsets=False)

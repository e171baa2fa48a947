"""Tokens that are called settled stay what they are, whatever follows the text; for each family of tokenizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from fake_model import document
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from longscan.pipeline.records import Carry, Document, HostCarry, Ids, TokenBlock
from longscan.pipeline.tokenize import DocumentTokenizer, TextTokenizer, make_prompt
from longscan.pipeline.tokenize.prefix import begins_with
from longscan.pipeline.tokenize.texts import last_cut
from tokenizer_zoo import FRAGMENTS, PROVEN, UNPROVEN, WORDS, texts

grown_texts = st.tuples(st.one_of(texts, st.lists(st.sampled_from(FRAGMENTS), min_size=4, max_size=20).map("".join)), texts)


@cache
def tokenizer(name: str) -> TextTokenizer:
    return TextTokenizer({**PROVEN, **UNPROVEN}[name]())


@pytest.fixture(scope="module")
def tokenizers() -> Iterator[dict[str, DocumentTokenizer]]:
    opened: dict[str, DocumentTokenizer] = {}
    for name in (*PROVEN, *UNPROVEN):
        settings = {"vocab_size": 1 << 20, "workers": 1, "with_offsets": True, "piece_bytes": 24, "prefix_beyond": 0}
        opened[name] = DocumentTokenizer(tokenizer(name), **settings)
    yield opened
    for each in opened.values():
        each.close()


def of(text: str) -> Document:
    return document(0, text.encode())


def ids_of(blocks: list[TokenBlock]) -> list[int]:
    return [int(id) for block in blocks for id in block.ids]


@pytest.mark.parametrize("name", PROVEN)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(grown=grown_texts)
def test_settled_tokens_are_those_of_every_longer_text(name: str, tokenizers: dict[str, DocumentTokenizer], grown: tuple[str, str]) -> None:
    text, more = grown
    stream = tokenizers[name].stream(of(text))
    blocks = list(stream.blocks)
    [before, whole] = [tokens.ids.tolist() for tokens in tokenizer(name).encode([text, text + more])]
    assert ids_of(blocks) == before
    if stream.prefix is None:
        assert last_cut(text.encode(), tokenizer(name).cuts) == 0
        return
    settled = [block for block in blocks if block.settled]
    assert blocks[: len(settled)] == settled, "the settled ones come first"
    assert ids_of(settled) == whole[: len(ids_of(settled))]
    assert begins_with(of(text), stream.prefix)
    assert begins_with(of(text + more), stream.prefix)
    for block in settled:
        assert block.end is not None
        position = max(0, block.end.token - 1)
        carry = Carry(0, HostCarry(position), block.end if position >= block.end.token else settled[0].end or block.end, dict)
        if carry.cut.token <= position:
            rest = tokenizers[name].stream(replace(of(text + more), carry=carry))
            assert ids_of(list(rest.blocks)) == whole[position:]


@pytest.mark.parametrize("name", PROVEN)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(grown=grown_texts, kept=st.integers(0, 40))
def test_a_text_that_is_taken_for_the_same_has_the_same_settled_tokens(
    name: str, tokenizers: dict[str, DocumentTokenizer], grown: tuple[str, str], kept: int
) -> None:
    """Where the old one's end was changed, too: as near to its last cut as can be, and anywhere."""
    text, more = grown
    stream = tokenizers[name].stream(of(text))
    if stream.prefix is None:
        event("no safe cut")
        return
    settled = ids_of([block for block in stream.blocks if block.settled])
    cut = len(text.encode()[: last_cut(text.encode(), tokenizer(name).cuts)].decode())
    for stop in (cut, cut + 1, cut + 2, kept):
        other = text[:stop] + more
        if begins_with(of(other), stream.prefix):
            assert tokenizer(name).encode([other])[0].ids.tolist()[: len(settled)] == settled


@pytest.mark.parametrize("name", ["gpt2", "llama2", "bert"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(grown=grown_texts, at=st.integers(0, 200))
def test_a_text_that_changed_before_its_last_cut_is_not_taken_for_the_same(
    name: str, tokenizers: dict[str, DocumentTokenizer], grown: tuple[str, str], at: int
) -> None:
    text, more = grown
    prefix = tokenizers[name].stream(of(text)).prefix
    assume(prefix is not None)
    assert prefix is not None
    changed = bytearray((text + more).encode())
    changed[at % prefix.length] ^= 1
    assert not begins_with(document(0, bytes(changed)), prefix)
    assert not begins_with(document(0, text.encode()[: prefix.length - 1]), prefix)


@pytest.mark.parametrize("name", ["gpt2", "llama2", "gemma"])
def test_a_prompt_and_the_end_of_the_text_are_settled_on_their_own(name: str) -> None:
    prompt = make_prompt("a prompt: ", tokenizer(name))
    more = {"vocab_size": 1 << 20, "workers": 1, "prompt": prompt, "piece_bytes": 64, "prefix_beyond": 8}
    with DocumentTokenizer(tokenizer(name), **more) as tested:
        stream = tested.stream(of(WORDS))
        assert stream.prefix is not None
        assert ids_of(list(stream.blocks)) == ids_of(list(tested.stream(of(WORDS)).blocks))
        [short] = list(tested.tokenize(iter([of("a")])))
        assert not hasattr(short, "message")
        assert getattr(short, "prefix", "") is None


@pytest.mark.parametrize("name", UNPROVEN)
def test_without_safe_cuts_nothing_is_settled(name: str, tokenizers: dict[str, DocumentTokenizer]) -> None:
    assert tokenizers[name].stream(of(WORDS * 3)).prefix is None


def test_token_ids_are_settled_all_of_them() -> None:
    ids: Ids = np.arange(300, dtype=np.int32)
    with DocumentTokenizer(None, vocab_size=1000, workers=1, prefix_beyond=100) as tested:
        stream = tested.stream(replace(of(""), text=None, token_ids=ids))
        assert all(block.settled for block in stream.blocks)
        assert stream.prefix is not None
        longer: Ids = np.arange(400, dtype=np.int64).astype(np.int32)
        assert begins_with(replace(of(""), text=None, token_ids=longer), stream.prefix)
        longer[299] = 7
        assert not begins_with(replace(of(""), text=None, token_ids=longer), stream.prefix)
        assert not begins_with(replace(of(""), text=None, token_ids=ids[:299]), stream.prefix)
        assert tested.stream(replace(of(""), text=None, token_ids=ids[:100])).prefix is None


def test_the_last_cut_is_found_in_a_long_text_whose_end_has_none() -> None:
    text = ("x y" + "é" * 70000).encode()
    assert last_cut(memoryview(text), tokenizer("neox").cuts) == len("x")

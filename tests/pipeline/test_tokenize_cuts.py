"""Every cut that is called safe is safe: for each family of tokenizers, on texts made to break it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from longscan.pipeline.tokenize.tokenizer import TextTokenizer, Tokens
from tokenizer_zoo import FRAGMENTS, PROVEN, UNPROVEN, WORDS, texts
from tokenizers import Tokenizer

PREFIXED_AFTER_EACH_TOKEN = ("llama2", "llama2_with_unknowns")
"""Their normalizer begins every text between added tokens with a prefix, so that none may be parsed if texts are to be cut."""

CASES = [(name, False) for name in PROVEN] + [(name, True) for name in PROVEN if name not in PREFIXED_AFTER_EACH_TOKEN]

cut_texts = st.one_of(texts, st.lists(st.sampled_from(FRAGMENTS), min_size=2, max_size=4).map("".join))


@cache
def tokenizer(name: str, *, parse_special: bool) -> TextTokenizer:
    return TextTokenizer({**PROVEN, **UNPROVEN}[name](), parse_special=parse_special)


@cache
def reference(name: str, *, parse_special: bool) -> Tokenizer:
    """The tokenizer as it came, but for what is none of the text's: its template."""
    whole = Tokenizer.from_str(PROVEN[name]().to_str())
    whole.post_processor = None
    whole.encode_special_tokens = not parse_special
    return whole


def joined(left: Tokens, right: Tokens, chars: int) -> tuple[list[int], list[tuple[int, int]]]:
    assert left.char_starts is not None
    assert right.char_starts is not None
    starts = np.concatenate([left.char_starts, right.char_starts + chars])
    ends = np.concatenate([left.char_ends, right.char_ends + chars])
    return [*left.ids, *right.ids], list(zip(starts, ends, strict=True))


@pytest.mark.parametrize(("name", "parse_special"), CASES)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=cut_texts)
def test_ids_and_offsets_on_both_sides_of_a_safe_cut_are_those_of_the_whole(name: str, parse_special: bool, text: str) -> None:
    tested = tokenizer(name, parse_special=parse_special)
    whole = reference(name, parse_special=parse_special).encode(text, add_special_tokens=False)
    cuts = [place for place in range(1, len(text)) if tested.cuts.safe(text[place - 1 : place + 1])]
    lefts = tested.encode([text[:place] for place in cuts], with_offsets=True)
    rights = tested.encode([text[place:] for place in cuts], after_cut=True, with_offsets=True)
    for place, left, right in zip(cuts, lefts, rights, strict=True):
        assert joined(left, right, place) == (whole.ids, whole.offsets), f"cut {text[:place]!r} | {text[place:]!r}"


@pytest.mark.parametrize("name", PROVEN)
def test_ordinary_texts_can_be_cut_often(name: str) -> None:
    tested = tokenizer(name, parse_special=False)
    assert tested.cuts.reason is None
    assert sum(tested.cuts.safe(WORDS[place - 1 : place + 1]) for place in range(1, len(WORDS))) > len(WORDS.split()) / 3


@pytest.mark.parametrize("name", PROVEN)
def test_a_text_without_spaces_can_be_cut_at_its_punctuation_or_lines(name: str) -> None:
    """But where a prefix is given to a text that does not begin with a space."""
    allowed = {pair for pair in ("字。", "。字", "字\n", "a\n", "a.") if tokenizer(name, parse_special=False).cuts.safe(pair)}
    assert bool(allowed) is (name not in ("gpt2_with_prefix", "metaspace_bpe", "mistral_v3", "unigram_first"))


@pytest.mark.parametrize("name", UNPROVEN)
def test_what_cannot_be_proven_says_why_and_in_the_log(name: str, caplog: pytest.LogCaptureFixture) -> None:
    cuts = TextTokenizer(UNPROVEN[name]()).cuts
    assert cuts.reason is not None
    assert [record.message for record in caplog.records if cuts.reason in record.message]


@pytest.mark.parametrize("name", PREFIXED_AFTER_EACH_TOKEN)
def test_a_prefix_after_each_added_token_is_not_proven(name: str) -> None:
    assert "prefix" in str(tokenizer(name, parse_special=True).cuts.reason)
    assert tokenizer(name, parse_special=False).cuts.reason is None


def test_unproven_tokenizers_would_be_wrong_if_cut_at_spaces() -> None:
    """The reasons are not mere caution."""
    whole = UNPROVEN["stripping"]()
    assert whole.encode("a b").ids != whole.encode("a").ids + whole.encode(" b").ids


@pytest.mark.parametrize(
    ("name", "unsafe"),
    [
        ("neox", ("  ", " a", "e\u0301", "か\u3099", "<\u0338", "한\u11ab", "a\u200b", "ab", "a1b"[1:], "'s")),
        ("llama3", ("12", " a", "\n ", ".\n", "\r\n", "(a", "'s", "'S", "'ſ", "  ")),
        ("llama2", ("th", "ab", "▁t", " t", "\x00 ", "a\x00", "a𝒳", "𝒳 ")),
        ("llama2_with_unknowns", ("𝒳𝒳", "a𝒳", "𝒳 ", "th")),
        ("bert", ("ab", "a\u0301", "a\x00", "\ufffd ", "12")),
        ("added_tokens", (". ", " t", "w ", " w", "low"[:2], " <", "] ", "s>")),
        ("unigram_first", ("ab", "a\n", "a.", "字。")),
    ],
)
def test_not_here(name: str, unsafe: tuple[str, ...]) -> None:
    cuts = tokenizer(name, parse_special=False).cuts
    assert [pair for pair in unsafe if cuts.safe(pair)] == []


def test_pairs_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longscan.pipeline.tokenize.cuts.REMEMBERED_PAIRS", 10)
    cuts = TextTokenizer(PROVEN["gpt2"]()).cuts
    text = "".join(map(chr, range(0x4E00, 0x4E40))) + "a b"
    assert cuts.first(text) == cuts.last(text) == len(text) - 2
    assert len(cuts._known) <= 10

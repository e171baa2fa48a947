"""The analysis of splitting patterns, against the engine that runs them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from longscan.pipeline.tokenize.characters import BYTE_TO_CHAR, is_punctuation, is_space, settled
from longscan.pipeline.tokenize.patterns import Pattern, escape
from longscan.pipeline.tokenize.pretokenizers import GPT2_PATTERN
from longscan.pipeline.tokenize.regex import Unprovable
from tokenizer_zoo import DEEPSEEK, LLAMA3, O200K, POSSESSIVE
from tokenizers import Regex, pre_tokenizers

ALPHABET = "abAB1 \n.'ſßK"

SETTLED = [char for char in map(chr, range(0x30000)) if not 0xD800 <= ord(char) < 0xE000 and settled(char)]


def pieces(source: str, text: str) -> list[str]:
    splits = pre_tokenizers.Split(Regex(source), "isolated").pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in splits]


def understood(source: str) -> Pattern | None:
    """None for what the engine or the analysis refuses."""
    try:
        pre_tokenizers.Split(Regex(source), "isolated")
    except Exception:
        return None
    try:
        return Pattern(source)
    except Unprovable:
        return None


ATOMS = (
    *("a", "b", "A", "1", " ", r"\.", "'", ".", r"\s", r"\S", r"\d", r"\p{L}", r"\P{L}", r"\p{Lu}", r"\p{^N}", "[ab]", r"[^a\s]"),
    *("[a-b1]", r"[\p{L}\p{N}]", r"[^\r\n\p{L}\p{N}]", r"[\]\-a]", r"\x41", r"\n", "ss"),
)
NOT_UNDERSTOOD = (
    *("^a", r"\ba", "(?<=a)b", "(?<!a)b", r"(a)\1", r"\Aa", r"a\z", "[a[bc]]", "[a&&b]", "[[:alpha:]]", r"\h", "(?x) a b", "a{,3}"),
    *("a*", "", "(a", "a)", "[", r"\p{L", "a|", "(?=ab)c", r"\x4", r"\x{41}", "a{2", "[]", r"[a-\s]", "*a", "a(?i)b|c"),
)
CLASSES = (r"\s", r"\d", r"\w", r"\p{L}", r"\p{Lu}", r"\p{Ll}", r"\p{M}", r"\p{N}", r"\p{P}", r"\p{S}", r"\p{Z}", r"[^\s\p{L}]")
KNOWN = (GPT2_PATTERN, LLAMA3, O200K, POSSESSIVE, *DEEPSEEK)

atoms = st.sampled_from(ATOMS)
quantifiers = st.sampled_from(["", "", "", "?", "*", "+", "??", "*?", "+?", "?+", "*+", "++", "{1,2}", "{2}", "{1,}", "{1,2}+", "{0,2}"])
looks = st.sampled_from([r"(?!\S)", r"(?=\s)", "(?!a)", "(?=[ab])", "$"])
quantified = st.builds("{}{}".format, atoms, quantifiers)


def _groups(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    items = st.one_of(quantified, inner, looks)
    sequences = st.lists(items, min_size=1, max_size=3).map("".join)
    alternatives = st.lists(sequences, min_size=1, max_size=3).map("|".join)
    return st.builds("({}{}){}".format, st.sampled_from(["?:", "", "?i:", "?>"]), alternatives, quantifiers)


items = st.one_of(quantified, quantified, st.recursive(quantified, _groups, max_leaves=4), looks)
sequences = st.lists(items, min_size=1, max_size=4).map("".join)
patterns = st.lists(sequences, min_size=1, max_size=4).map("|".join)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(source="b?+b|1", text=" b ")
@example(source="(?i:ab)|.", text="AB")
@example(source="(?i)ab|.", text="AB")
@example(source="(?i:ss)|.", text="ſs")
@example(source="(?i:ass)|.", text="aß")
@example(source=r"(?i:\p{Lu}+)|.", text="ab")
@example(source=r"1\s*(?!\S)|.", text="1  a")
@given(source=st.one_of(patterns, st.sampled_from(KNOWN)), text=st.text(ALPHABET, max_size=9))
def test_matches_of_the_parts_are_those_of_the_whole_where_nothing_joins(source: str, text: str) -> None:
    pattern = understood(source)
    assume(pattern is not None)
    assert pattern is not None
    whole = pieces(source, text)
    for place in range(1, len(text)):
        before, after = text[place - 1], text[place]
        if pattern.joins(before, after):
            continue
        left, right = pieces(source, text[:place]), pieces(source, text[place:])
        found = whole == left + right
        if not (pattern.matches_alone(before) or pattern.matches_alone(after)):
            found = found or whole == [*left[:-1], left[-1] + right[0], *right[1:]]
        assert found, f"{source!r}: {left} | {right}, not {whole}"


@pytest.mark.parametrize("source", CLASSES)
def test_classes_are_those_of_the_engine(source: str) -> None:
    pattern = Pattern(source)
    outside = set("".join(piece for piece, _ in pre_tokenizers.Split(Regex(source), "removed").pre_tokenize_str("".join(SETTLED))))
    wrong = [char for char in SETTLED if pattern.takes(char) is pattern.matches_alone(char) is (char in outside)]
    assert wrong == []
    assert len(outside) < len(SETTLED)


@pytest.mark.parametrize(
    ("splitter", "members"),
    [(pre_tokenizers.WhitespaceSplit(), is_space), (pre_tokenizers.Punctuation("removed"), is_punctuation)],
    ids=["space", "punctuation"],
)
def test_classes_are_those_of_the_pre_tokenizers(splitter: pre_tokenizers.PreTokenizer, members: object) -> None:
    assert callable(members)
    outside = set("".join(piece for piece, _ in splitter.pre_tokenize_str("".join(SETTLED))))
    assert [char for char in SETTLED if members(char) is (char in outside)] == []


def test_what_may_change_with_the_version_of_unicode_is_not_settled() -> None:
    assert [char for char in "\x00\x1c\x85\u00ad\u180e\u200b\u200d\ufeff\ue000\u1c90\u0378" if settled(char)] == []
    assert all(map(settled, "aé字か한😀"[:5] + " \n\t.,١"))


def test_bytes_are_the_characters_of_the_byte_level() -> None:
    assert set(BYTE_TO_CHAR.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("a é字\n\x7f")[0][0]
    assert shown == "".join(BYTE_TO_CHAR[byte] for byte in "a é字\n\x7f".encode())


@pytest.mark.parametrize("source", NOT_UNDERSTOOD)
def test_what_is_not_understood_is_not_guessed(source: str) -> None:
    with pytest.raises(Unprovable):
        Pattern(source)


@pytest.mark.parametrize("text", [" ", "a", "[", "\\s", "a.b", "–字"])
def test_a_literal_matches_itself_alone(text: str) -> None:
    pattern = Pattern(escape(text))
    assert [pattern.takes(char) for char in text] == [True] * len(text)
    assert not pattern.takes("x")
    assert pattern.joins(text[0], text[-1]) is (len(text) == 2)

"""Where a tokenizer's pre-tokenizer is certain to end one word and begin the next.

A cut a|b is looked at by one step after the other, as the text would be. A step says one of three things:

    border      the word before ends with a and the next begins with b, in the whole text as in the two parts
    no border   the cut is inside a word, or may be, and nothing else depends on it: the words of the parts are those of
                the whole text, but for the word around the cut, of which each part has its side
    None        nothing can be said

Once there is a border, later steps see the two sides as words of their own, in the whole text as in the parts. Why it holds:

    splits by a class of characters (BertPreTokenizer, WhitespaceSplit, Digits, Punctuation, CharDelimiterSplit, Split
        on one character)    whether a character is a delimiter does not depend on its neighbours; what a delimiter does with
                             its neighbours is looked up by behavior
    splits by a pattern (Split, ByteLevel with its regex, Whitespace)    no match holds both a and b (patterns.py), and a match is
                             certain to end at the cut or to begin there, so that no unmatched stretch spans it either
    ByteLevel, Metaspace     character by character; their prefix (a space before the first word) is the same for what comes
                             after a cut if that begins with the space

All others (UnicodeScripts, FixedLength) are Unprovable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from longscan.pipeline.tokenize.characters import BYTE_TO_CHAR, Members, equals, is_number, is_punctuation, is_space
from longscan.pipeline.tokenize.patterns import Pattern
from longscan.pipeline.tokenize.regex import Unprovable

Json = dict[str, Any]

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What ByteLevel splits by where `use_regex` is on."""

WORD_PATTERN = r"\w+|[^\w\s]+"
"""What Whitespace keeps; all else is removed."""


class Place(NamedTuple):
    """The two characters beside a cut, as a step finds them."""

    before: str
    after: str
    border: bool = False


PreTokenizerStep = Callable[[Place], Place | None]


def pretokenizer_steps(pretokenizer: Json | None) -> list[PreTokenizerStep]:
    """Raises Unprovable for kinds and behaviors that are not in the list above."""
    return list(_steps(pretokenizer)) if pretokenizer is not None else []


def _steps(part: Json) -> Iterator[PreTokenizerStep]:
    match part["type"]:
        case "Sequence":
            for inner in part["pretokenizers"]:
                yield from _steps(inner)
        case "BertPreTokenizer":
            yield partial(_by_class, is_space, "Removed")
            yield partial(_by_class, is_punctuation, "Isolated")
        case "WhitespaceSplit":
            yield partial(_by_class, is_space, "Removed")
        case "CharDelimiterSplit":
            yield partial(_by_class, partial(equals, part["delimiter"]), "Removed")
        case "Digits":
            yield partial(_by_class, is_number, "Isolated" if part["individual_digits"] else "Contiguous")
        case "Punctuation":
            yield partial(_by_class, is_punctuation, part["behavior"])
        case "Whitespace":
            yield partial(_by_pattern, Pattern(WORD_PATTERN), True)
        case "Split":
            yield _split(part)
        case "ByteLevel":
            yield from _byte_level(part)
        case "Metaspace":
            yield from _metaspace(part)
        case kind:
            raise Unprovable(f"its pre-tokenizer {kind} is not known to be local")


def _by_class(members: Members, behavior: str, place: Place) -> Place | None:
    if place.border:
        return place
    before, after = members(place.before), members(place.after)
    if before is None or after is None:
        return None
    border = {
        "Removed": before or after,
        "Isolated": before or after,
        "Contiguous": before is not after,
        "MergedWithPrevious": before,
        "MergedWithNext": after,
    }[behavior]
    return place._replace(border=border)


def _by_pattern(pattern: Pattern, drops_gaps: bool, place: Place) -> Place | None:
    """drops_gaps: what the pattern does not match is removed, so that no word spans a cut that no match spans."""
    if place.border:
        return place
    if pattern.joins(place.before, place.after):
        return None
    return place._replace(border=drops_gaps or pattern.matches_alone(place.before) or pattern.matches_alone(place.after))


def _split(part: Json) -> PreTokenizerStep:
    pattern, behavior, invert = part["pattern"], part["behavior"], part["invert"]
    if len(pattern.get("String", "")) == 1 and not invert:
        return partial(_by_class, partial(equals, pattern["String"]), behavior)
    if behavior not in ("Isolated", "Removed"):
        raise Unprovable(f"its pre-tokenizer Split by a pattern has the behavior {behavior}")
    return partial(_by_pattern, Pattern.of(pattern), invert and behavior == "Removed")


def _byte_level(part: Json) -> Iterator[PreTokenizerStep]:
    if part["add_prefix_space"]:
        yield partial(_needs_first, " ", False)
    if part.get("use_regex", True):
        yield partial(_by_pattern, Pattern(GPT2_PATTERN), False)
    yield _to_bytes


def _to_bytes(place: Place) -> Place:
    before, after = BYTE_TO_CHAR[place.before.encode()[-1]], BYTE_TO_CHAR[place.after.encode()[0]]
    return Place(before, after, place.border)


def _metaspace(part: Json) -> Iterator[PreTokenizerStep]:
    replacement = part["replacement"]
    yield partial(_replace_space, replacement)
    if part["prepend_scheme"] != "never":
        yield partial(_needs_first, replacement, part["prepend_scheme"] == "first")
    if part["split"]:
        yield partial(_by_class, partial(equals, replacement), "MergedWithNext")


def _replace_space(replacement: str, place: Place) -> Place:
    before = replacement if place.before == " " else place.before
    after = replacement if place.after == " " else place.after
    return Place(before, after, place.border)


def _needs_first(prefix: str, of_text: bool, place: Place) -> Place | None:
    """What comes after a cut would get the prefix that it has not in the whole text, unless it begins with it.

    of_text: only the first word of the text gets it; otherwise every word does, so that a border is as good.
    """
    return place if place.after == prefix or (place.border and not of_text) else None

"""What a tokenizer's normalizer makes of the two characters beside a cut, for those kinds whose work is local.

Let N be the normalizer and a|b the cut: a step answers with the last character of N(..a) and the first of N(b..),
and thereby says that N(..ab..) = N(..a) N(b..) with exactly these beside the cut, whatever the dots are. None says that
it cannot be said. Why it holds, kind by kind:

    Lowercase, StripAccents     every character by itself
    BertNormalizer              every character by itself, and NFD
    Replace of one character    every character by itself; of more: only where no match can hold a or b
    NFC, NFD, NFKC, NFKD        b is a starter that nothing before it composes with, so the two sides do not meet; a is
                                one too, so it does not depend on what is before it, and b composes with nothing after it
    Prepend                     at the very start only, which a cut is never at; left out for what comes after a cut

All others (Strip, Nmt, Precompiled, ByteLevel) are Unprovable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from longscan.pipeline.tokenize.characters import (
    Form,
    is_chinese,
    is_mark,
    is_nonspacing_mark,
    is_space,
    joins_after,
    joins_before,
    normal_form,
    settled,
)
from longscan.pipeline.tokenize.patterns import Pattern
from longscan.pipeline.tokenize.regex import Unprovable

Json = dict[str, Any]
NormalizerStep = Callable[[str, str], tuple[str, str] | None]

REPLACEMENT_CHARACTER = "\ufffd"


def flatten(normalizer: Json | None) -> Iterator[Json]:
    """A normalizer's parts in order, without the sequences around them."""
    if normalizer is None:
        return
    if normalizer["type"] == "Sequence":
        for part in normalizer["normalizers"]:
            yield from flatten(part)
    else:
        yield normalizer


def without_prepend(normalizer: Json | None) -> Json:
    """The normalizer for a text that goes on after a cut."""
    return {"type": "Sequence", "normalizers": [part for part in flatten(normalizer) if part["type"] != "Prepend"]}


def normalizer_steps(normalizer: Json | None) -> list[NormalizerStep]:
    """Raises Unprovable for kinds that are not in the list above."""
    steps = {"Lowercase": _lowercase, "StripAccents": _strip_accents}
    found: list[NormalizerStep] = []
    for part in flatten(normalizer):
        kind = part["type"]
        if kind in steps:
            found.append(steps[kind])
        elif kind in ("NFC", "NFD", "NFKC", "NFKD"):
            found.append(partial(_normal_form, kind))
        elif kind == "BertNormalizer":
            found += _bert(part)
        elif kind == "Replace":
            found.append(_replace(part))
        elif kind != "Prepend":
            raise Unprovable(f"its normalizer {kind} is not known to be local")
    return found


def _normal_form(form: Form, before: str, after: str) -> tuple[str, str] | None:
    if joins_before(before) or joins_before(after):
        return None
    left, right = normal_form(form, before), normal_form(form, after)
    if left is None or right is None or (form in ("NFC", "NFKC") and joins_after(right[0])):
        return None
    return left[-1], right[0]


def _lowercase(before: str, after: str) -> tuple[str, str]:
    return before.lower()[-1], after.lower()[0]


def _strip_accents(before: str, after: str) -> tuple[str, str] | None:
    return None if is_mark(before) or is_mark(after) else (before, after)


def _bert(part: Json) -> list[NormalizerStep]:
    strips = part["lowercase"] if part["strip_accents"] is None else part["strip_accents"]
    wanted: list[tuple[bool, NormalizerStep]] = [
        (part["clean_text"], _clean_text),
        (part["handle_chinese_chars"], _space_chinese),
        (strips, _decompose_and_strip),
        (part["lowercase"], _lowercase),
    ]
    return [step for is_on, step in wanted if is_on]


def _clean_text(before: str, after: str) -> tuple[str, str] | None:
    if REPLACEMENT_CHARACTER in (before, after):
        return None
    return " " if is_space(before) else before, " " if is_space(after) else after


def _space_chinese(before: str, after: str) -> tuple[str, str]:
    return " " if is_chinese(before) else before, " " if is_chinese(after) else after


def _decompose_and_strip(before: str, after: str) -> tuple[str, str] | None:
    if joins_before(before) or joins_before(after):
        return None
    left, right = normal_form("NFD", before), normal_form("NFD", after)
    if left is None or right is None:
        return None
    kept = [char for char in left if not is_nonspacing_mark(char)]
    return (kept[-1], right[0]) if kept else None


def _replace(part: Json) -> NormalizerStep:
    content, pattern = part["content"], part["pattern"]
    if not content:
        raise Unprovable("its normalizer Replace removes characters")
    if len(pattern.get("String", "")) == 1:
        return partial(_replace_char, pattern["String"], content)
    return partial(_keep_out_of, Pattern.of(pattern))


def _replace_char(wanted: str, content: str, before: str, after: str) -> tuple[str, str] | None:
    left = content[-1] if before == wanted else before
    right = content[0] if after == wanted else after
    return (left, right) if settled(left) and settled(right) else None


def _keep_out_of(pattern: Pattern, before: str, after: str) -> tuple[str, str] | None:
    return None if pattern.takes(before) or pattern.takes(after) else (before, after)

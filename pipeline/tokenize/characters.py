"""What is certain about a character, whichever version of Unicode the tokenizer's library was built with.

Classes are three-valued: True and False are certain, None is "may be either". A cut is only made between two characters
that are `settled`, so the doubtful ones (formats, controls, joiners, everything younger than Unicode 3.2) decide nothing.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Literal

Members = Callable[[str], bool | None]
"""Whether a character belongs to a class: True, False, or None where that is not certain."""

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]

GENERAL_CATEGORIES = {"L": "ultmo", "M": "nce", "N": "dlo", "P": "cdseifo", "S": "mcko", "Z": "slp"}
"""Major class -> its minor ones."""

SHOWN_BYTES = (*range(33, 127), *range(161, 173), *range(174, 256))
HIDDEN_BYTES = tuple(byte for byte in range(256) if byte not in SHOWN_BYTES)
BYTE_TO_CHAR = {byte: chr(byte) for byte in SHOWN_BYTES} | {byte: chr(256 + index) for index, byte in enumerate(HIDDEN_BYTES)}
"""GPT-2's alphabet: the character that stands for each byte. Those that do not print take the characters from U+0100 on."""

HANGUL = (range(0x1100, 0x1200), range(0xA960, 0xA980), range(0xAC00, 0xD800))
"""Jamo and syllables: they compose with each other by rule, not by table."""

CHINESE = (
    range(0x4E00, 0xA000),
    range(0x3400, 0x4DC0),
    range(0x20000, 0x2A6E0),
    range(0x2A700, 0x2B740),
    range(0x2B740, 0x2B820),
    range(0x2B920, 0x2CEB0),
    range(0xF900, 0xFB00),
    range(0x2F800, 0x2FA20),
)
"""What BertNormalizer sets between spaces."""


def settled(char: str) -> bool:
    """Whether the category was the same in Unicode 3.2 and now, and is neither a control, format, surrogate nor private one."""
    category = unicodedata.category(char)
    if category[0] == "C":
        return char in "\t\n\r"
    return unicodedata.ucd_3_2_0.category(char) == category


def is_space(char: str) -> bool:
    return char in "\t\n\r" or unicodedata.category(char)[0] == "Z"


def is_mark(char: str) -> bool:
    return unicodedata.category(char)[0] == "M"


def is_nonspacing_mark(char: str) -> bool:
    return unicodedata.category(char) == "Mn"


def is_number(char: str) -> bool:
    return unicodedata.category(char)[0] == "N"


def is_punctuation(char: str) -> bool:
    """All of ASCII that prints and is no letter, digit or space, and Unicode's punctuation."""
    category = unicodedata.category(char)
    return category[0] == "P" or (char < "\x7f" and category[0] == "S")


def is_chinese(char: str) -> bool:
    return any(ord(char) in block for block in CHINESE)


def is_word(char: str) -> bool | None:
    r"""`\w`. Engines differ on numbers that are no digits and on symbols that stand for letters."""
    category = unicodedata.category(char)
    if category[0] in "LM" or category in ("Nd", "Pc"):
        return True
    return None if category in ("Nl", "No", "So") else False


def in_category(name: str) -> Members:
    r"""`\p{name}`; a property that is no general category (a script, for example) is certain of nothing."""
    minor = GENERAL_CATEGORIES.get(name[:1], "")
    if not minor or (name[1:] and name[1:] not in set(minor)):
        return lambda _: None
    return lambda char: unicodedata.category(char).startswith(name)


def equals(wanted: str, char: str) -> bool:
    return char == wanted


def equals_in_any_case(wanted: str, char: str) -> bool | None:
    """Without regard to case; a character that folds to several may stand for each of them."""
    if wanted == char:
        return True
    return None if wanted.casefold() in char.casefold() or wanted > "\x7f" else False


def between(lowest: str, highest: str, char: str) -> bool:
    return lowest <= char <= highest


def not_newline(char: str) -> bool | None:
    return None if char == "\n" else True


def any_of(parts: list[Members], char: str) -> bool | None:
    answers = [part(char) for part in parts]
    return True if True in answers else None if None in answers else False


def none_of(parts: list[Members], char: str) -> bool | None:
    answer = any_of(parts, char)
    return None if answer is None else not answer


def in_any_case(members: Members, char: str) -> bool | None:
    """Without regard to case a class may hold any letter, and whatever folds to several characters."""
    return None if char > "\x7f" or unicodedata.category(char)[0] == "L" else members(char)


@cache
def _composing() -> tuple[frozenset[str], frozenset[str]]:
    """Characters that may compose with one after them, and with one before them, in NFC."""
    pairs = [text.split() for text in map(unicodedata.decomposition, map(chr, range(0x30000))) if text and text[0] != "<" and " " in text]
    return frozenset(chr(int(first, 16)) for first, _ in pairs), frozenset(chr(int(second, 16)) for _, second in pairs)


def joins_before(char: str) -> bool:
    """Whether normalisation may make something of this character and what stands before it."""
    first = unicodedata.normalize("NFKD", char)[0]
    return is_mark(first) or unicodedata.combining(first) != 0 or first in _composing()[1] or _is_hangul(char)


def joins_after(char: str) -> bool:
    """Whether composition may make something of this character and what stands after it."""
    return char in _composing()[0] or _is_hangul(char)


def normal_form(form: Form, char: str) -> str | None:
    """What the character alone becomes in NFC, NFD, NFKC or NFKD; None where versions of Unicode do not agree."""
    normal = unicodedata.normalize(form, char)
    return normal if unicodedata.ucd_3_2_0.normalize(form, char) == normal and all(map(settled, normal)) else None


def _is_hangul(char: str) -> bool:
    return any(ord(char) in block for block in HANGUL)

r"""Regular expressions, parsed to the positions where they take a character and which position may follow which.

This is Glushkov's construction over classes of characters. It over-approximates: every way a match can go is in the
graph, so what the graph rules out no engine does. What is not understood is `Unprovable`, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from longscan.pipeline.tokenize.characters import (
    Members,
    any_of,
    between,
    equals,
    equals_in_any_case,
    in_any_case,
    in_category,
    is_space,
    is_word,
    none_of,
    not_newline,
)

ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
HEX_DIGITS = {"x": 2, "u": 4}
CLASSES: dict[str, Members] = {"s": is_space, "d": in_category("Nd"), "w": is_word}


class Unprovable(Exception):
    """A part of a tokenizer for which no cut can be shown to be exact. The message says which."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part of the pattern: whether it can be empty, and the positions that it can begin and end with."""

    empty: bool = True
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Atom:
    """One class of characters with its repeat, in an alternative that is a plain row of such."""

    members: Members
    optional: bool
    possessive: bool


@dataclass(slots=True)
class Graph:
    """Positions with what they take (None for a look-ahead, which takes nothing) and what may come next."""

    members: list[Members | None] = field(default_factory=list)
    follow: list[set[int]] = field(default_factory=list)

    def add(self, members: Members | None) -> Node:
        self.members.append(members)
        self.follow.append(set())
        here = frozenset([len(self.members) - 1])
        return Node(members is None, here, here)

    def link(self, before: Node, after: Node) -> None:
        for position in before.last:
            self.follow[position] |= after.first

    def concatenate(self, before: Node, after: Node) -> Node:
        self.link(before, after)
        first = before.first | after.first if before.empty else before.first
        last = after.last | before.last if after.empty else after.last
        return Node(before.empty and after.empty, first, last)


class Parser:
    """Recursive descent over one pattern. `graph` is complete after `pattern()`."""

    def __init__(self, source: str) -> None:
        self.graph = Graph()
        self._source = source
        self._at = 0
        self._ignore_case = False

    def pattern(self) -> tuple[Node, list[list[Atom]]]:
        """The whole pattern, and those of its alternatives that are plain rows of classes."""
        node, rows = self._alternation()
        if self._at < len(self._source):
            raise self._unprovable()
        return node, rows

    def _alternation(self) -> tuple[Node, list[list[Atom]]]:
        nodes, rows = [], []
        while True:
            node, row = self._sequence()
            nodes.append(node)
            if row is not None:
                rows.append(row)
            if not self._accept("|"):
                break
        first = frozenset[int]().union(*(node.first for node in nodes))
        last = frozenset[int]().union(*(node.last for node in nodes))
        return Node(any(node.empty for node in nodes), first, last), rows

    def _sequence(self) -> tuple[Node, list[Atom] | None]:
        sequence, row = Node(), list[Atom]()
        plain = True
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            members: Members | None = None
            if self._accept("("):
                node = self._group()
            elif self._accept("$"):
                node = self.graph.add(None)
            else:
                members = self._members()
                node = self.graph.add(members)
            least, most, possessive = self._repeat()
            if most is None or most > 1:
                self.graph.link(node, node)
            if members is not None and least <= 1:
                row.append(Atom(members, least == 0, possessive))
            else:
                plain = False
            sequence = self.graph.concatenate(sequence, Node(node.empty or least == 0, node.first, node.last))
        return sequence, row if plain else None

    def _group(self) -> Node:
        """What stands between parentheses; the opening one is behind us."""
        around, opened_at = self._ignore_case, self._at - 1
        if self._accept("?"):
            if self._accept("=") or self._accept("!"):
                return self._look_ahead()
            if not self._accept(">"):
                self._flags()
                if self._accept(")"):
                    if opened_at:  # inside, it would take the alternatives after it into a group with it
                        raise self._unprovable()
                    return Node()
                self._expect(":")
        node, _ = self._alternation()
        self._expect(")")
        self._ignore_case = around
        return node

    def _look_ahead(self) -> Node:
        """It may ask for one class of characters. What it asks is of no interest: a cut is never made where it asks."""
        self._members()
        self._expect(")")
        return self.graph.add(None)

    def _flags(self) -> None:
        on = True
        while self._at < len(self._source) and self._source[self._at] in "ims-":
            flag = self._next()
            if flag == "-":
                on = False
            elif flag == "i":
                self._ignore_case = on

    def _repeat(self) -> tuple[int, int | None, bool]:
        """Least, most (None for no limit), and whether what was taken is never given back."""
        if self._accept("*"):
            least, most = 0, None
        elif self._accept("+"):
            least, most = 1, None
        elif self._accept("?"):
            least, most = 0, 1
        elif self._accept("{"):
            least, most = self._bounds()
            if self._accept("+"):
                return least, None, True  # in this syntax a repeat of the repeat
        else:
            return 1, 1, False
        possessive = self._accept("+")
        if not possessive:
            self._accept("?")
        return least, most, possessive

    def _bounds(self) -> tuple[int, int | None]:
        text, closed, _ = self._source[self._at :].partition("}")
        least, comma, most = text.partition(",")
        if not closed or not least.isdecimal() or not (most.isdecimal() or most == ""):
            raise self._unprovable()
        self._at += len(text) + 1
        return int(least), None if comma and not most else int(most or least)

    def _members(self) -> Members:
        """One class of characters: a literal, an escape, a dot, or a class in brackets."""
        char = self._next()
        if char in "^*+?{":
            raise self._unprovable()
        item = self._brackets() if char == "[" else not_newline if char == "." else self._item(char)
        if not self._ignore_case:
            return _as_members(item)
        return partial(equals_in_any_case, item) if isinstance(item, str) else partial(in_any_case, item)

    def _brackets(self) -> Members:
        """A class in brackets; the opening one is behind us."""
        negated = self._accept("^")
        parts: list[Members] = []
        while not parts or not self._accept("]"):
            char = self._next()
            if char in "[]" or self._source.startswith("&&", self._at - 1):
                raise self._unprovable()
            item = self._item(char)
            following = self._source[self._at : self._at + 2]
            if isinstance(item, str) and following.startswith("-") and following != "-]":
                self._at += 1
                highest = self._item(self._next())
                if not isinstance(highest, str):
                    raise self._unprovable()
                parts.append(partial(between, item, highest))
            else:
                parts.append(_as_members(item))
        return partial(none_of if negated else any_of, parts)

    def _item(self, char: str) -> str | Members:
        """A literal character, or the class that a backslash makes of the characters after it."""
        if char != "\\":
            return char
        char = self._next()
        if char.lower() in CLASSES:
            members = CLASSES[char.lower()]
            return members if char.islower() else partial(none_of, [members])
        if char in "pP":
            return self._property(negated=char == "P")
        if char in HEX_DIGITS:
            return self._code_point(HEX_DIGITS[char])
        if char in ESCAPES:
            return ESCAPES[char]
        if char.isalnum():
            raise self._unprovable()
        return char

    def _property(self, *, negated: bool) -> Members:
        self._expect("{")
        name, closed, _ = self._source[self._at :].partition("}")
        if not closed:
            raise self._unprovable()
        self._at += len(name) + 1
        members = in_category(name.removeprefix("^"))
        return partial(none_of, [members]) if negated is not name.startswith("^") else members

    def _code_point(self, digits: int) -> str:
        text = self._source[self._at : self._at + digits]
        if len(text) < digits or not all(digit in "0123456789abcdefABCDEF" for digit in text):
            raise self._unprovable()
        self._at += digits
        return chr(int(text, 16))

    def _next(self) -> str:
        if self._at >= len(self._source):
            raise self._unprovable()
        self._at += 1
        return self._source[self._at - 1]

    def _accept(self, char: str) -> bool:
        if not self._source.startswith(char, self._at):
            return False
        self._at += 1
        return True

    def _expect(self, char: str) -> None:
        if not self._accept(char):
            raise self._unprovable()

    def _unprovable(self) -> Unprovable:
        return Unprovable(f"the pattern {self._source!r} has something at {self._at} that is not understood")


def _as_members(item: str | Members) -> Members:
    return partial(equals, item) if isinstance(item, str) else item

r"""What a regular expression can never match together: which neighbours stand in no match of a splitting pattern.

A pattern is parsed to the positions where it takes a character, and which position may follow which (Glushkov's
construction). Take a text with the characters a|b at a place p. If no position that takes a is followed by one that
takes b, and no look-ahead stands behind one that takes a, then

* a match attempt that starts before p takes the same steps in the whole text and in the text that ends at p: once it has
  taken a, nothing may take b, and nothing may take the end of the text either; nothing looks at what comes after;
* an attempt that starts at p or later takes the same steps in the whole text and in the text that begins at p: nothing
  looks back, since patterns with look-behind, anchors or references are not accepted.

So the matches in the whole are those of the two parts, whatever the engine's preferences between alternatives, and
possessive or lazy repeats only choose among steps. What is not understood is `Unprovable`, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping

from longscan.pipeline.tokenize.regex import Atom, Parser, Unprovable


class Pattern:
    """A regular expression as the tokenizers library reads it (Oniguruma's syntax), or the part of it that is understood.

    Raises Unprovable for what is not: look-behind, anchors other than `$`, references, conditionals, nested classes.
    """

    def __init__(self, source: str) -> None:
        parser = Parser(source)
        node, self._alternatives = parser.pattern()
        if node.empty:
            raise Unprovable(f"the pattern {source!r} can match nothing at all")
        self._graph = parser.graph

    @classmethod
    def of(cls, pattern: Mapping[str, str]) -> Pattern:
        """From the form in tokenizer.json: {"Regex": source} or {"String": literal}."""
        return cls(pattern["Regex"] if "Regex" in pattern else escape(pattern["String"]))

    def takes(self, char: str) -> bool:
        """Whether a match may hold the character."""
        return any(members is not None and members(char) is not False for members in self._graph.members)

    def joins(self, before: str, after: str) -> bool:
        """Whether a match may hold both characters side by side, or depend on the second after it took the first."""
        graph = self._graph
        for position, members in enumerate(graph.members):
            if members is None or members(before) is False:
                continue
            for following in graph.follow[position]:
                then = graph.members[following]
                if then is None or then(after) is not False:
                    return True
        return False

    def matches_alone(self, char: str) -> bool:
        """Whether an attempt that starts at this character is certain to match, whatever comes after it."""
        return any(_takes_alone(alternative, char) for alternative in self._alternatives)


def escape(text: str) -> str:
    """The pattern that matches just this text."""
    return "".join(char if char.isalnum() or char.isspace() else f"\\{char}" for char in text)


def _takes_alone(alternative: list[Atom], char: str) -> bool:
    required = [index for index, atom in enumerate(alternative) if not atom.optional]
    if len(required) != 1 or alternative[required[0]].members(char) is not True:
        return False
    # A possessive optional atom in front does not give back what it took.
    return not any(atom.possessive and atom.members(char) is not False for atom in alternative[: required[0]])

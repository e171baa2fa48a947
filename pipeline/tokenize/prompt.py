"""A prompt before every text, so that the ids of both are those of the tokenizer on the two as one.

Most of a prompt is the same tokens whatever follows: up to its last place where a cut is proven safe (cuts.py). What stands
behind that may join the text, as the space at the end of "query: " does, and is tokenized with each text anew. So documents
share the prompt's tokens but for the last few, which some replace by their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from longscan.pipeline.errors import DocumentError
from longscan.pipeline.tokenize.tokenizer import TextTokenizer, Tokens

MOST_REPLACED = 7
"""Tokens at a prompt's end that texts may replace: the engine keeps the state before each of them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    ids: tuple[int, ...]
    """Of the prompt alone."""
    fixed: int
    """So many of them come before any text."""
    tail: str
    """The end of the text, behind the tokens that are fixed."""

    @property
    def replaceable(self) -> int:
        """How many tokens a document may replace: the engine has a state for 0 to so many."""
        return min(len(self.ids) - self.fixed, MOST_REPLACED)

    def before(self, texts: list[str], tokenizer: TextTokenizer, *, with_offsets: bool) -> list[Tokens]:
        """Tokens of each text behind the prompt, without the prompt's own; `replaced` says how many of those they stand for.

        A token that holds the prompt's end and the text's beginning is the text's. Raises DocumentError where the text changes
        more of the prompt than the engine keeps states for.
        """
        encoded = tokenizer.encode([self.tail + text for text in texts], after_cut=self.fixed > 0, with_offsets=with_offsets)
        return [self._own(tokens) for tokens in encoded]

    def _own(self, tokens: Tokens) -> Tokens:
        shared = np.array(self.ids[self.fixed :], dtype=np.int32)
        known = min(len(shared), len(tokens.ids))
        differ = np.flatnonzero(shared[:known] != tokens.ids[:known])
        kept = int(differ[0]) if len(differ) else known
        replaced = len(shared) - kept
        if replaced > self.replaceable:
            raise DocumentError(
                "tokenize",
                f"expected a text that leaves the prompt's tokens as they are but for the last {self.replaceable}, and this one's "
                f"beginning changes {replaced}: end the prompt {self.text!r} with a line break, or begin the text with one",
            )
        if tokens.char_starts is None or tokens.char_ends is None:
            return Tokens(tokens.ids[kept:], None, None, replaced)
        starts, ends = (np.maximum(places[kept:] - len(self.tail), 0) for places in (tokens.char_starts, tokens.char_ends))
        return Tokens(tokens.ids[kept:], starts, ends, replaced)


def make_prompt(text: str, tokenizer: TextTokenizer) -> Prompt:
    """`text` as what comes before every document."""
    cut = None if tokenizer.cuts.reason is not None else tokenizer.cuts.last(text)
    fixed = tokenizer.encode([text[:cut]])[0].ids.tolist() if cut is not None else []
    if not fixed:  # a normalizer may leave nothing of it
        cut = None
    tail = text[cut:] if cut is not None else text
    ids = fixed + tokenizer.encode([tail], after_cut=bool(fixed))[0].ids.tolist()
    return Prompt(text, tuple(ids), len(fixed), tail)

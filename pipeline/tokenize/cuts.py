"""Where a text can be cut so that the ids of the parts, one after the other, are the ids of the whole.

A cut a|b between two characters is safe if each stage of the tokenizer, in its own order, does the same in the parts as in
the whole. What is proven, and where the reasons stand:

    added tokens      none that may match (in the raw text, or normalized) holds "ab", so that no match spans the cut; one that
                      strips spaces or asks for a whole word does not look across it. Special tokens count too, where they are
                      text: they are still looked for, and hide others that they overlap.
    normalizer        normalizers.py
    pre-tokenizer     pretokenizers.py, patterns.py
    model             any, if a word ends at the cut: models see one word at a time. Inside a word only BPE: a and b are both
                      in the vocabulary and no entry holds "ab", so that no merge joins the two sides, and merges on one side
                      do not wait for those on the other. Both known: an unknown character is fused with its neighbour, or
                      dropped, which makes neighbours of others. Not with ignore_merges (a part may be an entry), affixes of
                      words, or dropout. Not Unigram: it adds up the scores of a word's entries from its start, and the
                      rounding of the sum decides between paths that are equally good.
    post-processor, truncation, padding    taken out (tokenizer.py)

Only the two characters beside a cut are looked at, and only if what they are is certain (`characters.settled`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longscan.pipeline.tokenize.characters import is_space, settled
from longscan.pipeline.tokenize.normalizers import flatten, normalizer_steps
from longscan.pipeline.tokenize.pretokenizers import Place, pretokenizer_steps
from longscan.pipeline.tokenize.regex import Unprovable

Json = dict[str, Any]

USUAL_CUTS = ("a ", ". ", "a\n", ".\n", "a.", "字。", "。字", "字\n", "。\n", " a", "\na")
"""Where texts can be expected to have a cut. A tokenizer that allows none of these is not worth looking for others."""

REMEMBERED_PAIRS = 1 << 16


class Cuts:
    """The safe cuts of one tokenizer, from its tokenizer.json.

    `reason` says why there are none, or is None. `prepends` says that the normalizer begins a text with a prefix of its
    own, so that a text after a cut must be tokenized without it.
    """

    def __init__(self, tokenizer: Json, *, normalize: Callable[[str], str], parse_special: bool) -> None:
        """normalize: the tokenizer's own normalizer. parse_special: special tokens in the text are tokens, not text."""
        self.reason: str | None = None
        self.prepends = any(part["type"] == "Prepend" for part in flatten(tokenizer["normalizer"]))
        self._known: dict[str, bool] = {}
        try:
            self._prepare(tokenizer, normalize, parse_special)
        except Unprovable as error:
            self.reason = str(error)
            return
        if not any(map(self.safe, USUAL_CUTS)):
            self.reason = "neither spaces nor line ends nor punctuation separate what its model joins"

    def safe(self, pair: str) -> bool:
        """Whether the text may be cut between the two characters of `pair`."""
        known = self._known.get(pair)
        if known is None:
            if len(self._known) >= REMEMBERED_PAIRS:
                self._known.clear()
            known = self._known[pair] = self._is_safe(pair[0], pair[1])
        return known

    def last(self, text: str) -> int | None:
        """The last place in the text, counted in characters, where it may be cut."""
        return next((index for index in range(len(text) - 1, 0, -1) if self.safe(text[index - 1 : index + 1])), None)

    def first(self, text: str) -> int | None:
        return next((index for index in range(1, len(text)) if self.safe(text[index - 1 : index + 1])), None)

    def _prepare(self, tokenizer: Json, normalize: Callable[[str], str], parse_special: bool) -> None:
        model = tokenizer["model"]
        if model.get("dropout"):
            raise Unprovable("its model drops merges at random")
        added = tokenizer["added_tokens"]
        # Without one that may match, the others are looked for in vain: the text stays as it is.
        if not any(parse_special or not token["special"] for token in added):
            added = []
        elif self.prepends:
            raise Unprovable("it has added tokens, and its normalizer begins the text after each with a prefix")
        self._raw = AddedTokens.of(token for token in added if not token["normalized"])
        self._normalized = AddedTokens.of({**token, "content": normalize(token["content"])} for token in added if token["normalized"])
        self._normalizers = normalizer_steps(tokenizer["normalizer"])
        self._pretokenizers = pretokenizer_steps(tokenizer["pre_tokenizer"])
        self._inside_words = BpeCuts(model) if _cuts_words(model) else None

    def _is_safe(self, before: str, after: str) -> bool:
        if not (settled(before) and settled(after)) or self._raw.may_span(before, after):
            return False
        for normalizer in self._normalizers:
            pair = normalizer(before, after)
            if pair is None or not all(map(settled, pair)):
                return False
            before, after = pair
        if self._normalized.may_span(before, after):
            return False
        place = Place(before, after)
        for pretokenizer in self._pretokenizers:
            seen = pretokenizer(place)
            if seen is None:
                return False
            place = seen
        if place.border:
            return True
        return self._inside_words is not None and self._inside_words.safe(place.before, place.after)


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """What must be known of added tokens to say that no match of one spans a cut or looks across it."""

    inside: frozenset[str]
    """All pairs of neighbours in the tokens."""
    whole_word: frozenset[str]
    """First and last characters of those that ask what their neighbours are, as "|x" and "x|"."""
    strips_left: frozenset[str]
    """First characters of those that take the spaces before them."""
    strips_right: frozenset[str]

    @classmethod
    def of(cls, tokens: Iterator[Json]) -> AddedTokens:
        filled = [token for token in tokens if token["content"]]
        words = [token["content"] for token in filled if token["single_word"]]
        return cls(
            frozenset(pair for token in filled for pair in _pairs(token["content"])),
            frozenset(f"|{word[0]}" for word in words) | frozenset(f"{word[-1]}|" for word in words),
            frozenset(token["content"][0] for token in filled if token["lstrip"]),
            frozenset(token["content"][-1] for token in filled if token["rstrip"]),
        )

    def may_span(self, before: str, after: str) -> bool:
        if before + after in self.inside or f"{before}|" in self.whole_word or f"|{after}" in self.whole_word:
            return True
        left, right = is_space(before), is_space(after)
        return (left and bool(self.strips_left) and (right or after in self.strips_left)) or (
            right and bool(self.strips_right) and (left or before in self.strips_right)
        )


class BpeCuts:
    """Cuts inside what a BPE model takes for one word."""

    def __init__(self, model: Json) -> None:
        self._vocabulary: Json = model["vocab"]

    @cached_property
    def _joined(self) -> frozenset[str]:
        return frozenset(pair for entry in self._vocabulary for pair in _pairs(entry))

    def safe(self, before: str, after: str) -> bool:
        return before in self._vocabulary and after in self._vocabulary and before + after not in self._joined


def _cuts_words(model: Json) -> bool:
    if model["type"] != "BPE" or model.get("ignore_merges"):
        return False
    return not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix")


def _pairs(text: str) -> Iterator[str]:
    return (text[index : index + 2] for index in range(len(text) - 1))

"""A tokenizer as longscan uses it: ids of text alone, without template, truncation or padding, and what is known of its cuts."""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from longscan.pipeline.errors import ModelError
from longscan.pipeline.records import Ids
from longscan.pipeline.tokenize.cuts import Cuts
from longscan.pipeline.tokenize.normalizers import without_prepend
from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

Json = dict[str, Any]
Chars = npt.NDArray[np.int64]

LEFT_OUT = ("truncation", "padding", "post_processor")
"""Parts of tokenizer.json that add to a text's ids or take from them. No id depends on the decoder either."""


class Tokens(NamedTuple):
    """Ids of one text, and where each stands in it, in code points from the text's start, half-open."""

    ids: Ids
    char_starts: Chars | None
    char_ends: Chars | None
    replaced: int = 0
    """Tokens at the end of a prompt before the text that its first ones stand for."""


class TextTokenizer:
    """A fast tokenizer; safe to use from several threads at once.

    bos_id, eos_id: ids of the tokenizer's own BOS and EOS tokens, or None.
    adds_bos, adds_eos: whether its template puts them around a text by itself; longscan never does.
    fingerprint: SHA-256 of all that decides the ids: the tokenizer.json without template, truncation, padding and decoder.
    vocab_size: one more than the highest id there is; max_text_id: the highest that a text can be given.
    cuts: where a text may be cut (cuts.py).
    """

    def __init__(self, backend: Tokenizer, *, bos_id: int | None = None, eos_id: int | None = None, parse_special: bool = False) -> None:
        """backend: is copied. parse_special: special tokens in a text become their ids; otherwise they are text like any other.

        Raises ModelError for a tokenizer with parts written in Python, which cannot be copied to other processes.
        """
        self.bos_id, self.eos_id, self.parse_special = bos_id, eos_id, parse_special
        content = _serialize(backend)
        self.adds_bos, self.adds_eos = _template(content, bos_id, eos_id)
        content |= dict.fromkeys(LEFT_OUT)
        self._whole = self._build(content)
        ids: dict[str, int] = self._whole.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(ids.values(), default=-1)
        never = set() if parse_special else {token["content"] for token in content["added_tokens"] if token["special"]}
        never -= set(self._whole.get_vocab(with_added_tokens=False))
        self.max_text_id = max((id for token, id in ids.items() if token not in never), default=-1)
        self.fingerprint = _fingerprint(content)
        self.cuts = Cuts(content, normalize=self._normalize, parse_special=parse_special)
        self._later = self._whole
        if self.cuts.prepends and self.cuts.reason is None:
            self._later = self._build(content | {"normalizer": without_prepend(content["normalizer"])})
        if self.cuts.reason is not None:
            logger.warning(
                "texts are tokenized whole, which is exact but takes some 170 bytes of memory a byte and one thread a document: "
                "this tokenizer has no place where a text can be shown to be safe to cut, because %s",
                self.cuts.reason,
            )

    def encode(self, texts: Sequence[str], *, after_cut: bool = False, with_offsets: bool = False) -> list[Tokens]:
        """Tokens of each text. Other threads run meanwhile.

        after_cut: the texts go on after a cut, rather than begin a document.
        """
        backend = self._later if after_cut else self._whole
        if not with_offsets:
            fast = backend.encode_batch_fast(texts, add_special_tokens=False)
            return [Tokens(_array(encoding.ids), None, None) for encoding in fast]
        tokens = []
        for encoding in backend.encode_batch(texts, add_special_tokens=False):
            # Not sorted into starts and ends before they are numbers: that would be an iterator a token.
            places = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(encoding)).reshape(-1, 2)
            tokens.append(Tokens(_array(encoding.ids), places[:, 0], places[:, 1]))
        return tokens

    def _build(self, content: Json) -> Tokenizer:
        backend = Tokenizer.from_str(json.dumps(content))
        backend.encode_special_tokens = not self.parse_special
        return backend

    def _normalize(self, text: str) -> str:
        normalizer = self._whole.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


def check_fits(tokenizer: TextTokenizer, vocab_size: int) -> None:
    """Raises ModelError where an id that the tokenizer gives a text, or its BOS or EOS, is none of the model's `vocab_size`.

    A special token that only templates use (a padding token added behind the vocabulary, say) does no harm.
    """
    highest = max(tokenizer.max_text_id, tokenizer.bos_id or 0, tokenizer.eos_id or 0)
    if highest >= vocab_size:
        raise ModelError(
            f"model.tokenizer: expected ids below {vocab_size}, the model's vocabulary, found a tokenizer of "
            f"{tokenizer.vocab_size} entries with ids up to {highest}; use the tokenizer that the model was trained with"
        )


def _array(ids: Sequence[int]) -> Ids:
    """As an array: by `struct`, which takes two thirds of numpy's time for a list, all of it under Python's lock."""
    return np.frombuffer(struct.pack(f"{len(ids)}i", *ids), np.int32)


def _serialize(backend: Tokenizer) -> Json:
    try:
        content: Json = json.loads(backend.to_str())
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(
            f"expected a tokenizer that tokenizer.json can hold, found one that cannot be saved ({error}): "
            "parts written in Python are not supported"
        ) from error
    return content


def _fingerprint(content: Json) -> str:
    decisive = {key: content[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode("ascii")).hexdigest()


def _template(content: Json, bos_id: int | None, eos_id: int | None) -> tuple[bool, bool]:
    """Whether the tokenizer puts its BOS before a text, and its EOS after it, when nobody asks it not to."""
    if content["post_processor"] is None:
        return False, False
    backend = Tokenizer.from_str(json.dumps(content | {"truncation": None, "padding": None}))
    plain = backend.encode("a", add_special_tokens=False).ids
    dressed = backend.encode("a", add_special_tokens=True).ids
    extra = len(dressed) - len(plain)
    start = next((at for at in range(extra + 1) if dressed[at : at + len(plain)] == plain), 0)
    return bos_id in dressed[:start], eos_id in dressed[start + len(plain) :]

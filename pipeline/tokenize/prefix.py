"""The beginning of a document that decides its settled tokens, as a length and a hash: what a longer one must have alike.

Of a text it ends one character behind the last safe cut: a cut is safe by the two characters beside it (cuts.py), so the tokens
before it are the same whatever follows. What stands behind it may change, as the last line of a log does that was being
written. Token ids are settled all of them.
"""

from __future__ import annotations

import hashlib

from longscan.pipeline.records import Document, Ids, Prefix

CHARACTER_BYTES = 4
"""Of UTF-8, at most."""


def prefix_of_text(text: memoryview, cut: int) -> Prefix:
    """cut: the last safe one, in bytes; some character stands behind it."""
    behind = bytes(text[cut : cut + CHARACTER_BYTES]).decode("utf-8", "ignore")[0]
    length = cut + len(behind.encode())
    return Prefix(length, hashlib.sha256(text[:length]).hexdigest())


def prefix_of_ids(ids: Ids) -> Prefix:
    return Prefix(len(ids), _ids_digest(ids))


def begins_with(document: Document, prefix: Prefix) -> bool:
    """Whether the document's text, or ids, begins with these."""
    if document.token_ids is not None:
        ids = document.token_ids[: prefix.length]
        return len(ids) == prefix.length and _ids_digest(ids) == prefix.sha256
    if document.text is None or document.text.nbytes < prefix.length:
        return False
    return hashlib.sha256(document.text[: prefix.length]).hexdigest() == prefix.sha256


def _ids_digest(ids: Ids) -> str:
    return hashlib.sha256(ids.astype("<i4", copy=False).tobytes()).hexdigest()

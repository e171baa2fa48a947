"""What a person may see: no secrets of URIs, wherever a library quotes a part of one, and no control characters on a terminal."""

from __future__ import annotations

import re
from urllib.parse import unquote

SHORTEST_SECRET, LONG_NAME = 6, 16
"""Characters. A user without a password is a token where it is long; else it is a name, as of a container."""

_USER = re.compile(r"(?<=://)[^/\s'\"]*@")
_QUERY = re.compile(r"(?<=://)([^\s'\"?]*)\?[^\s'\"]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

_secrets: set[str] = set()
"""Of the URIs that this process has met: libraries quote parts of a URI alone."""


def remember_secrets(text: str) -> None:
    """Mask the secrets of the URIs in `text` from now on, wherever they come up."""
    users = [found[0][:-1] for found in _USER.finditer(text)]
    words = [user.partition(":")[2] for user in users] + [user for user in users if len(user) >= LONG_NAME]
    for found in _QUERY.finditer(text):
        pairs = [pair.partition("=") for pair in found[0].partition("?")[2].split("&")]
        words += [value for name, _, value in pairs if "/" not in name]  # else it is a glob: `s3://bucket/part?/a=1/x.parquet`
    # A shorter one is a version or the like, and would mask half of what is said.
    _secrets.update(each for word in words for each in (word, unquote(word)) if len(each) >= SHORTEST_SECRET)


def redact(text: str) -> str:
    """`text` with every secret of the URIs in it masked: user and password, and the query. Local paths stay as they are."""
    text = _QUERY.sub(r"\1?***", _USER.sub("***@", text))
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def printable(text: str) -> str:
    """The same with every control character but line feeds and tabs written as an escape: a terminal obeys them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), redact(text))

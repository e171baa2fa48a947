"""Frames: the one binary form of all that is kept for an unfinished shard. Plain data, checksummed whole, no pickle.

    frame   = "LSf1", header bytes u32, body bytes u64, header, body, sha256 of all before it (32 bytes); numbers are little-endian
    header  = JSON, ASCII; floats as Python writes them, which gives the same bits back, NaN and Infinity by these names
    body    = bytes that the header tells the meaning of

A file holds one frame or several, end to end. What was written last may be torn: reading stops at the first frame that
is not whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

MAGIC = b"LSf1"
_PREFIX = struct.Struct("<4sIQ")
_DIGEST = 32
MOST_HEADER = 1 << 28
"""Bytes: a length beyond this is damage, not data."""

Buffer = bytes | memoryview

_JSON = json.JSONEncoder(separators=(",", ":"), check_circular=False)  # headers are made here, as trees; and all of it holds Python's lock


@dataclass(frozen=True, slots=True)
class Frame:
    header: dict[str, Any]
    body: memoryview
    start: int
    """Of the frame in its file."""
    stop: int


def pack(header: dict[str, Any], body: Sequence[Buffer] = ()) -> bytes:
    """One frame; `body` is given in pieces."""
    text = _JSON.encode(header).encode("ascii")
    pieces = [_PREFIX.pack(MAGIC, len(text), sum(len(piece) for piece in body)), text, *body]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return b"".join([*pieces, digest.digest()])


def read_frame(file: IO[bytes], start: int) -> Frame | None:
    """The frame at `start`; None where none is whole there."""
    file.seek(start)
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return None
    magic, header_bytes, body_bytes = _PREFIX.unpack(prefix)
    if magic != MAGIC or header_bytes > MOST_HEADER:
        return None
    # Not the lengths that are claimed: a damaged one would ask for memory that is not there.
    rest = memoryview(_read(file, header_bytes + body_bytes + _DIGEST))
    if len(rest) < header_bytes + body_bytes + _DIGEST:
        return None
    digest = hashlib.sha256(prefix)
    digest.update(rest[:-_DIGEST])
    if digest.digest() != rest[-_DIGEST:]:
        return None
    header = json.loads(bytes(rest[:header_bytes]))
    return Frame(header, rest[header_bytes:-_DIGEST], start, start + len(prefix) + len(rest))


def read_frames(file: IO[bytes]) -> Iterator[Frame]:
    """All whole frames from the file's start on."""
    at = 0
    while (frame := read_frame(file, at)) is not None:
        yield frame
        at = frame.stop


def read_headers(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Headers of the frames from the file's start on, whose bodies are neither read nor checked. Ends at what is no frame."""
    size = file.seek(0, os.SEEK_END)
    at = 0
    while at + _PREFIX.size <= size:
        file.seek(at)
        magic, header_bytes, body_bytes = _PREFIX.unpack(file.read(_PREFIX.size))
        at += _PREFIX.size + header_bytes + body_bytes + _DIGEST
        if magic != MAGIC or header_bytes > MOST_HEADER or at > size:
            return
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError:
            return
        if not isinstance(header, dict):
            return
        yield header


def _read(file: IO[bytes], count: int) -> bytes | bytearray:
    """Up to `count` bytes, in steps, so that memory grows with what is there."""
    data = bytearray()
    while len(data) < count and (more := file.read(min(count - len(data), 1 << 24))):
        data += more
    return data

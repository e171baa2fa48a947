"""A document's carry as a file: written whole, read only if it is whole and this very document's.

_run/carries/<shard>/<ordinal>-<position>-<attempt>.carry       one frame (see `frames`)

header   owner     fingerprint of the run, shard, ordinal, digest of the document's content
         position, cut [byte, char, token], host {the numbers of HostCarry}
         rows      [windows, tokens, positions, states]: what the rows before it count up to
         tensors   [[name, dtype, shape], ...] in the order of the body
body     the tensors' bytes, C order, end to end
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from longscan.pipeline.keep.frames import Buffer, Frame, pack, read_frame
from longscan.pipeline.keep.rowcodec import Counts
from longscan.pipeline.records import Carry, Cut, Document, HostCarry

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each tensor of a carry."""

SUFFIX = ".carry"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose carry it is: one document, with this content, of one run."""

    fingerprint: str
    shard: int
    ordinal: int
    digest: str
    """`content_digest` of the document."""


@dataclass(frozen=True, slots=True)
class SavedCarry:
    """What a file holds, but for its tensors: they are large, and read when they are wanted."""

    owner: Owner
    host: HostCarry
    cut: Cut
    counts: Counts


def content_digest(document: Document) -> str:
    """sha256 of the whole text, or of the ids, and of the positions; 128 bits of it in hex. Carries are for this content alone."""
    digest = hashlib.sha256()
    if document.text is not None:
        digest.update(document.text)
    for array in (document.token_ids, document.positions):
        if array is not None:
            digest.update(f"|{array.dtype.str}|".encode() + array.tobytes())
    return digest.hexdigest()[:32]


def carry_name(ordinal: int, position: int, attempt: int) -> str:
    return f"{ordinal:06d}-{position:012d}-{attempt:06d}{SUFFIX}"


def named(name: str) -> tuple[int, int, int] | None:
    """(ordinal, position, attempt) of a carry's file; None for another file."""
    parts = name.removesuffix(SUFFIX).split("-")
    if not name.endswith(SUFFIX) or len(parts) != 3 or not all(part.isdigit() for part in parts):
        return None
    ordinal, position, attempt = map(int, parts)
    return ordinal, position, attempt


def save_carry(carry: Carry, owner: Owner, counts: Counts) -> bytes:
    """The file's content. Reads the carry's tensors: on a GPU that may wait for a copy."""
    tensors = {name: tensor.contiguous() for name, tensor in carry.tensors().items()}
    header = {
        "owner": asdict(owner),
        "position": carry.position,
        "cut": [carry.cut.byte, carry.cut.char, carry.cut.token],
        "host": asdict(carry.host),
        "rows": counts,
        "tensors": [[name, _dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()],
    }
    return pack(header, [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in tensors.values()])


def parse_carry(data: Buffer | None, owner: Owner, layout: Layout) -> tuple[SavedCarry, dict[str, torch.Tensor]] | str:
    """What `save_carry` made; or, in words, why it is of no use for this document."""
    frame = None if data is None else read_frame(io.BytesIO(data), 0)
    if data is None or frame is None or frame.stop != len(data):
        return "it is not whole"
    try:
        return _parse(frame, owner, layout)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"it is not what this version writes ({type(error).__name__}: {error})"


def _parse(frame: Frame, owner: Owner, layout: Layout) -> tuple[SavedCarry, dict[str, torch.Tensor]] | str:
    header = frame.header
    found = Owner(**header["owner"])
    if found != owner:
        if (found.fingerprint, found.shard, found.ordinal) != (owner.fingerprint, owner.shard, owner.ordinal):
            return "it belongs to another run, or to another document"
        return "the document's content has changed"
    described = {name: (_dtype(dtype), tuple(shape)) for name, dtype, shape in header["tensors"]}
    if described != dict(layout):
        return "its tensors are not those of this model"
    windows, tokens, positions, states = header["rows"]
    saved = SavedCarry(found, HostCarry(**header["host"]), Cut(*header["cut"]), (windows, tokens, positions, states))
    return saved, _tensors(frame.body, described)


def _tensors(body: memoryview, described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    tensors = {}
    at = 0
    for name, (dtype, shape) in described.items():
        count = math.prod(shape)
        size = count * dtype.itemsize
        # Copied, since the body may lie anywhere, and a tensor's numbers must lie on a multiple of their size.
        tensors[name] = torch.frombuffer(bytearray(body[at : at + size]), dtype=dtype, count=count).reshape(shape)
        at += size
    if at != len(body):
        raise ValueError(f"expected {at} bytes of tensors, found {len(body)}")
    return tensors


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a type of numbers, found {name!r}")
    return dtype

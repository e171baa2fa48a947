"""The carries of one shard as files: which there are, the newest of a document that is of use, and a newer one in its place."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from longscan.pipeline.errors import OutputError
from longscan.pipeline.keep.carry import Layout, Owner, SavedCarry, carry_name, named, parse_carry, save_carry
from longscan.pipeline.keep.journal import Trail
from longscan.pipeline.keep.rowcodec import Counts
from longscan.pipeline.records import Carry
from longscan.pipeline.storage.location import Location, atomic_write, read_bytes, remove

log = logging.getLogger(__name__)


class CarryFiles:
    """Of one attempt at one shard. A document's are changed by the backlog's thread alone, once the document is open."""

    def __init__(self, folder: Location, attempt: int, layout: Layout) -> None:
        self._folder, self._attempt, self._layout = folder, attempt, layout
        self._names: dict[int, list[str]] = {}
        """Ordinal -> its files, the newest position last."""

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._names

    def add(self, names: Sequence[str]) -> None:
        """Files that attempts before have left; other files among them are passed over."""
        for name in sorted(names):
            if (found := named(name)) is not None:
                self._names.setdefault(found[0], []).append(name)

    def newest(self, owner: Owner, trail: Trail) -> tuple[SavedCarry | None, str | None]:
        """The furthest carry that is whole, the owner's, and without a gap in the rows before it; with its name. Others are told of."""
        for name in reversed(self._names.get(owner.ordinal, [])):
            parsed = parse_carry(self._read(name), owner, self._layout)
            if not isinstance(parsed, str) and not _between(trail.base, parsed[0].counts, trail.counts):
                parsed = "rows before it are missing"
            if not isinstance(parsed, str):
                return parsed[0], name
            log.warning("%s: this carry is left out: %s", self._folder / name, parsed)
        return None, None

    def tensors(self, name: str, owner: Owner) -> Mapping[str, torch.Tensor]:
        """Of the carry in `name`. Raises OutputError where it is no longer whole."""
        parsed = parse_carry(self._read(name), owner, self._layout)
        if isinstance(parsed, str):
            raise OutputError(f"{self._folder / name}: a carry that was whole cannot be used any more: {parsed}; the shard is tried again")
        return parsed[1]

    def is_newest(self, carry: Carry) -> bool:
        """One with more tokens at risk may have gone first, though it was made later: at a stop."""
        return max(self._names.get(carry.ordinal, []), default="") <= self._name(carry)

    def write(self, carry: Carry, owner: Owner, counts: Counts) -> str:
        """The carry's file, whole; its name. counts: what the rows before it count up to. Raises OutputError where it cannot be written."""
        name = self._name(carry)
        atomic_write(self._folder / name, save_carry(carry, owner, counts))
        return name

    def remove(self, ordinal: int, newest: str | None = None) -> None:
        """All files of a document but for the newest, if there is one."""
        for name in self._names.pop(ordinal, []):
            if name != newest:
                remove(self._folder / name)
        if newest is not None:
            self._names[ordinal] = [newest]

    def _name(self, carry: Carry) -> str:
        return carry_name(carry.ordinal, carry.position, self._attempt)

    def _read(self, name: str) -> bytes | None:
        try:
            return read_bytes(self._folder / name)
        except Exception as error:  # each file system has exceptions of its own
            log.warning("%s: cannot be read: %s", self._folder / name, error)
            return None


def _between(least: Counts, counts: Counts, most: Counts) -> bool:
    return all(low <= count <= high for low, count, high in zip(least, counts, most, strict=True))

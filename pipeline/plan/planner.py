"""Input files -> shards: whole row groups in the input's order, so that each row is in one shard, once.

The plan is made once, kept beside the output, and read back by every later start: part names, ordinals and sizes come
from it, whatever machine goes on.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from longscan.kernels.segments import TILE
from longscan.pipeline.errors import OutputError
from longscan.pipeline.records import BYTES_PER_TOKEN
from longscan.pipeline.shards import Piece, Shard, SourceFile

MAX_SHARDS = 10_000
CUT_BEYOND = 4
"""A row group is cut by rows only where it is more than this many times `shard_tokens`."""

FORMAT = 1
NO_COLUMNS = pa.schema([])


@dataclass(frozen=True)
class Plan:
    """The shards of a run, and what else a later start must do alike."""

    shards: tuple[Shard, ...]
    shard_tokens: int
    """As asked for, or larger, where that many shards would have been too many."""
    passthrough: pa.Schema = NO_COLUMNS
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Lanes, step and the like: made from the device at the first start, JSON values."""
    device: str = ""
    """Its name: another of the same kind may differ from it in the last bits. Empty where none is known."""

    @property
    def num_rows(self) -> int:
        """Rows of both output tables; a file that cannot be read at all is one."""
        return sum(shard.num_rows for shard in self.shards)

    @property
    def estimated_tokens(self) -> int:
        return sum(shard.estimated_tokens for shard in self.shards)

    def chains(self) -> list[tuple[Shard, ...]]:
        """Shards in order, those together that read on in one row group: best taken one after the other by one worker."""
        chains: list[tuple[Shard, ...]] = []
        for shard in self.shards:
            if shard.reads_on:
                chains[-1] += (shard,)
            else:
                chains.append((shard,))
        return chains

    def to_json(self) -> str:
        """Everything but the files' paths, which may hold secrets and are found again under their names."""
        files: dict[str, int] = {}
        rows: list[list[Any]] = []
        for file in (piece.file for shard in self.shards for piece in shard.pieces):
            if file.name not in files:
                files[file.name] = len(files)
                rows.append([file.name, file.size, file.version, file.error])
        shards = [
            [shard.estimated_tokens, [[files[p.file.name], p.row_group, p.start, p.stop, p.first_row] for p in shard.pieces]]
            for shard in self.shards
        ]
        schema = base64.b64encode(self.passthrough.serialize()).decode()
        content = {
            "format": FORMAT,
            "shard_tokens": self.shard_tokens,
            "sizes": dict(self.sizes),
            "passthrough": schema,
            "device": self.device,
        }
        return json.dumps({**content, "files": rows, "shards": shards}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes, files: Sequence[SourceFile]) -> Plan:
        """The plan that `to_json` wrote, its files' paths taken from `files` by their names.

        Raises OutputError where it is not such a plan, or one of its files is not among `files`.
        """
        paths = {file.name: file.path for file in files}
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise OutputError(f"the run's plan: expected format {FORMAT}, found {content['format']}; it is of another version")
            found = [SourceFile(paths[name], name, size, version, (), error) for name, size, version, error in content["files"]]
            shards = tuple(
                Shard(index, len(content["shards"]), tuple(Piece(found[f], *numbers) for f, *numbers in pieces), tokens)
                for index, (tokens, pieces) in enumerate(content["shards"])
            )
            schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(content["passthrough"])))
            return cls(shards, content["shard_tokens"], schema, content["sizes"], content.get("device", ""))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise OutputError(
                f"the run's plan cannot be read back: {type(error).__name__}: {error}; start anew with output.overwrite=true"
            ) from error


@dataclass(frozen=True, slots=True)
class _Unit:
    """A row group, or a slice of one, or a file that cannot be read: what is never cut further."""

    piece: Piece
    tokens: int
    cost: int
    alone: bool


def make_plan(
    files: Sequence[SourceFile],
    *,
    shard_tokens: int,
    limit: int | None = None,
    passthrough: pa.Schema = NO_COLUMNS,
    sizes: Mapping[str, Any] | None = None,
    device: str = "",
    bytes_per_token: int = BYTES_PER_TOKEN,
) -> Plan:
    """Cut the scanned `files` into shards of about `shard_tokens` tokens, at most MAX_SHARDS of them.

    limit: only the first rows of the whole input. An input without rows is one shard without rows, so that a run over it
    ends as any other, with its tables empty.

    Pure: the same files and numbers give the same plan. Raises ValueError where shard_tokens is less than 1.
    """
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens: expected at least 1, got {shard_tokens}")
    while True:
        units = list(_units(files, shard_tokens, limit, bytes_per_token))
        groups = list(_packed(units, shard_tokens))
        if len(groups) <= MAX_SHARDS:
            break
        shard_tokens = max(shard_tokens * len(groups) // MAX_SHARDS, shard_tokens + shard_tokens // 10 + 1)
    shards = tuple(
        Shard(index, len(groups), tuple(unit.piece for unit in group), sum(unit.tokens for unit in group))
        for index, group in enumerate(groups)
    )
    return Plan(shards, shard_tokens, passthrough, dict(sizes or {}), device)


def _units(files: Sequence[SourceFile], shard_tokens: int, limit: int | None, bytes_per_token: int) -> Iterator[_Unit]:
    left = limit
    for file in files:
        if left == 0:
            return
        bare = SourceFile(file.path, file.name, file.size, file.version, (), file.error)  # a shard travels without the whole footer
        if file.error is not None:
            yield _Unit(Piece(bare, -1, 0, 1, 0), 0, 0, alone=False)
            continue
        first_row = 0
        for g, group in enumerate(file.row_groups):
            rows = group.num_rows if left is None else min(group.num_rows, left)
            if rows:
                tokens = group.num_bytes * rows // group.num_rows // bytes_per_token
                yield from _cut(Piece(bare, g, 0, rows, first_row), tokens, shard_tokens)
            first_row += group.num_rows
            left = None if left is None else left - rows


def _cut(whole: Piece, tokens: int, shard_tokens: int) -> Iterator[_Unit]:
    """A row group as one unit, or as slices of rows if it is far too large for a shard."""
    cost = max(tokens, whole.stop * TILE)  # however short a document is, a tile of the step is its own
    if cost <= CUT_BEYOND * shard_tokens:
        yield _Unit(whole, tokens, cost, alone=False)
        return
    slices = min(whole.stop, -(-cost // shard_tokens))
    for i in range(slices):
        start, stop = whole.stop * i // slices, whole.stop * (i + 1) // slices
        part = Piece(whole.file, whole.row_group, start, stop, whole.first_row + start)
        share = tokens * stop // whole.stop - tokens * start // whole.stop
        yield _Unit(part, share, cost // slices, alone=True)


def _packed(units: Sequence[_Unit], shard_tokens: int) -> Iterator[list[_Unit]]:
    """Units in order, as many to a shard as fit; a slice of a row group has one to itself."""
    shard: list[_Unit] = []
    cost = 0
    for unit in units:
        if shard and (unit.alone or shard[-1].alone or cost + unit.cost > shard_tokens):
            yield shard
            shard, cost = [], 0
        shard.append(unit)
        cost += unit.cost
    if shard or not units:
        yield shard

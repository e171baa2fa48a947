"""The columns of an input file that a job reads, and whether a file has them as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from longscan.pipeline.config import InputConfig

STRING_OF = {pa.binary(): pa.string(), pa.large_binary(): pa.large_string(), pa.binary_view(): pa.string_view()}
STRINGS = (pa.string(), pa.large_string(), pa.string_view())


@dataclass(frozen=True)
class Columns:
    """The columns that a job reads. Exactly one of `text` and `tokens` is set."""

    text: str | None
    tokens: str | None
    id: str | None
    passthrough: tuple[str, ...]
    positions: str | None = None

    @classmethod
    def of(cls, config: InputConfig) -> Columns:
        """As the configuration names them: a tokens column takes the place of the text."""
        text = None if config.tokens_column else config.text_column
        return cls(text, config.tokens_column or None, config.id_column or None, tuple(config.passthrough), config.positions_column)

    @property
    def content(self) -> str:
        """The column of text or token ids."""
        return self.tokens or self.text or ""

    @property
    def names(self) -> list[str]:
        """Every column that is read, each once."""
        return list(
            dict.fromkeys([self.content, *([self.id] if self.id else []), *([self.positions] if self.positions else []), *self.passthrough])
        )

    def complaint(self, schema: pa.Schema) -> str | None:
        """What keeps a file of this schema from being read as asked, or None."""
        for key, name in self._keys():
            count = schema.names.count(name)
            if count != 1:
                found = "no such column" if not count else f"{count} columns of this name"
                return f"{key}={name}: found {found}; the columns are {', '.join(schema.names) or 'none at all'}"
        kind = schema.field(self.content).type
        if self.tokens and not _is_ids(kind):
            return f"input.tokens_column={self.tokens}: expected lists of integers, found {kind}"
        if self.text and not _is_text(kind):
            return f"input.text_column={self.text}: expected strings, found {kind}; for token ids set input.tokens_column"
        if self.positions and not _is_ids(schema.field(self.positions).type):
            return f"input.positions_column={self.positions}: expected lists of integers, found {schema.field(self.positions).type}"
        if self.id and pa.types.is_nested(schema.field(self.id).type):
            return f"input.id_column={self.id}: expected one value a row, found {schema.field(self.id).type}"
        return None

    def _keys(self) -> Iterator[tuple[str, str]]:
        yield ("input.tokens_column" if self.tokens else "input.text_column"), self.content
        if self.id:
            yield "input.id_column", self.id
        if self.positions:
            yield "input.positions_column", self.positions
        for name in self.passthrough:
            yield "input.passthrough", name

    def passthrough_schema(self, schema: pa.Schema) -> pa.Schema:
        """Fields of the passthrough columns: nullable, since other files may hold nulls, and without a file's private numbering.

        A dictionary's column is written as its values: files differ in their dictionaries, and Parquet makes its own.
        """
        return pa.schema([pa.field(name, _plain_type(schema.field(name).type)) for name in self.passthrough])


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(kind == known for known in (*STRINGS, *STRING_OF, pa.null()))


def _is_ids(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(kind == pa.null() or (lists and pa.types.is_integer(kind.value_type)))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return kind.value_type if pa.types.is_dictionary(kind) else kind

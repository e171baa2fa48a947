"""Python's values <-> Arrow's arrays, by their buffers.

`pa.array` and `Array.to_numpy` look whether what they are given, or give, is pandas', and import it for that, at the first call:
a fifth of a second of a worker's start. Pure: nothing is opened, and what comes from an array is a view of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Flags = npt.NDArray[np.bool_]


def strings(values: Sequence[str | None]) -> pa.Array:
    """An array of strings. Raises ValueError where they are more than the 2 GiB that one can hold."""
    return _joined([None if value is None else value.encode() for value in values], pa.string(), np.dtype(np.int32))


def binaries(values: Sequence[bytes | memoryview]) -> pa.Array:
    """An array of large_binary."""
    return _joined(values, pa.large_binary(), np.dtype(np.int64))


def numbers(values: Sequence[float | None], kind: pa.DataType) -> pa.Array:
    """An array of `kind`, int64 or float64 and the like; None becomes null."""
    there = np.array([value is not None for value in values], dtype=bool)
    if there.all():
        return of_numpy(np.array(values, dtype=kind.to_pandas_dtype()), kind)
    return of_numpy(np.array([0 if value is None else value for value in values], dtype=kind.to_pandas_dtype()), kind, there)


def of_numpy(values: npt.NDArray[Any], kind: pa.DataType, there: Flags | None = None) -> pa.Array:
    """A one-dimensional array of numbers, without a copy where it lies in one piece. there: False makes null; None: all are."""
    return pa.Array.from_buffers(kind, len(values), [_bits(there), pa.py_buffer(np.ascontiguousarray(values, kind.to_pandas_dtype()))])


def flags(values: Flags) -> pa.Array:
    """An array of booleans."""
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(np.packbits(values, bitorder="little"))])


def to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """A view of the numbers in an array without nulls."""
    kind = array.type.to_pandas_dtype()
    data = array.buffers()[1]
    return np.empty(0, kind) if data is None else np.frombuffer(data, kind)[array.offset : array.offset + len(array)]


def _bits(there: Flags | None) -> pa.Buffer | None:
    return None if there is None or there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))


def _joined(values: Sequence[bytes | memoryview | None], kind: pa.DataType, offset: np.dtype[Any]) -> pa.Array:
    there = np.array([value is not None for value in values], dtype=bool)
    ends = np.cumsum([0, *(0 if value is None else len(value) for value in values)])
    if ends[-1] > np.iinfo(offset).max:
        raise ValueError(f"values: expected at most {np.iinfo(offset).max} bytes together, got {ends[-1]}")
    data = b"".join([value for value in values if value is not None])
    return pa.Array.from_buffers(kind, len(values), [_bits(there), pa.py_buffer(ends.astype(offset)), pa.py_buffer(data)])

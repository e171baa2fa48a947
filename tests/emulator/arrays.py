"""Global arrays of an emulated launch: loads and stores of tiles, and who touched which element.

Blocks of a launch run in no order, so an element that one block writes is that block's alone: a second block that reads
or writes it is an error here, where a GPU would only sometimes go wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from emulator.tiles import BY_TORCH, DType, EmulatorError, PaddingMode, Tile

NOBODY, MANY = -1, -2
Key = tuple[int, int]
"""Address and element size of a storage."""
Part = tuple[torch.Size, tuple[int, ...], int]
"""Shape, strides and offset of a view of it."""


class Memory:
    """Who read and who wrote each element of the storages of one launch. Reads of what nobody writes are only listed."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.block = NOBODY
        self._reads: dict[Key, list[tuple[int, Part]]] = {}
        self._marks: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
        self._shared: set[Key] = set()
        ranges: dict[Key, list[tuple[int, int]]] = {}
        for tensor in tensors:
            first = tensor.storage_offset()
            last = first + sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
            others = ranges.setdefault(_key(tensor), [])
            if any(first <= end and begin <= last for begin, end in others):
                self._shared.add(_key(tensor))
            others.append((first, last))

    def read(self, part: torch.Tensor, name: str) -> None:
        """Note that the running block reads all of `part`, a view of an argument."""
        key = _key(part)
        if key not in self._marks:
            self._reads.setdefault(key, []).append((self.block, (part.shape, part.stride(), part.storage_offset())))
            return
        readers, writers = (marks.as_strided(part.shape, part.stride(), part.storage_offset()) for marks in self._marks[key])
        if bool(((writers != NOBODY) & (writers != self.block)).any()):
            raise EmulatorError(f"{name}: block {self.block} reads what another block of the launch wrote")
        _mark_read(readers, self.block)

    def write(self, part: torch.Tensor, name: str) -> None:
        """Note that the running block writes all of `part`, a view of an argument."""
        key = _key(part)
        if key in self._shared:
            raise EmulatorError(f"{name}: stored to, while another argument lies in the same memory")
        if key not in self._marks:
            size = part.untyped_storage().nbytes() // part.element_size()
            self._marks[key] = (torch.full((size,), NOBODY, dtype=torch.int32), torch.full((size,), NOBODY, dtype=torch.int32))
            for block, geometry in self._reads.pop(key, []):
                _mark_read(self._marks[key][0].as_strided(*geometry), block)
        readers, writers = (marks.as_strided(part.shape, part.stride(), part.storage_offset()) for marks in self._marks[key])
        for others, what in ((readers, "reads"), (writers, "writes")):
            if bool(((others != NOBODY) & (others != self.block)).any()):
                raise EmulatorError(f"{name}: block {self.block} writes what another block of the launch {what}")
        writers.fill_(self.block)


def _key(tensor: torch.Tensor) -> Key:
    return tensor.untyped_storage().data_ptr(), tensor.element_size()


def _mark_read(readers: torch.Tensor, block: int) -> None:
    readers.copy_(torch.where((readers == NOBODY) | (readers == block), block, MANY))


class Array:
    """A kernel's array argument: a tensor, strided or not."""

    def __init__(self, tensor: torch.Tensor, name: str, memory: Memory) -> None:
        if tensor.dtype not in BY_TORCH:
            raise EmulatorError(f"{name}: {tensor.dtype} is not emulated")
        self.tensor, self.name, self.memory = tensor, name, memory

    @property
    def dtype(self) -> DType:
        return BY_TORCH[self.tensor.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    def tiled_view(
        self,
        tile_shape: Sequence[int],
        *,
        padding_mode: PaddingMode = PaddingMode.UNDETERMINED,
        traversal_steps: Sequence[int] | None = None,
    ) -> TiledView:
        return TiledView(self, tuple(tile_shape), tuple(traversal_steps or tile_shape), padding_mode)


class TiledView:
    """An array cut into tiles of one shape, whose origins lie `steps` apart."""

    def __init__(self, array: Array, shape: tuple[int, ...], steps: tuple[int, ...], padding_mode: PaddingMode) -> None:
        if not len(shape) == len(steps) == array.ndim:
            raise EmulatorError(f"{array.name}: expected a tile of {array.ndim} axes, got {shape}")
        self.array, self.shape, self.steps, self.padding_mode = array, shape, steps, padding_mode

    def _inside(self, index: Sequence[int] | int, check_bounds: bool) -> tuple[slice, ...]:
        places = []
        index = index if isinstance(index, tuple) else (index,)
        for i, side, step, length in zip(index, self.shape, self.steps, self.array.shape, strict=True):
            first = operator.index(i) * step
            if first < 0 or first >= length or (not check_bounds and first + side > length):
                raise EmulatorError(f"{self.array.name}: tile {index} of {self.shape} lies outside {self.array.shape}")
            places.append(slice(first, min(first + side, length)))
        return tuple(places)

    def load(self, index: Sequence[int], *, check_bounds: bool = True, latency: int | None = None, allow_tma: bool | None = None) -> Tile:
        del latency, allow_tma
        part = self.array.tensor[self._inside(index, check_bounds)]
        self.array.memory.read(part, self.array.name)
        dtype = self.array.dtype
        # What lies outside an array is undefined unless asked for: NaN, and integers that no kernel expects.
        outside = 0 if self.padding_mode is PaddingMode.ZERO else np.nan if dtype.kind == "f" else -(1 << 30) if dtype.kind == "i" else True
        values = np.full(self.shape, outside, dtype=dtype.numpy)
        numbers = part.float() if part.dtype is torch.bfloat16 else part
        values[tuple(slice(0, side) for side in part.shape)] = numbers.detach().numpy()
        return Tile(values, dtype)

    def store(
        self, index: Sequence[int], tile: Tile, *, check_bounds: bool = True, latency: int | None = None, allow_tma: bool | None = None
    ) -> None:
        del latency, allow_tma
        if tile.dtype is not self.array.dtype or tile.shape != self.shape:
            raise EmulatorError(f"{self.array.name}: stored {tile} as {self.shape}, {self.array.dtype}")
        part = self.array.tensor[self._inside(index, check_bounds)]
        self.array.memory.write(part, self.array.name)
        values = np.ascontiguousarray(tile.values[tuple(slice(0, side) for side in part.shape)])
        part.copy_(torch.from_numpy(values).to(part.dtype))


def load(
    array: Array,
    index: Sequence[int],
    shape: Sequence[int],
    *,
    padding_mode: PaddingMode = PaddingMode.UNDETERMINED,
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
) -> Tile:
    return array.tiled_view(shape, padding_mode=padding_mode).load(index, check_bounds=check_bounds, latency=latency, allow_tma=allow_tma)


def store(
    array: Array,
    index: Sequence[int],
    tile: Tile,
    *,
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
) -> None:
    array.tiled_view(tile.shape).store(index, tile, check_bounds=check_bounds, latency=latency, allow_tma=allow_tma)


def gather(array: Array, indices: Sequence[Tile], *, check_bounds: bool = True, latency: int | None = None) -> Tile:
    """array[row, column] for a column of row indices and a row of consecutive column indices: all that the kernels ask of it."""
    del latency
    rows, columns = indices
    if array.ndim != 2 or rows.shape != (rows.values.size, 1) or columns.shape != (1, columns.values.size) or check_bounds:
        raise EmulatorError(f"{array.name}: gather of {rows.shape} and {columns.shape} is not emulated")
    first, last = int(columns.values[0, 0]), int(columns.values[0, -1])
    inside = rows.values.min() >= 0 and rows.values.max() < array.shape[0] and first >= 0 and last < array.shape[1]
    if not inside or not bool((np.diff(columns.values) == 1).all()):
        raise EmulatorError(f"{array.name}: gather outside of {array.shape}, or of columns that do not follow each other")
    parts = [array.tensor[int(row), first : last + 1] for row in rows.values[:, 0]]
    for part in parts:
        array.memory.read(part, array.name)
    values = np.stack([(part.float() if part.dtype is torch.bfloat16 else part).detach().numpy() for part in parts])
    return Tile(values, array.dtype)


def num_tiles(array: Array, axis: int, shape: Sequence[int]) -> Tile:
    return Tile(-(-array.shape[axis] // shape[axis]), BY_TORCH[torch.int32])

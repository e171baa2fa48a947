"""Tiles on a CPU: the arithmetic of `cuda.tile` that the kernels use, in NumPy, as strict as the compiler and no wider.

What is not here raises: a name that no kernel uses yet, a keyword of the compiler that has no meaning here, a shape that is
no power of two, an integer that leaves 32 bits. Hints (latency, TMA, rounding of divisions) change no result and are taken.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class DType:
    """An element type. bfloat16 is held as float32 values that are rounded to it whenever one is made."""

    name: str
    numpy: Any
    torch: torch.dtype
    kind: str
    rank: int

    def __repr__(self) -> str:
        return f"ct.{self.name}"


bool_ = DType("bool_", np.bool_, torch.bool, "b", 0)
int32 = DType("int32", np.int32, torch.int32, "i", 1)
int64 = DType("int64", np.int64, torch.int64, "i", 2)
float16 = DType("float16", np.float16, torch.float16, "f", 3)
bfloat16 = DType("bfloat16", np.float32, torch.bfloat16, "f", 3)
float32 = DType("float32", np.float32, torch.float32, "f", 4)
float64 = DType("float64", np.float64, torch.float64, "f", 5)
DTYPES = (bool_, int32, int64, float16, bfloat16, float32, float64)
BY_TORCH = {dtype.torch: dtype for dtype in DTYPES}


class PaddingMode(enum.Enum):
    UNDETERMINED = "undetermined"
    ZERO = "zero"


class RoundingMode(enum.Enum):
    RN = "nearest_even"
    FULL = "full"
    APPROX = "approx"


class EmulatorError(Exception):
    """A kernel did what the compiler would refuse, or what this emulator does not know."""


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise EmulatorError(message)


def _round(values: Any, dtype: DType) -> Any:
    """`values` as `dtype` holds them."""
    if dtype is bfloat16:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        even = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(values), np.float32(np.nan), even.view(np.float32)).reshape(np.shape(values))
    if dtype.kind == "i":
        limits = np.iinfo(dtype.numpy)
        inside = np.all((np.asarray(values) >= limits.min) & (np.asarray(values) <= limits.max))
        _expect(bool(inside), f"an integer leaves the range of {dtype}")
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(dtype.numpy)


class Tile:
    """A value of a kernel: immutable, of a shape whose sides are powers of two. A scalar is a tile of no axes."""

    def __init__(self, values: Any, dtype: DType) -> None:
        self.values = _round(values, dtype)
        self.dtype = dtype
        _expect(all(side & (side - 1) == 0 < side for side in self.shape), f"tile of shape {self.shape}: sides are powers of two")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return f"Tile({self.shape}, {self.dtype})"

    def item(self) -> Tile:
        _expect(self.values.size == 1, f"item(): expected one element, got shape {self.shape}")
        return Tile(self.values.reshape(()), self.dtype)

    def reshape(self, shape: Sequence[int]) -> Tile:
        return reshape(self, shape)

    def astype(self, dtype: DType) -> Tile:
        return astype(self, dtype)

    def __bool__(self) -> bool:
        _expect(self.ndim == 0, f"a condition on a tile of shape {self.shape}")
        return bool(self.values)

    def __index__(self) -> int:
        _expect(self.ndim == 0 and self.dtype.kind == "i", f"an index of shape {self.shape}, {self.dtype}")
        return int(self.values)

    def __hash__(self) -> int:
        raise EmulatorError("a tile has no hash")

    def __neg__(self) -> Tile:
        return Tile(-self.values, self.dtype)


Operand = Tile | int | float | bool


def tile_of(value: Operand) -> Tile:
    """A Python number as the compiler types it where nothing else does."""
    if isinstance(value, Tile):
        return value
    if isinstance(value, bool):
        return Tile(value, bool_)
    _expect(isinstance(value, int | float), f"expected a tile or a number, got {type(value).__name__}")
    return Tile(value, int32 if isinstance(value, int) else float32)


def _together(x: Operand, y: Operand) -> tuple[Any, Any, DType]:
    """Both sides' values and the dtype that they meet in; a Python number takes the dtype of the tile beside it."""
    for number, tile in ((x, y), (y, x)):
        if not isinstance(number, Tile) and isinstance(tile, Tile):
            loose = tile.dtype if tile.dtype.kind == "f" or isinstance(number, int) else float32
            number = Tile(number, loose)
            return (number.values, tile.values, loose) if tile is y else (tile.values, number.values, loose)
    left, right = tile_of(x), tile_of(y)
    if left.dtype is right.dtype:
        return left.values, right.values, left.dtype
    _expect(left.dtype.rank != right.dtype.rank, f"no common dtype of {left.dtype} and {right.dtype}")
    wide = left.dtype if left.dtype.rank > right.dtype.rank else right.dtype
    return left.values, right.values, wide


def _binary(function: Callable[[Any, Any], Any], x: Operand, y: Operand) -> Tile:
    left, right, dtype = _together(x, y)
    wide = np.int64 if dtype.kind == "i" else dtype.numpy
    with np.errstate(all="ignore"):
        return Tile(function(np.asarray(left).astype(wide), np.asarray(right).astype(wide)), dtype)


def _compare(function: Callable[[Any, Any], Any], x: Operand, y: Operand) -> Tile:
    left, right, _ = _together(x, y)
    return Tile(function(left, right), bool_)


def _whole(function: Callable[[Any, Any], Any], x: Operand, y: Operand) -> Tile:
    """Division of integers, where rounding down and rounding to zero agree."""
    left, right, dtype = _together(x, y)
    _expect(dtype.kind == "i" and bool(np.all(left >= 0)) and bool(np.all(right > 0)), "// and %: expected no negative integers")
    return Tile(function(left, right), dtype)


def _logic(function: Callable[[Any, Any], Any], x: Operand, y: Operand) -> Tile:
    left, right = tile_of(x), tile_of(y)
    _expect(left.dtype is right.dtype is bool_, f"& and |: expected booleans, got {left.dtype} and {right.dtype}")
    return Tile(function(left.values, right.values), bool_)


def truediv(x: Operand, y: Operand, *, rounding_mode: RoundingMode = RoundingMode.RN, flush_to_zero: bool = False) -> Tile:
    del rounding_mode, flush_to_zero
    left, right, dtype = _together(x, y)
    with np.errstate(all="ignore"):
        return Tile(np.divide(left, right), dtype if dtype.kind == "f" else float32)


def _install_operators() -> None:
    table: dict[str, tuple[Callable[..., Tile], Callable[[Any, Any], Any]]] = {
        "add": (_binary, np.add),
        "sub": (_binary, np.subtract),
        "mul": (_binary, np.multiply),
        "floordiv": (_whole, np.floor_divide),
        "mod": (_whole, np.mod),
        "and": (_logic, np.logical_and),
        "or": (_logic, np.logical_or),
    }
    for name, (apply, function) in table.items():
        setattr(Tile, f"__{name}__", lambda self, other, apply=apply, function=function: apply(function, self, other))
        setattr(Tile, f"__r{name}__", lambda self, other, apply=apply, function=function: apply(function, other, self))
    Tile.__truediv__ = lambda self, other: truediv(self, other)  # type: ignore[attr-defined]
    Tile.__rtruediv__ = lambda self, other: truediv(other, self)  # type: ignore[attr-defined]
    for function in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        setattr(Tile, f"__{function.__name__}__", lambda self, other, function=function: _compare(function, self, other))


_install_operators()


def minimum(x: Operand, y: Operand, *, propagate_nan: bool = False) -> Tile:
    """Of NaN and a number the number, unless asked otherwise."""
    return _binary(np.minimum if propagate_nan else np.fmin, x, y)


def maximum(x: Operand, y: Operand, *, propagate_nan: bool = False) -> Tile:
    return _binary(np.maximum if propagate_nan else np.fmax, x, y)


def where(condition: Tile, x: Operand, y: Operand) -> Tile:
    _expect(condition.dtype is bool_, f"where: expected a boolean condition, got {condition.dtype}")
    left, right, dtype = _together(x, y)
    return Tile(np.where(condition.values, left, right), dtype)


def astype(x: Operand, dtype: DType) -> Tile:
    values = tile_of(x).values
    if dtype.kind == "i" and np.asarray(values).dtype.kind == "f":
        values = np.trunc(values)
    return Tile(values, dtype)


def _unary(function: Callable[[Any], Any]) -> Callable[..., Tile]:
    def apply(x: Operand, *, flush_to_zero: bool = False) -> Tile:
        tile = tile_of(x)
        _expect(tile.dtype.kind == "f", f"expected floating point, got {tile.dtype}")
        with np.errstate(all="ignore"):
            values = function(tile.values)
        if flush_to_zero:
            values = np.where(np.abs(values) < np.finfo(np.float32).tiny, np.zeros_like(values), values)
        return Tile(values, tile.dtype)

    return apply


exp, exp2, log, log2 = _unary(np.exp), _unary(np.exp2), _unary(np.log), _unary(np.log2)
sqrt, rsqrt, abs_ = _unary(np.sqrt), _unary(lambda values: 1 / np.sqrt(values)), _unary(np.abs)


def _reduce(function: Callable[..., Any]) -> Callable[..., Tile]:
    def apply(x: Tile, axis: int, *, keepdims: bool = False) -> Tile:
        return Tile(function(x.values, axis=axis, keepdims=keepdims), x.dtype)

    return apply


def _reduce_to(strict: np.ufunc, loose: np.ufunc) -> Callable[..., Tile]:
    """The largest or smallest number: of NaN and numbers it is a number, unless asked otherwise."""

    def apply(x: Tile, axis: int, *, keepdims: bool = False, propagate_nan: bool = False) -> Tile:
        return _reduce((strict if propagate_nan else loose).reduce)(x, axis, keepdims=keepdims)

    return apply


sum_, max_, min_ = _reduce(np.sum), _reduce_to(np.maximum, np.fmax), _reduce_to(np.minimum, np.fmin)


def cumsum(x: Tile, axis: int) -> Tile:
    return Tile(np.cumsum(x.values, axis=axis, dtype=x.values.dtype), x.dtype)


def zeros(shape: Sequence[int], dtype: DType) -> Tile:
    return full(shape, 0, dtype)


def full(shape: Sequence[int], fill_value: Operand, dtype: DType) -> Tile:
    return Tile(np.broadcast_to(tile_of(fill_value).values, tuple(shape)), dtype)


def arange(size: int, *, dtype: DType) -> Tile:
    return Tile(np.arange(size), dtype)


def reshape(x: Tile, shape: Sequence[int]) -> Tile:
    _expect(int(np.prod(shape)) == x.values.size, f"reshape: {x.shape} to {tuple(shape)}")
    return Tile(x.values.reshape(tuple(shape)), x.dtype)


def transpose(x: Tile) -> Tile:
    _expect(x.ndim == 2, f"transpose: expected two axes, got {x.shape}")
    return Tile(x.values.T, x.dtype)


def broadcast_to(x: Tile, shape: Sequence[int]) -> Tile:
    return Tile(np.broadcast_to(x.values, tuple(shape)), x.dtype)


def cat(tiles: Sequence[Tile], axis: int) -> Tile:
    _expect(len(tiles) == 2 and tiles[0].dtype is tiles[1].dtype, "cat: expected two tiles of one dtype")
    return Tile(np.concatenate([tile.values for tile in tiles], axis=axis), tiles[0].dtype)


def extract(x: Tile, index: Sequence[int], shape: Sequence[int]) -> Tile:
    """Part `index` of x, cut into pieces of `shape`."""
    places = tuple(slice(operator.index(i) * side, (operator.index(i) + 1) * side) for i, side in zip(index, shape, strict=True))
    part = x.values[places]
    _expect(part.shape == tuple(shape), f"extract: {tuple(index)} of {tuple(shape)} lies outside {x.shape}")
    return Tile(part, x.dtype)


def mma(x: Tile, y: Tile, acc: Tile) -> Tile:
    """x @ y + acc: bf16 and fp16 accumulate in fp32, fp32 and fp64 in themselves."""
    accumulator = float32 if x.dtype in (float16, bfloat16) else x.dtype
    _expect(x.dtype is y.dtype and acc.dtype is accumulator, f"mma: {x.dtype} @ {y.dtype} + {acc.dtype}")
    fits = x.ndim == y.ndim == 2 and x.shape[1] == y.shape[0] and acc.shape == (x.shape[0], y.shape[1])
    _expect(fits, f"mma: {x.shape} @ {y.shape} + {acc.shape}")
    with np.errstate(all="ignore"):
        return Tile(x.values.astype(accumulator.numpy) @ y.values.astype(accumulator.numpy) + acc.values, accumulator)

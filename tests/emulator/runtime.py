"""Run the very source of a kernels/*/cutile.py on a CPU: `load("ssd")` is that module, over the emulated `cuda.tile`."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from emulator import arrays, tiles
from emulator.tiles import EmulatorError, Tile, float32, int32

MOST_BLOCKS_ON_Y = 65_535


class Constant:
    """The annotation of a parameter that is compiled in."""

    def __class_getitem__(cls, item: type) -> type[Constant]:
        return type(f"Constant_{item.__name__}", (cls,), {})


class Kernel:
    """A kernel and its hints; the hints change nothing here."""

    def __init__(self, function: FunctionType, **hints: Any) -> None:
        unknown = set(hints) - {"occupancy", "num_ctas", "opt_level", "num_worker_warps"}
        if unknown:
            raise EmulatorError(f"{function.__name__}: unknown hints {sorted(unknown)}")
        self.function, self.hints = function, hints

    def __call__(self, *_: Any) -> None:
        raise EmulatorError(f"{self.function.__name__}: a kernel is launched, not called")

    def replace_hints(self, **hints: Any) -> Kernel:
        return Kernel(self.function, **{**self.hints, **hints})

    def arguments(self, values: tuple[Any, ...], memory: arrays.Memory) -> list[Any]:
        names = self.function.__code__.co_varnames[: self.function.__code__.co_argcount]
        if len(values) != len(names):
            raise EmulatorError(f"{self.function.__name__}: expected {len(names)} arguments {names}, got {len(values)}")
        return [self._argument(name, value, memory) for name, value in zip(names, values, strict=True)]

    def _argument(self, name: str, value: Any, memory: arrays.Memory) -> Any:
        annotation = self.function.__annotations__.get(name)
        if isinstance(annotation, str):
            annotation = eval(annotation, self.function.__globals__)
        constant = isinstance(annotation, type) and issubclass(annotation, Constant)
        if isinstance(value, torch.Tensor):
            if constant:
                raise EmulatorError(f"{name}: expected a constant, got a tensor")
            return arrays.Array(value, name, memory)
        if constant and isinstance(value, bool | int | float):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return Tile(value, int32 if isinstance(value, int) else float32)
        raise EmulatorError(f"{name}: cannot pass {value!r}")


class Grid:
    """Where the running block stands."""

    def __init__(self) -> None:
        self.block: tuple[int, int, int] | None = None
        self.sides = (0, 0, 0)

    def bid(self, axis: int) -> Tile:
        if self.block is None:
            raise EmulatorError("bid: called outside a kernel")
        return Tile(self.block[axis], int32)

    def num_blocks(self, axis: int) -> Tile:
        if self.block is None:
            raise EmulatorError("num_blocks: called outside a kernel")
        return Tile(self.sides[axis], int32)

    def launch(self, stream: object, grid: tuple[int, ...], kernel: Kernel, values: tuple[Any, ...]) -> None:
        """Run all blocks, one after another, in an order that means nothing."""
        del stream
        sides = (*grid, 1, 1)[:3]
        if len(grid) > 3 or min(sides) < 1 or max(sides[1:]) > MOST_BLOCKS_ON_Y:
            raise EmulatorError(f"{kernel.function.__name__}: cannot launch a grid of {grid}")
        memory = arrays.Memory(value for value in values if isinstance(value, torch.Tensor))
        arguments = kernel.arguments(values, memory)
        blocks = list(product(*(range(side) for side in sides)))
        random.Random(len(blocks)).shuffle(blocks)
        self.sides = (sides[0], sides[1], sides[2])
        try:
            for number, block in enumerate(blocks):
                memory.block, self.block = number, block
                kernel.function(*arguments)
        finally:
            self.block = None


def _kernel(function: FunctionType | None = None, **hints: Any) -> Kernel | Callable[[FunctionType], Kernel]:
    return Kernel(function, **hints) if function is not None else lambda decorated: Kernel(decorated, **hints)


def _static_iter(iterable: Iterable[Any]) -> Iterator[Any]:
    return iter(iterable)


def cuda_tile() -> ModuleType:
    """The emulated `cuda.tile`; a name that it lacks is an AttributeError where a kernel uses it."""
    module, grid = ModuleType("cuda.tile"), Grid()
    for dtype in tiles.DTYPES:
        setattr(module, dtype.name, dtype)
    for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "minimum", "maximum", "where", "astype", "cumsum", "truediv", "zeros"):
        setattr(module, name, getattr(tiles, name))
    for name in ("full", "arange", "reshape", "transpose", "broadcast_to", "cat", "extract", "mma", "PaddingMode", "RoundingMode"):
        setattr(module, name, getattr(tiles, name))
    for name in ("load", "store", "gather", "num_tiles", "Array"):
        setattr(module, name, getattr(arrays, name))
    for name, function in {"sum": tiles.sum_, "max": tiles.max_, "min": tiles.min_, "abs": tiles.abs_}.items():
        setattr(module, name, function)
    module.__dict__.update(Constant=Constant, kernel=_kernel, function=lambda plain: plain, launch=grid.launch)
    module.__dict__.update(bid=grid.bid, num_blocks=grid.num_blocks)
    module.__dict__.update(static_iter=_static_iter, static_eval=lambda value: value, cdiv=lambda x, y: -(-x // y))
    return module


class _Torch:
    """torch, save that a CPU build has no stream to launch on."""

    class cuda:
        @staticmethod
        def current_stream() -> None:
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def _emulated() -> Iterator[None]:
    names = ("cuda", "cuda.tile")
    kept = {name: sys.modules.get(name) for name in names}
    package, module = ModuleType("cuda"), cuda_tile()
    package.tile = module  # type: ignore[attr-defined]
    sys.modules.update({"cuda": package, "cuda.tile": module})
    try:
        yield
    finally:
        for name, original in kept.items():
            if original is None:
                del sys.modules[name]
            else:
                sys.modules[name] = original


def load(operator: str) -> Any:
    """kernels/<operator>/cutile.py, executed anew over the emulator."""
    spec = importlib.util.find_spec(f"longscan.kernels.{operator}.cutile")
    if spec is None or spec.origin is None:
        raise EmulatorError(f"{operator}: there is no kernels/{operator}/cutile.py")
    module = ModuleType(f"emulated_{operator}")
    module.__file__ = spec.origin
    sys.modules[module.__name__] = module
    with _emulated():
        exec(compile(Path(spec.origin).read_text("utf-8"), spec.origin, "exec"), module.__dict__)
    module.__dict__["torch"] = _Torch()
    return module

"""The emulator refuses what the compiler would, and what a GPU would only sometimes get wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import numpy as np
import pytest
import torch
from emulator.runtime import Constant, cuda_tile
from emulator.tiles import EmulatorError, Tile, bfloat16, float32, int32

ct = cuda_tile()


def run(function: FunctionType, *arguments: object, grid: tuple[int, ...] = (1,)) -> None:
    ct.launch(None, grid, ct.kernel(function, occupancy=2), arguments)


def test_loads_computes_and_stores_tile_by_tile() -> None:
    def scale(x, y, factor: float, side: Constant[int]) -> None:  # type: ignore[no-untyped-def, valid-type]
        tile = ct.load(x, (ct.bid(0),), (side,))
        ct.store(y, (ct.bid(0),), (tile.astype(ct.float32) * factor).astype(y.dtype))

    x, y = torch.arange(10).bfloat16(), torch.full((10,), torch.nan, dtype=torch.bfloat16)
    run(scale, x, y, 3.0, 4, grid=(3,))
    assert torch.equal(y, 3 * x)


def test_what_lies_outside_an_array_is_not_zero() -> None:
    def last(x, y) -> None:  # type: ignore[no-untyped-def]
        ct.store(y, (0,), ct.load(x, (1,), (4,)))

    x, y = torch.ones(6), torch.zeros(4)
    run(last, x, y)
    assert torch.equal(torch.isnan(y), torch.tensor([False, False, True, True]))


def copies(x, y) -> None:  # type: ignore[no-untyped-def]
    ct.store(y, (0,), ct.load(x, (ct.bid(0),), (4,)))


def reads_ahead(x, y) -> None:  # type: ignore[no-untyped-def]
    ct.store(y, (ct.bid(0),), ct.load(y, (1 - ct.bid(0),), (4,)) + ct.load(x, (0,), (4,)))


@pytest.mark.parametrize("kernel", [copies, reads_ahead], ids=lambda kernel: kernel.__name__)
def test_blocks_that_race(kernel: FunctionType) -> None:
    with pytest.raises(EmulatorError, match=r"y: block \d writes what another|y: block \d reads what another"):
        run(kernel, torch.ones(8), torch.ones(8), grid=(2,))


def test_arguments_that_share_memory() -> None:
    x = torch.ones(8)
    with pytest.raises(EmulatorError, match="another argument lies in the same memory"):
        run(copies, x, x[4:], grid=(1,))
    wide = torch.ones(8, 6)

    def reads_columns(x, z, y) -> None:  # type: ignore[no-untyped-def]
        ct.store(y, (0, 0), ct.load(x, (0, 0), (8, 2)) + ct.load(z, (0, 0), (8, 2)))

    y = torch.zeros(8, 2)
    run(reads_columns, wide[:, :2], wide[:, 4:], y)
    assert torch.equal(y, torch.full((8, 2), 2.0))


tile = Tile(np.ones((4, 4)), float32)
half = Tile(np.ones((4, 4)), bfloat16)
whole = Tile(np.arange(4), int32)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: ct.zeros((3,), dtype=ct.float32), "powers of two"),
        (lambda: ct.mma(tile, half, tile), "mma"),
        (lambda: ct.mma(half, half, half), "mma"),
        (lambda: ct.mma(tile, Tile(np.ones((2, 4)), float32), tile), "mma"),
        (lambda: tile.reshape((8, 1)), "reshape"),
        (lambda: whole * (1 << 30), "leaves the range"),
        (lambda: (whole - 1) // 2, "negative"),
        (lambda: bool(tile > 0.0), "a condition on a tile"),
        (lambda: ct.where(tile, tile, tile), "boolean condition"),
        (lambda: ct.extract(tile, (2, 0), (2, 4)), "outside"),
        (lambda: half + Tile(np.ones((4, 4)), ct.float16), "no common dtype"),
        (lambda: ct.exp2(whole), "floating point"),
        (lambda: ct.kernel(copies, warps=4), "unknown hints"),
        (lambda: ct.kernel(copies)(1, 2), "launched, not called"),
        (lambda: ct.launch(None, (1, 70_000), ct.kernel(copies), (torch.ones(4), torch.ones(4))), "cannot launch"),
        (lambda: ct.launch(None, (1,), ct.kernel(copies), (torch.ones(4),)), "expected 2 arguments"),
        (lambda: ct.launch(None, (2,), ct.kernel(copies), (torch.ones(4), torch.ones(4))), "lies outside"),
        (lambda: ct.bid(0), "outside a kernel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(refused: Callable[[], object], message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        refused()


def test_an_operation_that_no_kernel_uses_is_unknown() -> None:
    with pytest.raises(AttributeError, match="atomic_add"):
        _ = ct.atomic_add


def test_bfloat16_rounds_as_torch_does() -> None:
    values = torch.cat([torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 10.0**e for e in (-30, -3, 0, 30)])
    values[:6] = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, float("inf"), float("nan")])
    rounded = Tile(values.numpy(), bfloat16).values
    assert np.array_equal(rounded, values.bfloat16().float().numpy(), equal_nan=True)


def test_dtypes_meet_as_the_compiler_has_it() -> None:
    assert (half * tile).dtype is float32
    assert (half * 2.0).dtype is bfloat16
    assert (whole + 1).dtype is int32
    assert (whole / 2).dtype is float32
    assert (whole * 0.5).dtype is float32


def test_a_number_wins_over_nan_unless_nan_is_asked_to() -> None:
    """As the compiler has it: so a kernel that would hide NaN on a GPU hides it here."""
    row = Tile(np.array([np.nan, 1.0]), float32)
    assert [float(ct.maximum(row, 0.0).values[0]), float(ct.minimum(row, 0.0).values[0])] == [0.0, 0.0]
    assert [float(ct.max(row, 0).values), float(ct.min(row, 0).values)] == [1.0, 1.0]
    for found in (ct.maximum(row, 0.0, propagate_nan=True), ct.minimum(row, 0.0, propagate_nan=True)):
        assert np.isnan(found.values).tolist() == [True, False]
    assert np.isnan([ct.max(row, 0, propagate_nan=True).values, ct.min(row, 0, propagate_nan=True).values]).all()

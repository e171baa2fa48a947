"""How tests compare tensors: shape and dtype first, NaN never equals NaN, and a failure tells the error."""

from __future__ import annotations

import torch


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in float64; inf where the shapes differ or either is not finite."""
    if got.shape != expected.shape:
        return float("inf")
    got, expected = got.detach().to("cpu", torch.float64), expected.detach().to("cpu", torch.float64)
    if not bool(got.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    error, size = float((got - expected).norm()), float(expected.norm())
    return error / size if size else error


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float, *, dtype: torch.dtype) -> None:
    """`got` has the shape of `expected`, the dtype `dtype`, is finite, and is off by at most `tolerance`, no row by ten times that.

    A row (last axis) is measured against the mean size of the rows, so that an error in one row of thousands cannot hide.
    """
    assert got.dtype == dtype, f"{name}: dtype {got.dtype}, expected {dtype}"
    assert got.shape == expected.shape, f"{name}: shape {list(got.shape)}, expected {list(expected.shape)}"
    assert bool(got.isfinite().all()), f"{name}: {int((~got.isfinite()).sum())} of {got.numel()} elements are not finite"
    error = relative_error(got, expected)
    assert error <= tolerance, f"{name}: relative error {error:.2e}, allowed {tolerance:.0e}"
    if got.ndim > 1 and got.numel():
        expected = expected.detach().to("cpu", torch.float64)
        rows = (got.detach().to("cpu", torch.float64) - expected).flatten(0, -2).norm(dim=-1)
        size = float(expected.flatten(0, -2).norm(dim=-1).square().mean().sqrt())
        worst = int(rows.argmax())
        assert float(rows[worst]) <= 10 * tolerance * size, f"{name}: row {worst} is off by {float(rows[worst]) / size:.2e} of a row's size"


def assert_same_bits(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """`got` and `expected` are finite and equal in every bit."""
    assert got.dtype == expected.dtype, f"{name}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{name}: shape {list(got.shape)}, expected {list(expected.shape)}"
    assert bool(got.isfinite().all()), f"{name}: not finite"
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    differ = got.contiguous().view(whole) != expected.contiguous().view(whole)
    assert not bool(differ.any()), (
        f"{name}: {int(differ.sum())} of {got.numel()} elements differ, the first at {differ.nonzero()[0].tolist()}"
    )

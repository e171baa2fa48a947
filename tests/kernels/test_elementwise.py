"""Elementwise functions: an element's bits depend neither on its place, nor on the size of the tensor, nor on the threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compare import assert_close, assert_same_bits
from longscan.kernels.elementwise import GRAIN, VECTOR, exp2_, silu_, softplus_
from threads import torch_threads

Function = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "exp2": (exp2_, torch.exp2),
    "silu": (silu_, lambda x: x * torch.sigmoid(x)),
    "softplus": (softplus_, lambda x: torch.logaddexp(x, torch.zeros_like(x))),
}
SIZES = (VECTOR, GRAIN - VECTOR, GRAIN, GRAIN + VECTOR, 2 * GRAIN + 3 * VECTOR, 3 * GRAIN + 7 * VECTOR, 6 * GRAIN + VECTOR)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_bits_do_not_depend_on_place_size_or_threads(name: str, threads: int) -> None:
    function, _ = FUNCTIONS[name]
    x = 5.0 * torch.randn(max(SIZES) + VECTOR, generator=torch.Generator().manual_seed(0))
    # A vector at a time is the smallest call there is: all others must agree with it.
    expected = torch.cat([function(part.clone()) for part in x.split(VECTOR)])
    with torch_threads(threads):
        for size in SIZES:
            for start in (0, VECTOR):
                assert_same_bits(f"{size} from {start}", function(x[start : start + size].clone()), expected[start : start + size])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    function, truth = FUNCTIONS[name]
    x = torch.linspace(-90.0, 60.0, 64 * VECTOR)
    assert_close(name, function(x.clone()), truth(x.double()), 1e-6, dtype=torch.float32)
    # Sizes from 2^-90 to 2^60: each element against itself.
    error = (function(x.clone()).double() / truth(x.double()) - 1.0).abs()
    assert float(error[x > -80.0].max()) <= 1e-5

"""SSD on CUDA Tile in steps by the thousand: every length, random packings, poisoned memory; on a GPU, and a few on the emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import packings
import pytest
import torch
from compare import assert_same_bits
from emulator import runtime
from fences import Fenced, bits
from longscan.kernels.layouts import Layout
from longscan.kernels.segments import NO_LANE, Entry
from longscan.kernels.ssd import ssd
from longscan.kernels.ssd.cases import Inputs, Shape, make_inputs
from packings import assert_rows, at, elsewhere, every_length, joined, moved, pack, parts, random_layout, to_be_told_apart

EMULATED = runtime.load("ssd")
OF_TOKENS = ("x_THP", "dt_TH", "B_TGN", "C_TGN")
SPANS = (None, 1, 2, 5)
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
WORST = 10
"""Times the tolerance: of millions of rows, those whose terms cancel most."""


def on_emulator(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = EMULATED.ssd(z_THP=None, **arguments)
    return result


def on_gpu(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ssd(**arguments, backend="cutile")


@dataclass(frozen=True)
class Place(packings.Place):
    """What runs the kernels, and how much it can run."""

    run: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    shape: Shape
    dtype: torch.dtype


def emulated(shape: Shape, *sizes: Any, dtype: torch.dtype = torch.bfloat16) -> Place:
    return Place(shape.name, "cpu", *sizes, FEW, on_emulator, shape, dtype)


def gpu(shape: Shape, *sizes: Any, dtype: torch.dtype = torch.bfloat16) -> Place:
    return Place(shape.name, "cuda", *sizes, ALL, on_gpu, shape, dtype)


ALL = tuple(range(1, 201))
FEW = (1, 3, 64, 130)
PLACES = (
    emulated(Shape("emulated_G1", H=8, P=32, G=1, N=16), 6, 2, 2),
    emulated(Shape("emulated_G2", H=8, P=32, G=2, N=16), 6, 2, 1, dtype=torch.float16),
    gpu(Shape("G1", H=8, P=64, G=1, N=128), 48, 340, 34),
    gpu(Shape("G2", H=8, P=64, G=2, N=128), 48, 330, 33, dtype=torch.float16),
    gpu(Shape("G8", H=8, P=64, G=8, N=64), 48, 330, 33),
)


@pytest.fixture(params=at(PLACES))
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    return found


def truth(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """By the PyTorch path in float64, which other tests hold to the recurrence token by token."""
    wide = {name: tensor.double() for name, tensor in inputs.tensors.items()}
    return ssd(**wide, dt_limit=inputs.dt_limit, segments=inputs.segments, backend="torch")


def given(inputs: Inputs, tensors: dict[str, torch.Tensor], table: torch.Tensor) -> dict[str, Any]:
    per_head = {name: inputs.tensors[name] for name in ("A_H", "D_H", "dt_bias_H")}
    return {**per_head, **tensors, "dt_limit": inputs.dt_limit, "ssm_SHNP": table}


def check(place: Place, layouts: list[Layout], spans: list[int | None], seed: int) -> None:
    """Run each layout as a step of its own; all steps' rows and states against the truth, all else as it was."""
    whole = joined(layouts)
    inputs = make_inputs(place.shape, whole, dtype=place.dtype, device=place.device, seed=seed)
    before = {name: bits(inputs.tensors[name]).clone() for name in (*OF_TOKENS, "ssm_SHNP")}
    table, outputs = inputs.tensors["ssm_SHNP"].clone(), []
    for (layout, rows, slots), span_tiles in zip(parts(layouts), spans, strict=True):
        of_tokens = {name: inputs.tensors[name][rows] for name in OF_TOKENS}
        with Fenced() as fenced:
            y_THP, _ = place.run(**given(inputs, of_tokens, table[slots]), segments=pack(layout, place.device, span_tiles))
        assert fenced.allocated >= 3, "outputs and scratch are poisoned"
        outputs.append(y_THP)
    y_THP = torch.cat(outputs)
    expected_THP, expected_SHNP = truth(inputs)
    real, tolerance = inputs.segments.real_rows(), TOLERANCE[place.dtype]
    assert y_THP.dtype == place.dtype
    assert_rows("y", y_THP[real], expected_THP[real], tolerance, WORST * tolerance)
    written = [entry.lane_out for entry in whole.entries if entry.lane_out != NO_LANE]
    states = (t[written].flatten(2) for t in (table, expected_SHNP))
    assert_rows("states", *states, tolerance, WORST * tolerance)
    others = torch.ones(whole.slots, dtype=torch.bool)
    others[written] = False
    assert torch.equal(bits(table[others]), before["ssm_SHNP"][others]), "a slot that nobody writes has changed"
    assert all(torch.equal(bits(inputs.tensors[name]), kept) for name, kept in before.items()), "an input has changed"
    assert bool((y_THP[~whole.owned_rows()] == 0).all()), "rows that belong to nobody are zero"
    assert bool(y_THP.isfinite().all()), "rows of padding are finite"
    for n, (layout, rows, slots) in enumerate(parts(layouts)):
        of_tokens = {name: inputs.tensors[name][rows] for name in OF_TOKENS}
        for entry in to_be_told_apart(layout, n, len(layouts)):
            same_alone(place, inputs, of_tokens, entry, spans[n], (y_THP[rows], inputs.tensors["ssm_SHNP"][slots], table[slots]))


def same_alone(
    place: Place,
    inputs: Inputs,
    of_tokens: dict[str, torch.Tensor],
    entry: Entry,
    span_tiles: int | None,
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """`entry` alone at another place has the bits that it had in company: found are outputs, and states before and after."""
    y_THP, before_SHNP, after_SHNP = found
    alone = elsewhere(entry, place.tiles)
    table = torch.full_like(before_SHNP[:16], torch.nan)
    if entry.lane_in != NO_LANE:
        table[alone.lane_in] = before_SHNP[entry.lane_in]
    tensors = {name: moved(rows, entry, alone, place.tiles) for name, rows in of_tokens.items()}
    segments = pack(Layout("alone", (alone,), place.tiles, len(table)), place.device, span_tiles)
    with Fenced():
        other_THP, _ = place.run(**given(inputs, tensors, table), segments=segments)
    assert_same_bits(f"y of {entry}", other_THP[alone.rows], y_THP[entry.rows])
    if entry.lane_out != NO_LANE:
        assert_same_bits(f"state of {entry}", table[alone.lane_out], after_SHNP[entry.lane_out])


def test_random_packings(place: Place) -> None:
    for first, group in place.random_groups(place.name, place.packings):
        check(place, group, [SPANS[(first + n) % len(SPANS)] for n in range(len(group))], seed=first)


@pytest.mark.parametrize("span_tiles", [None, 2])
def test_every_length(place: Place, span_tiles: int | None) -> None:
    check(place, [every_length(place.lengths)], [span_tiles], seed=1)


def matrix() -> Iterator[Any]:
    """Every width of heads and states that the kernels take, in both dtypes: slow only because each is compiled."""
    for P, N, dtype in product((32, 64, 128), (16, 64, 128, 256), TOLERANCE):
        name = f"P{P}_N{N}_{str(dtype).removeprefix('torch.')}"
        one = gpu(Shape(name, H=8, P=P, G=4, N=N), 48, 4, 4, dtype=dtype)
        yield pytest.param(one, id=name, marks=[pytest.mark.gpu, pytest.mark.slow])
    yield pytest.param(emulated(Shape("small", H=8, P=32, G=4, N=64), 4, 2, 2), id="emulated")


@pytest.mark.parametrize("one", list(matrix()))
def test_every_width(one: Place) -> None:
    check(one, [random_layout(f"{one.shape.name} {n}", one.tiles) for n in range(one.packings)], [None, 2, None, 5][: one.packings], seed=2)

"""The norms: right against the definition, group by group, and a row's bits do not depend on the other rows."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from compare import assert_close, assert_same_bits
from longscan.kernels.norm import gated_rms_norm, rms_norm
from longscan.kernels.norm.cases import EPS, GATED, RESIDUAL, SMALL, Shape, make_rows
from threads import torch_threads

ROWS = (1, 3, 64, 65, 700)


def shape_name(shape: Shape) -> str:
    return f"{shape.name}_{shape.width}"


@pytest.mark.parametrize("shape", [*SMALL, RESIDUAL[1]], ids=shape_name)
@pytest.mark.parametrize("num_rows", ROWS)
def test_rms_norm_adds_and_normalises(num_rows: int, shape: Shape) -> None:
    given = make_rows(shape, num_rows)
    total = given["residual"] + given["x"]
    y, residual = rms_norm(given["x"], given["weight"], residual_TD=given["residual"], eps=EPS, backend="torch")
    assert_close("y", y, oracle.rms_norm(total, given["weight"], EPS), 1e-6, dtype=torch.float32)
    assert_same_bits("residual", residual, total)


def test_rms_norm_of_the_first_layer_takes_x_as_the_residual() -> None:
    given = make_rows(SMALL[0], 65, dtype=torch.bfloat16)
    y, residual = rms_norm(given["x"], given["weight"], eps=EPS, backend="torch")
    assert_close("y", y, oracle.rms_norm(given["x"], given["weight"], EPS), 3e-3, dtype=torch.bfloat16)
    assert_same_bits("residual", residual, given["x"].float())


def test_rms_norm_in_bfloat16_keeps_the_residual_in_float32() -> None:
    given = make_rows(SMALL[0], 65, dtype=torch.bfloat16)
    total = given["residual"] + given["x"].float()
    y, residual = rms_norm(given["x"], given["weight"], residual_TD=given["residual"], eps=EPS, backend="torch")
    assert_close("y", y, oracle.rms_norm(total, given["weight"], EPS), 3e-3, dtype=torch.bfloat16)
    assert_same_bits("residual", residual, total)


def test_rms_norm_gives_the_dtype_that_is_asked_for() -> None:
    given = make_rows(SMALL[0], 65, dtype=torch.bfloat16)
    y, _ = rms_norm(given["x"], given["weight"], eps=EPS, out_dtype=torch.float32, backend="torch")
    assert_close("y", y, oracle.rms_norm(given["x"], given["weight"], EPS), 1e-6, dtype=torch.float32)


@pytest.mark.parametrize("shape", [*SMALL, GATED[1]], ids=shape_name)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("norm_before_gate", [False, True], ids=["gate_first", "norm_first"])
def test_gated_rms_norm(norm_before_gate: bool, num_rows: int, shape: Shape) -> None:
    given = make_rows(shape, num_rows)
    options: dict[str, Any] = {"groups": shape.groups, "eps": EPS, "norm_before_gate": norm_before_gate}
    y = gated_rms_norm(given["x"], given["z"], given["weight"], **options, backend="torch")
    expected = oracle.gated_rms_norm(given["x"], given["z"], given["weight"], **options)
    assert_close("y", y, expected, 1e-6, dtype=torch.float32)


@pytest.mark.parametrize("norm_before_gate", [False, True], ids=["gate_first", "norm_first"])
def test_gated_rms_norm_in_bfloat16(norm_before_gate: bool) -> None:
    given = make_rows(SMALL[2], 65, dtype=torch.bfloat16)
    options: dict[str, Any] = {"groups": 8, "eps": EPS, "norm_before_gate": norm_before_gate}
    y = gated_rms_norm(given["x"], given["z"], given["weight"], **options, backend="torch")
    expected = oracle.gated_rms_norm(given["x"], given["z"], given["weight"], **options)
    assert_close("y", y, expected, 3e-3, dtype=torch.bfloat16)


def test_each_group_is_normalised_on_its_own() -> None:
    """A loud group leaves the others as they are."""
    given = make_rows(SMALL[1], 64)
    options: dict[str, Any] = {"groups": 2, "eps": EPS, "backend": "torch"}
    quiet = gated_rms_norm(given["x"], given["z"], given["weight"], **options)
    loud_x = given["x"].clone()
    loud_x[:, :48] *= 1000.0
    loud = gated_rms_norm(loud_x, given["z"], given["weight"], **options)
    assert_same_bits("the other group", loud[:, 48:], quiet[:, 48:])
    assert not torch.equal(loud[:, :48], quiet[:, :48])


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [*SMALL, GATED[1]], ids=shape_name)
def test_bits_of_a_row_do_not_depend_on_the_others(shape: Shape, threads: int) -> None:
    given = make_rows(shape, 700)
    options: dict[str, Any] = {"groups": shape.groups, "eps": EPS, "backend": "torch"}
    with torch_threads(threads):
        gated = gated_rms_norm(given["x"], given["z"], given["weight"], **options)
        normed, _ = rms_norm(given["x"], given["weight"], residual_TD=given["residual"].clone(), eps=EPS, backend="torch")
    with torch_threads(1):
        for rows in (slice(0, 64), slice(64, 192), slice(448, 512), slice(639, 640)):
            part = {name: given[name][rows] for name in ("x", "z", "residual")}
            assert_same_bits("gated", gated_rms_norm(part["x"], part["z"], given["weight"], **options), gated[rows])
            y, _ = rms_norm(part["x"], given["weight"], residual_TD=part["residual"].clone(), eps=EPS, backend="torch")
            assert_same_bits("normed", y, normed[rows])


@pytest.mark.parametrize("norm_before_gate", [False, True], ids=["gate_first", "norm_first"])
def test_gradients_reach_every_input(norm_before_gate: bool) -> None:
    given = make_rows(Shape("tiny", 4, 2), 3, dtype=torch.float64)
    leaves = [given[name].clone().requires_grad_() for name in ("x", "z", "weight", "residual")]

    def run_with(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = gated_rms_norm(x, z, weight, groups=2, eps=EPS, norm_before_gate=norm_before_gate, backend="torch")
        return y, *rms_norm(x, weight, residual_TD=residual, eps=EPS, backend="torch")

    assert torch.autograd.gradcheck(run_with, leaves)


def test_recording_gradients_changes_no_result_and_not_the_residual() -> None:
    given = make_rows(SMALL[1], 65)
    before = given["residual"].clone()
    weight = given["weight"].clone().requires_grad_()
    recorded, _ = rms_norm(given["x"], weight, residual_TD=given["residual"], eps=EPS, backend="torch")
    assert torch.equal(given["residual"], before)
    plain, _ = rms_norm(given["x"], given["weight"], residual_TD=given["residual"], eps=EPS, backend="torch")
    assert_close("y", recorded, plain, 1e-6, dtype=torch.float32)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gate", {"z_TI": torch.zeros(64, 95)}, r"z_TI: expected shape \[64, 96\], got \[64, 95\]"),
    ("weight", {"weight_I": torch.zeros(1)}, r"weight_I: expected shape \[96\], got \[1\]"),
    ("groups", {"groups": 5}, r"groups: expected a divisor of 96 \(I\), got 5"),
    ("no_gpu", {"backend": "cutile"}, "backend: expected 'torch' for tensors on cpu, got 'cutile'"),
]


@pytest.mark.parametrize(("changed", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_does_not_fit_is_named(changed: dict[str, Any], message: str) -> None:
    given = make_rows(SMALL[0], 64)
    fitting: dict[str, Any] = {
        "x_TI": given["x"],
        "z_TI": given["z"],
        "weight_I": given["weight"],
        "groups": 1,
        "eps": EPS,
        "backend": "torch",
    }
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**{**fitting, **changed})


def test_an_output_that_is_no_floating_point_is_named() -> None:
    given = make_rows(SMALL[0], 64)
    with pytest.raises(ValueError, match=r"out_dtype: expected a floating-point dtype, got torch\.int32"):
        rms_norm(given["x"], given["weight"], eps=EPS, out_dtype=torch.int32, backend="torch")


def test_a_residual_that_does_not_fit_is_named() -> None:
    given = make_rows(SMALL[0], 64)
    with pytest.raises(ValueError, match=r"residual_TD: expected dtype torch\.float32, got torch\.bfloat16"):
        rms_norm(given["x"], given["weight"], residual_TD=given["residual"].bfloat16(), eps=EPS, backend="torch")
    with pytest.raises(ValueError, match=r"residual_TD: expected shape \[64, 96\], got \[1, 96\]"):
        rms_norm(given["x"], given["weight"], residual_TD=given["residual"][:1], eps=EPS, backend="torch")

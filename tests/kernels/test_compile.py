"""Every kernel compiles for four architectures, without a GPU; on Hopper nothing spills, and products run on its tensor cores."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from longscan.kernels import tuning
from longscan.kernels.bench.tune import searches
from longscan.kernels.compile import (
    ARCHITECTURES,
    PRODUCTS,
    Launch,
    compile_all,
    compile_launch,
    faults,
    launches,
    missing_tools,
    signature,
)
from longscan.kernels.tuning import Setting
from longscan.kernels.variants import OPERATORS

pytest.importorskip("cuda.tile", reason="cuda-tile is only on Linux")
LAUNCHES = launches()
OFTEN = ("mamba2-130m", "codestral-7b", "width 768")
"""Variants that every run compiles; the others are slow only because they are many."""


def chosen(arch: str) -> list[Any]:
    """Launches to compile for `arch`; those of other architectures than Hopper, and of rarer shapes, when asked for slow tests."""

    def slow(launch: Launch) -> bool:
        return arch != "sm_90" or not launch.variant.startswith(OFTEN)

    return [pytest.param(launch, marks=[pytest.mark.slow] * slow(launch), id=label(launch)) for launch in LAUNCHES]


def label(launch: Launch) -> str:
    return f"{launch.operator}.{launch.name} {launch.variant}"


def test_the_tools_are_there() -> None:
    assert missing_tools() == []


@pytest.mark.parametrize("launch", chosen("sm_90"))
def test_compiles_for_hopper_without_spills(launch: Launch) -> None:
    report = compile_launch(launch, "sm_90")
    assert faults(report) == []
    assert report.registers > 0
    assert report.shared_bytes <= 227 * 1024
    assert (report.hgmma > 0) == (report.kernel in PRODUCTS)
    assert report.hmma == 0


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "sm_90"])
@pytest.mark.parametrize("launch", chosen("others"))
def test_compiles_for_other_architectures(launch: Launch, arch: str) -> None:
    report = compile_launch(launch, arch)
    assert faults(report) == []
    assert report.registers > 0
    assert report.hgmma == 0


def test_what_is_compiled_side_by_side_is_what_each_is_alone() -> None:
    """In the order of launches, on as many cores as there are."""
    alone = [compile_launch(launch, "sm_90") for launch in launches(["norm"], arch="sm_90")]
    assert len({report.variant for report in alone}) > 2
    assert list(compile_all(["sm_90"], ["norm"])) == alone


def tried() -> list[Any]:
    """Kernel, model and setting of every candidate that a search has."""
    return [
        pytest.param(found.name, found.model, candidate, id=f"{found.name} {found.model} {n}")
        for found in searches(OPERATORS)
        for n, candidate in enumerate(found.candidates)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "model", "candidate"), tried())
def test_what_tuning_tries_spills_nothing_on_hopper(kernel: str, model: str, candidate: Setting) -> None:
    """So that whatever is found may go into the tables as it is."""
    operator, _, name = kernel.partition(".")
    with tuning.trying(kernel, candidate):
        of_kernel = [launch for launch in launches([operator], arch="sm_90") if launch.name == name]
    assert of_kernel
    # What an earlier model launches alike is listed, and compiled, with that one.
    for launch in of_kernel:
        if launch.variant.startswith(model):
            assert faults(compile_launch(launch, "sm_90")) == []


def test_every_kernel_of_every_operator_is_compiled() -> None:
    """No `ct.kernel` is left out: a body that nobody compiles is checked by nobody."""
    written = set()
    for operator in OPERATORS:
        module = importlib.import_module(f"longscan.kernels.{operator}.cutile")
        written |= {f"{operator}.{name}" for name, value in vars(module).items() if isinstance(value, module.ct.kernel)}
    assert {f"{launch.operator}.{launch.name}" for launch in LAUNCHES} == written


def test_a_kernel_that_two_shapes_launch_alike_is_compiled_once() -> None:
    assert len({(id(launch.kernel), signature(launch).symbol) for launch in LAUNCHES}) == len(LAUNCHES)
    assert sum(launch.name == "time_steps" for launch in LAUNCHES) < sum(launch.name == "scan" for launch in LAUNCHES)


@pytest.mark.gpu
@pytest.mark.parametrize("launch", LAUNCHES, ids=label)
def test_the_signature_is_that_of_a_launch(launch: Launch) -> None:
    from cuda.tile.compilation import CallingConvention, KernelSignature

    arguments = tuple(
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda") if isinstance(value, torch.Tensor) else value
        for value in launch.arguments
    )
    made = KernelSignature.from_kernel_args(launch.kernel, arguments, CallingConvention.cutile_python_v1())
    assert made.symbol == signature(launch).symbol

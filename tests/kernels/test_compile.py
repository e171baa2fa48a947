"""Every default shape compiles for four architectures, without a GPU; on Hopper nothing spills and the SSD runs on its tensor cores."""

from __future__ import annotations

import pytest
import torch
from longscan.kernels.compile import ARCHITECTURES, Launch, compile_launch, launches, missing_tools, signature

SPILL_ALLOWED: dict[str, int] = {}
"""Bytes of stack that a kernel may use on sm_90; none unless named."""

pytest.importorskip("cuda.tile", reason="cuda-tile is only on Linux")
LAUNCHES = launches()


def test_the_tools_are_there() -> None:
    assert missing_tools() == []


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch.operator}.{launch.name} {launch.variant}")
def test_compiles_for_hopper_without_spills(launch: Launch) -> None:
    report = compile_launch(launch, "sm_90")
    assert report.spill_bytes <= SPILL_ALLOWED.get(report.kernel, 0)
    assert report.registers > 0
    assert report.shared_bytes <= 227 * 1024
    if report.kernel in ("ssd.scan", "ssd.products"):
        assert report.hgmma > 0
        assert report.hmma == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "sm_90"])
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch.operator}.{launch.name} {launch.variant}")
def test_compiles_for_other_architectures(launch: Launch, arch: str) -> None:
    report = compile_launch(launch, arch)
    assert report.registers > 0
    assert report.hgmma == 0


def test_a_kernel_that_two_shapes_launch_alike_is_compiled_once() -> None:
    assert len({(id(launch.kernel), signature(launch).symbol) for launch in LAUNCHES}) == len(LAUNCHES)
    assert sum(launch.name == "time_steps" for launch in LAUNCHES) < sum(launch.name == "scan" for launch in LAUNCHES)


@pytest.mark.gpu
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch.operator}.{launch.name} {launch.variant}")
def test_the_signature_is_that_of_a_launch(launch: Launch) -> None:
    from cuda.tile.compilation import CallingConvention, KernelSignature

    arguments = tuple(
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda") if isinstance(value, torch.Tensor) else value
        for value in launch.arguments
    )
    made = KernelSignature.from_kernel_args(launch.kernel, arguments, CallingConvention.cutile_python_v1())
    assert made.symbol == signature(launch).symbol

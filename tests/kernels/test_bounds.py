"""What the PyTorch path costs beside its arithmetic: memory in between, and operations a document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dispatch import Watch
from longscan.kernels.conv1d import cases as conv1d_cases
from longscan.kernels.conv1d import causal_conv1d
from longscan.kernels.layouts import Layout, packed
from longscan.kernels.norm import cases as norm_cases
from longscan.kernels.norm import gated_rms_norm, rms_norm
from longscan.kernels.ssd import cases as ssd_cases
from longscan.kernels.ssd import ssd

DEMO = ssd_cases.MODELS[0]


def watch(call: Callable[..., Any], given: dict[str, Any]) -> tuple[Watch, list[torch.Tensor]]:
    watched = Watch()
    with torch.no_grad(), watched:
        results = call(**given, backend="torch")
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    return watched, [*tensors, *(results if isinstance(results, tuple) else (results,))]


def step(operator: str, tokens: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    layout = packed("one", [tokens])
    if operator == "ssd":
        return ssd, ssd_cases.make_inputs(DEMO, layout).arguments()
    if operator == "causal_conv1d":
        return causal_conv1d, conv1d_cases.make_inputs(conv1d_cases.MODELS[0], layout).arguments()
    rows = norm_cases.make_rows(norm_cases.GATED[0], tokens)
    if operator == "rms_norm":
        return rms_norm, {"x_TD": rows["x"], "weight_D": rows["weight"], "residual_TD": rows["residual"], "eps": 1e-5}
    return gated_rms_norm, {"x_TI": rows["x"], "z_TI": rows["z"], "weight_I": rows["weight"], "groups": 1, "eps": 1e-5}


@pytest.mark.parametrize("operator", ["ssd", "causal_conv1d", "rms_norm", "gated_rms_norm"])
def test_memory_in_between_does_not_grow_with_the_step(operator: str) -> None:
    sizes = []
    for tokens in (16384, 32768):
        watched, tensors = watch(*step(operator, tokens))
        sizes.append(watched.largest_besides(tensors))
    assert sizes[0] == sizes[1], f"bytes of the largest tensor that is no argument and no result: {sizes}"
    assert sizes[0] <= 16 << 20


def operations(operator: str, layout: Layout) -> int:
    """Of a layer that is not the step's first: how the step is cut is worked out once."""
    if operator == "ssd":
        given = ssd_cases.make_inputs(DEMO, layout).arguments()
        return [watch(ssd, given)[0].operations for _ in range(2)][1]
    given = conv1d_cases.make_inputs(conv1d_cases.MODELS[0], layout).arguments()
    return [watch(causal_conv1d, given)[0].operations for _ in range(2)][1]


@pytest.mark.parametrize("operator", ["ssd", "causal_conv1d"])
@pytest.mark.parametrize("lanes", [True, False], ids=["in_lanes", "begun_and_ended"])
def test_short_documents_share_their_operations(operator: str, lanes: bool) -> None:
    """256 documents of 50 tokens take hardly more operations than one of as many tiles: none for each of them."""
    short = operations(operator, packed("short", [50] * 256, lanes=lanes))
    long = operations(operator, packed("long", [256 * 64]))
    assert short <= 1.5 * long, (short, long)

"""The benchmark: it checks before it times, and says nothing of the speed of what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from longscan.kernels.bench import LOADS, TOKENS, bench_ssd, ssd_limit
from longscan.kernels.layouts import packed
from longscan.kernels.ssd import ssd
from longscan.kernels.ssd.cases import MODELS, Shape

SMALL = Shape("small", H=8, P=16, G=2, N=16)
LOAD = packed("two documents", [100, 64])


def right(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ssd(**arguments, backend="torch")


def wrong_outputs(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    y_THP, ssm_SHNP = right(**arguments)
    return y_THP * 1.01, ssm_SHNP


def wrong_states(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    y_THP, ssm_SHNP = right(**arguments)
    return y_THP, ssm_SHNP.fill_(math.nan)


def test_what_is_right_has_a_time() -> None:
    calls: list[object] = []

    def timer(call: Callable[[], object]) -> float:
        calls.append(call())
        return 1e-3

    (record,) = bench_ssd([SMALL], [LOAD], operator=right, timer=timer)
    assert len(calls) == 1
    assert record.ns_per_token_head == pytest.approx(1e6 / (164 * 8))
    assert record.ratio_to_limit == pytest.approx(record.ns_per_token_head / record.limit_ns_per_token_head)
    assert 0 < record.error_y < 3e-3
    assert record.as_dict()["shape"] == "small"


@pytest.mark.parametrize("operator", [wrong_outputs, wrong_states])
def test_what_is_wrong_has_none(operator: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    def timer(call: Callable[[], object]) -> float:
        raise AssertionError(f"{call} was timed")

    (record,) = bench_ssd([SMALL], [LOAD], operator=operator, timer=timer)
    assert record.ns_per_token_head is None
    assert record.ratio_to_limit is None
    assert max(record.error_y, record.error_state) > 3e-3


def test_the_limit_of_the_models() -> None:
    """Counted by hand: bytes where there is one group, and each state once in and once out."""
    fresh = packed("fresh", [4096] * 16, lanes=False)
    limits = {shape.name: ssd_limit(shape, fresh) * 1e6 for shape in MODELS}
    assert limits["mamba2-130m"] == pytest.approx(TOKENS * (4 * 1536 + 4 * 128 + 48) / 4.3e6)
    assert limits["mamba2-2.7b"] == pytest.approx(TOKENS * (4 * 5120 + 4 * 128 + 160) / 4.3e6)
    assert limits["codestral-7b"] == pytest.approx(566, abs=8)
    carried = ssd_limit(MODELS[1], LOADS[0]) * 1e6 - limits["mamba2-130m"]
    assert carried == pytest.approx(16 * 8 * 24 * 128 * 64 / 4.3e6)
    assert all(sum(entry.num_tokens for entry in load.entries) <= TOKENS for load in LOADS)

"""Named inputs of logprob: hidden states whose logits are as sharp as a trained model's, and targets with gaps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from longscan.kernels.logprob import UNWANTED


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    rows: int
    width: int
    vocabulary: int
    wanted: float = 0.9
    """Share of rows with a target."""
    spread: float = 3.0
    """Standard deviation of the logits."""


@dataclass(frozen=True, slots=True)
class Inputs:
    hidden_TD: torch.Tensor
    weight_VD: torch.Tensor
    targets_T: torch.Tensor


def make(case: Case, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs; rows without a target hold ordinary numbers, as padding does."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(case.rows, case.width, generator=generator, device=device)
    weight = torch.randn(case.vocabulary, case.width, generator=generator, device=device) * case.spread * case.width**-0.5
    targets = torch.randint(case.vocabulary, (case.rows,), generator=generator, device=device)
    targets[torch.rand(case.rows, generator=generator, device=device) >= case.wanted] = UNWANTED
    return Inputs(hidden.to(device, dtype), weight.to(device, dtype), targets.to(device))


CASES = (
    Case("ragged_with_gaps", 320, 96, 1003),
    Case("T1", 1, 64, 320, wanted=1.0),
    Case("T3", 3, 64, 320, wanted=1.0),
    Case("T64", 64, 64, 320),
    Case("T65", 65, 64, 257),
    Case("blocks_and_a_row_more", 1025, 32, 300, wanted=1.0),
    Case("none_wanted", 64, 32, 300, wanted=0.0),
    Case("one_word", 64, 32, 1),
    Case("sharp", 128, 64, 4096, spread=30.0),
    Case("vocabulary_50288", 64, 48, 50288),
)
"""Checked by tests, on a CPU and on a GPU."""

BENCHMARKS = (
    Case("130m", 65_536, 768, 50_288, wanted=1.0),
    Case("2.7b", 65_536, 2560, 50_288, wanted=1.0),
    Case("7b", 65_536, 4096, 32_768, wanted=1.0),
)
"""Shapes worth timing."""

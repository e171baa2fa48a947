"""logprob in plain PyTorch, on any device: blocks of rows against the whole vocabulary, so that the logits stay small."""

from __future__ import annotations

import torch
from longscan.kernels.logprob import UNWANTED
from longscan.kernels.segments import TILE

ROWS = {"cpu": 256, "cuda": 1024}
"""Rows of a block. On a CPU the logits of a small vocabulary stay in the cache; on a GPU every product has this one shape."""

VOCABULARY_BLOCK = 4096
"""Rows of half-precision weights that a CPU widens at a time."""


def logprob(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """See `longscan.kernels.logprob.logprob`."""
    device = hidden_TD.device
    result_T = torch.full(targets_T.shape, torch.nan, dtype=torch.float32, device=device)
    if device.type == "cpu":
        for rows in (targets_T != UNWANTED).nonzero()[:, 0].split(ROWS["cpu"]):
            # Up to whole tiles, as all products here: threads share the rows out, and those of a share of one to three rows
            # are summed in another order. Of 9 rows on 2 threads, the last would have other bits than in company.
            padded = torch.cat([rows, rows[:1].repeat(-len(rows) % TILE)])
            result_T[rows] = _block(hidden_TD[padded], weight_VD, targets_T[padded])[: len(rows)]
        return result_T
    # Picking the wanted rows would make the host wait for the device, so here every row is computed.
    size = ROWS["cuda"]
    for start in range(0, len(targets_T), size):
        block, targets = hidden_TD[start : start + size], targets_T[start : start + size]
        missing = size - len(targets)
        if missing:
            block = torch.nn.functional.pad(block, (0, 0, 0, missing))
            targets = torch.nn.functional.pad(targets, (0, missing), value=UNWANTED)
        scores = _block(block, weight_VD, targets.clamp(min=0)).masked_fill(targets == UNWANTED, torch.nan)
        result_T[start : start + size] = scores[: size - missing]
    return result_T


def _block(hidden_BD: torch.Tensor, weight_VD: torch.Tensor, targets_B: torch.Tensor) -> torch.Tensor:
    """[B], fp32. log_softmax works row by row, so that a row's place in the block leaves no trace in its bits."""
    scores_BV = torch.log_softmax(_logits(hidden_BD, weight_VD), -1)
    return scores_BV.gather(1, targets_B.long()[:, None])[:, 0].float()


def _logits(hidden_BD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """[B, V], fp32 also where the operands are half precision: a logit of 20 in bf16 is wrong by up to 0.06."""
    if hidden_BD.dtype in (torch.float32, torch.float64):
        return torch.mm(hidden_BD, weight_VD.T)
    if hidden_BD.device.type == "cuda":
        return torch.mm(hidden_BD, weight_VD.T, out_dtype=torch.float32)
    wide_BD = hidden_BD.float()
    logits_BV = torch.empty((len(wide_BD), len(weight_VD)))
    for part, weights in zip(logits_BV.split(VOCABULARY_BLOCK, 1), weight_VD.split(VOCABULARY_BLOCK), strict=True):
        part.copy_(torch.mm(wide_BD, weights.float().T))
    return logits_BV

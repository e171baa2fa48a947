"""logprob on CUDA Tile: the output projection, the log-sum-exp and the target's logit in one kernel; no logit leaves the chip.

A block keeps its rows' running maximum and sum while it walks over the vocabulary (Milakov and Gimelshein, *Online
normalizer calculation for softmax*, arXiv 1805.02867), in powers of two.
"""

from __future__ import annotations

import cuda.tile as ct
import torch
from longscan.kernels.tuning import setting, tuned

CI = ct.Constant[int]

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
ROWS = 128
COLUMNS = 256
DEPTH = 64
"""Of the width, at a time; a smaller power of two where the width is no multiple of it."""
SHALLOWEST = 16
LOWEST = -2e38
"""Where the largest logit begins: as low as there is one whose product with LOG2_E is finite."""


@ct.kernel(num_worker_warps=8)
def score_rows(hidden_TD, weight_VD, target_T, logprob_T, V: CI, D: CI, ROWS: CI, COLUMNS: CI, DEPTH: CI):  # type: ignore[no-untyped-def]
    """logprob = l[target] - log sum_v exp(l[v]),  l = hidden . weight^T, for ROWS rows.

    hidden_TD, weight_VD: bf16 or fp16; target_T: int32, -1 where none is wanted; logprob_T: fp32, NaN there.
    Grid: (T / ROWS,), rows in parallel; the vocabulary and the width are serial. The target's logit is a product of its own,
    over two rows: to look for it among all logits costs as much as their exponentials.
    """
    block = ct.bid(0)
    target = ct.load(target_T, (block,), (ROWS,), padding_mode=ct.PaddingMode.ZERO).reshape((ROWS, 1))
    found = ct.zeros((ROWS, 1), dtype=ct.float32)
    for d in range(D // DEPTH):
        hidden = ct.load(hidden_TD, (block, d), (ROWS, DEPTH), allow_tma=False).astype(ct.float32)
        column = (d * DEPTH + ct.arange(DEPTH, dtype=ct.int32)).reshape((1, DEPTH))
        weight = ct.gather(weight_VD, (ct.maximum(target, 0), column), check_bounds=False)
        found = found + ct.sum(hidden * weight.astype(ct.float32), 1, keepdims=True)
    largest = ct.full((ROWS, 1), LOWEST, dtype=ct.float32)
    total = ct.zeros((ROWS, 1), dtype=ct.float32)
    for v in range((V + COLUMNS - 1) // COLUMNS):
        logit = ct.zeros((ROWS, COLUMNS), dtype=ct.float32)
        for d in range(D // DEPTH):
            hidden = ct.load(hidden_TD, (block, d), (ROWS, DEPTH))
            weight = ct.load(weight_VD, (v, d), (COLUMNS, DEPTH), padding_mode=ct.PaddingMode.ZERO)
            logit = ct.mma(hidden, ct.transpose(weight), logit)
        if V % COLUMNS != 0:
            column = ct.arange(COLUMNS, dtype=ct.int32).reshape((1, COLUMNS))
            logit = ct.where(column < V - v * COLUMNS, logit, -float("inf"))
        higher = ct.maximum(largest, ct.max(logit, 1, keepdims=True))
        total = total * ct.exp2((largest - higher) * LOG2_E, flush_to_zero=True)
        total = total + ct.sum(ct.exp2(logit * LOG2_E - higher * LOG2_E, flush_to_zero=True), 1, keepdims=True)
        largest = higher
    # The two sums of the target's logit differ in their last bits, and no probability is above one. NaN stays: it is not certainty.
    value = ct.minimum(found - largest - ct.log2(total) * LN_2, 0.0, propagate_nan=True)
    # The largest logit alone makes the total one: it is zero where all are -inf, or so far down that the difference of two has no digit.
    value = ct.where((target >= 0) & (total > 0.0), value, float("nan"))
    # Without TMA: the last block may have fewer rows than ROWS, and by TMA it wrote beyond them (found between fences, on an H200).
    ct.store(logprob_T, (block,), value.reshape((ROWS,)), allow_tma=False)


def logprob(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """`longscan.kernels.logprob.logprob`."""
    T, D = hidden_TD.shape
    V = weight_VD.shape[0]
    depth = min(DEPTH, D & -D)
    if depth < SHALLOWEST:
        raise ValueError(f"hidden_TD: expected a width that is a multiple of {SHALLOWEST} on cutile, got {D}; use the torch backend")
    logprob_T = torch.empty(T, dtype=torch.float32, device=hidden_TD.device)
    rows = setting("logprob.score_rows", D=D).sizes.get("ROWS", ROWS)
    arguments = (hidden_TD, weight_VD, targets_T.to(torch.int32), logprob_T, V, D, rows, COLUMNS, depth)
    if T:
        ct.launch(torch.cuda.current_stream(), (-(-T // rows),), tuned(score_rows, "logprob.score_rows", D=D), arguments)
    return logprob_T

"""The short causal convolution in plain PyTorch, anywhere: the product's path on a CPU, and on a GPU that cuTile does not support.

Rows are convolved in place of the step, as if documents went on into each other; the first K - 1 rows of each entry are then
replaced by what the entry's own tail gives. Every row sums its taps in the same order, so its bits do not depend on company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from longscan.kernels.blocks import Block, blocks, gaps, tiles_a_block
from longscan.kernels.elementwise import silu_
from longscan.kernels.segments import NO_LANE, TILE, Segments


def causal_conv1d(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    *,
    tail_SKC: torch.Tensor,
    segments: Segments,
    activation: Literal["silu"] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `longscan.kernels.conv1d.causal_conv1d`; sums in fp32 at least. Gradients flow where they are recorded."""
    C, K = weight_CK.shape
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    inputs = (x_TC, weight_CK, bias_C, tail_SKC)
    recording = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
    taps_KC = weight_CK.T.to(wide).contiguous()
    bias_C = x_TC.new_zeros(C, dtype=wide) if bias_C is None else bias_C.to(wide)
    y_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    for rows in gaps(segments):
        y_TC[rows] = 0
    ends = _ends(segments, K)
    past_EKC = _past(tail_SKC, ends)
    window_EKC = torch.cat([past_EKC, x_TC[ends.head_rows]], dim=1).to(wide)
    head_EKC = _weigh([window_EKC[:, k : k + K - 1] for k in range(K)], taps_KC, bias_C)
    for block in blocks(segments, tiles_a_block(2 * TILE * C * x_TC.element_size(), x_TC.device)):
        y_MQC = y_TC[block.rows].view(-1, TILE, C)
        in_place = not recording and y_TC.dtype == wide
        result_MQC = _block(x_TC, taps_KC, bias_C, head_EKC, block, y_MQC if in_place else None)
        if activation == "silu":
            result_MQC = F.silu(result_MQC) if recording else silu_(result_MQC)
        if not in_place:
            y_MQC.copy_(result_MQC)
    return y_TC, _keep(x_TC, past_EKC, tail_SKC, ends, recording)


def _past(tail_SKC: torch.Tensor, ends: _Ends) -> torch.Tensor:
    """[E, K - 1, C]: the inputs before each entry, zero before a document's start."""
    if ends.lane_in is None:
        return tail_SKC.new_zeros(len(ends.head_rows), *tail_SKC.shape[1:])
    return tail_SKC[ends.lane_in.clamp(min=0)].masked_fill((ends.lane_in == NO_LANE)[:, None, None], 0)


def _weigh(shifted: Sequence[torch.Tensor], taps_KC: torch.Tensor, bias_C: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """bias + sum over k of tap_k times the inputs shifted by k, in that order."""
    y = torch.addcmul(bias_C, shifted[0], taps_KC[0], out=out)
    for x, tap_C in zip(shifted[1:], taps_KC[1:], strict=True):
        y = torch.addcmul(y, x, tap_C, out=out)
    return y


def _block(
    x_TC: torch.Tensor, taps_KC: torch.Tensor, bias_C: torch.Tensor, head_EKC: torch.Tensor, block: Block, out_MQC: torch.Tensor | None
) -> torch.Tensor:
    """The block's rows before activation, [M, Q, C], in `out_MQC` where it is given."""
    K, C = taps_KC.shape
    rows = block.rows
    # Where an entry begins on the block's first tile, its first rows come from `head_EKC`, and nothing before the block is read.
    skipped = K - 1 if block.opens else 0
    first = rows.start + skipped
    x_TC = x_TC[first - (K - 1) : rows.stop].to(taps_KC.dtype)
    shifted = [x_TC[k : k + rows.stop - first] for k in range(K)]
    if out_MQC is None:
        y_TC = _weigh(shifted, taps_KC, bias_C)
        y_MQC = torch.cat([y_TC.new_zeros(skipped, C), y_TC]).view(-1, TILE, C)
    else:
        _weigh(shifted, taps_KC, bias_C, out=out_MQC.view(-1, C)[skipped:])
        y_MQC = out_MQC
    if block.begins is not None:
        y_MQC[:, : K - 1].index_copy_(0, block.begins, head_EKC[block.begun])
    return y_MQC


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where each entry's first and last inputs stand."""

    lane_in: torch.Tensor | None
    """[E], int64; None where no entry has a past."""
    head_rows: torch.Tensor
    """[E, K - 1], int64: the first rows of each entry."""
    kept: torch.Tensor
    """[kept], int64: entries whose tail goes to a slot."""
    lane_out: torch.Tensor
    """[kept], int64: those slots."""
    tail_places: torch.Tensor
    """[kept, K - 1], int64: places of the last inputs, counted from the entry's first row; below zero in the old tail."""
    tail_rows: torch.Tensor
    """[kept, K - 1], int64: the same as rows of the step, where there are such."""


def _ends(segments: Segments, K: int) -> _Ends:
    if (_Ends, K) not in segments.derived:
        entries = len(segments.entries)
        first_row = segments.first_tile[:entries].long() * TILE
        lane_in, lane_out = segments.lane_in[:entries].long(), segments.lane_out[:entries].long()
        reach = torch.arange(K - 1, device=first_row.device)
        kept = (lane_out != NO_LANE).nonzero()[:, 0]
        places = segments.num_tokens[:entries].long()[kept, None] - (K - 1) + reach
        segments.derived[_Ends, K] = _Ends(
            lane_in=lane_in if any(entry.lane_in != NO_LANE for entry in segments.entries) else None,
            head_rows=first_row[:, None] + reach,
            kept=kept,
            lane_out=lane_out[kept],
            tail_places=places,
            tail_rows=first_row[kept, None] + places.clamp(min=0),
        )
    ends: _Ends = segments.derived[_Ends, K]
    return ends


def _keep(x_TC: torch.Tensor, past_EKC: torch.Tensor, tail_SKC: torch.Tensor, ends: _Ends, recording: bool) -> torch.Tensor:
    """Put the last K - 1 inputs of each entry that has a slot into the table; a short entry's reach back into its old tail."""
    K = past_EKC.shape[1] + 1
    old_EKC = past_EKC[ends.kept[:, None], (ends.tail_places + K - 1).clamp(max=max(K - 2, 0))]
    new_EKC = torch.where((ends.tail_places < 0)[..., None], old_EKC, x_TC[ends.tail_rows])
    if recording:
        return tail_SKC.index_copy(0, ends.lane_out, new_EKC)
    return tail_SKC.index_copy_(0, ends.lane_out, new_EKC)

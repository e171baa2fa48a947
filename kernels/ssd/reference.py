"""SSD in plain PyTorch, anywhere: the product's path on a CPU, and on a GPU that cuTile does not support.

A tile's outputs are what its own tokens write, as far as it is still there, plus what is left of the state before the tile; the
states pass from tile to tile (Dao and Gu, arXiv 2405.21060, section 6). All of it is done a tile at a time with the same shapes,
so that a document's bits depend on nothing but the document: not on its company, and not on where it is cut into entries.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from longscan.kernels.blocks import Block, blocks, gaps, tiles_a_block
from longscan.kernels.elementwise import exp2_, silu_, softplus_
from longscan.kernels.segments import TILE, Segments

HIGHEST_EXPONENT = 64.0
"""Bound of the exponents above the diagonal, where weights are zero, so that 2 to their power is finite. No other passes log2(dt)."""


def ssd(
    x_THP: torch.Tensor,
    dt_TH: torch.Tensor,
    A_H: torch.Tensor,
    B_TGN: torch.Tensor,
    C_TGN: torch.Tensor,
    *,
    D_H: torch.Tensor | None,
    dt_bias_H: torch.Tensor | None,
    z_THP: torch.Tensor | None,
    dt_limit: tuple[float, float],
    ssm_SHNP: torch.Tensor,
    segments: Segments,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `longscan.kernels.ssd.ssd`; computes in the dtype of ssm_SHNP. Gradients flow where they are recorded."""
    (_, H, P), (_, G, N) = x_THP.shape, B_TGN.shape
    inputs = (x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, dt_bias_H, z_THP, ssm_SHNP)
    recording = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
    y_THP = torch.empty_like(x_THP, memory_format=torch.contiguous_format)
    for rows in gaps(segments):
        y_THP[rows] = 0
    carried_GNRP = None
    for block in blocks(segments, tiles_a_block((TILE * TILE + 2 * N * P) * H * ssm_SHNP.element_size(), x_THP.device)):
        rows = block.rows
        dt_MQH, decay_MQH = _time(dt_TH[rows], dt_bias_H, dt_limit, A_H, block.padding, recording)
        x_MHQP = _tiles(x_THP[rows], A_H.dtype)
        B_MGQN, C_MGQN = _tiles(B_TGN[rows], A_H.dtype), _tiles(C_TGN[rows], A_H.dtype)
        inside_MHQP = _weights(B_MGQN, C_MGQN, dt_MQH, decay_MQH, D_H, recording) @ x_MHQP
        written_MGNRP = _written(x_MHQP, B_MGQN, dt_MQH, decay_MQH, recording)
        initial = _initial_states(ssm_SHNP, block, (G, N, H // G, P), carried_GNRP)
        left_MQH = _exp2(decay_MQH.to(dt_MQH.dtype, copy=True), recording)
        before_MGNRP, final = _pass_on(written_MGNRP, left_MQH[:, -1], initial, block, recording)
        carried_GNRP = None if block.carried_out is None else final[block.carried_out]
        ssm_SHNP = _keep(ssm_SHNP, block, final, recording)
        _read(y_THP[rows], inside_MHQP, C_MGQN, before_MGNRP, left_MQH, z_THP if z_THP is None else z_THP[rows], recording)
    return y_THP, ssm_SHNP


def _tiles(x_THP: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[M Q, H, P] to [M, H, Q, P], contiguous."""
    return x_THP.view(-1, TILE, *x_THP.shape[1:]).transpose(1, 2).to(dtype).contiguous()


def _exp2(x: torch.Tensor, recording: bool) -> torch.Tensor:
    return x.exp2() if recording else exp2_(x)


def _time(
    raw_TH: torch.Tensor,
    bias_H: torch.Tensor | None,
    limit: tuple[float, float],
    A_H: torch.Tensor,
    padding_T: torch.Tensor | None,
    recording: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Time steps dt_MQH, zero on padding, and decay_MQH, the log2 of what is left of a tile's initial state after each row.

    decay is in fp64: it goes down by hundreds along a tile, and what counts are small differences far down.
    """
    raw_TH = raw_TH.to(A_H.dtype) + (0.0 if bias_H is None else bias_H)
    dt_TH = F.softplus(raw_TH) if recording else softplus_(raw_TH)
    dt_TH = dt_TH.clamp(*limit)
    if padding_T is not None:
        dt_TH = dt_TH.masked_fill(padding_T[:, None], 0.0)
    dt_MQH = dt_TH.view(-1, TILE, dt_TH.shape[1])
    return dt_MQH, (dt_MQH.double() * (A_H.double() * math.log2(math.e))).cumsum(1)


def _weights(
    B_MGQN: torch.Tensor,
    C_MGQN: torch.Tensor,
    dt_MQH: torch.Tensor,
    decay_MQH: torch.Tensor,
    D_H: torch.Tensor | None,
    recording: bool,
) -> torch.Tensor:
    """weight_MHQQ of each input in each output of its tile: (C_i . B_j) exp(sum of dt A over j < t <= i) dt_j, plus D where i = j.

    dt_j rides in the exponent as its log2, which saves a pass over the largest array there is.
    """
    M, G, Q, _ = B_MGQN.shape
    cb_MGQQ = (C_MGQN @ B_MGQN.transpose(2, 3)).tril()
    decay_MHQ = decay_MQH.transpose(1, 2).contiguous()
    # Rounded to fp32 and the remainder: the difference of the rounded parts is exact where it is small.
    rounded_MHQ = decay_MHQ.to(dt_MQH.dtype)
    rest_MHQ = (decay_MHQ - rounded_MHQ).to(dt_MQH.dtype)
    dt_MHQ = dt_MQH.transpose(1, 2).clamp(min=torch.finfo(dt_MQH.dtype).tiny)
    exponent_MHQQ = rounded_MHQ[..., :, None] - rounded_MHQ[..., None, :]
    exponent_MHQQ = exponent_MHQQ.add_(rest_MHQ[..., :, None]).add_((dt_MHQ.log2() - rest_MHQ)[..., None, :])
    if recording:
        decayed_MHQQ = exponent_MHQQ.clamp(max=HIGHEST_EXPONENT).exp2()
        weight_MHQQ = (decayed_MHQQ.view(M, G, -1, Q, Q) * cb_MGQQ[:, :, None]).flatten(1, 2)
    else:
        weight_MHQQ = exp2_(exponent_MHQQ.clamp_(max=HIGHEST_EXPONENT))
        weight_MHQQ.view(M, G, -1, Q, Q).mul_(cb_MGQQ[:, :, None])
    if D_H is not None:
        weight_MHQQ.diagonal(dim1=2, dim2=3).add_(D_H[:, None])
    return weight_MHQQ


def _written(x_MHQP: torch.Tensor, B_MGQN: torch.Tensor, dt_MQH: torch.Tensor, decay_MQH: torch.Tensor, recording: bool) -> torch.Tensor:
    """written_MGNRP: what a tile's tokens leave in the state at its end, sum over t of exp(sum of dt A after t) dt_t B_t x_t^T."""
    (M, H, Q, P), (_, G, _, N) = x_MHQP.shape, B_MGQN.shape
    share_MQH = _exp2((decay_MQH[:, -1:] - decay_MQH).to(dt_MQH.dtype), recording) * dt_MQH
    share_MGQR1 = share_MQH.view(M, Q, G, -1).transpose(1, 2)[..., None]
    scaled_MGQRP = None if recording else x_MHQP.new_empty(M, G, Q, H // G, P)
    scaled_MGQRP = torch.mul(x_MHQP.view(M, G, -1, Q, P).transpose(2, 3), share_MGQR1, out=scaled_MGQRP)
    return (B_MGQN.transpose(2, 3) @ scaled_MGQRP.flatten(3)).view(M, G, N, -1, P)


def _initial_states(
    ssm_SHNP: torch.Tensor, block: Block, shape: tuple[int, int, int, int], carried_GNRP: torch.Tensor | None
) -> torch.Tensor:
    """[pieces, G, N, R, P]: from the table, from the block before, or zero."""
    pieces, (G, N, R, P) = block.waves[0], shape
    if carried_GNRP is not None and pieces == 1:
        return carried_GNRP[None]
    if block.lanes_in is None:
        initial = ssm_SHNP.new_zeros(pieces, *shape)
    else:
        table_SHNP = ssm_SHNP[block.lanes_in.clamp(min=0)]
        table_SHNP = table_SHNP.masked_fill((block.lanes_in < 0)[:, None, None, None], 0.0)
        initial = table_SHNP.view(pieces, G, R, N, P).transpose(2, 3).contiguous()
    if carried_GNRP is not None:
        initial[block.carried_in] = carried_GNRP
    return initial


def _pass_on(
    written_MGNRP: torch.Tensor, left_MH: torch.Tensor, initial: torch.Tensor, block: Block, recording: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """States before each tile [M, G, N, R, P] and after each piece [pieces, G, N, R, P], wave by wave."""
    G, R = initial.shape[1], initial.shape[3]
    left = left_MH.reshape(-1, G, 1, R, 1)
    if block.order is not None:
        written_MGNRP, left = written_MGNRP[block.order], left[block.order]
    if recording:
        before, final = _recorded_waves(written_MGNRP, left, initial, block.waves)
    else:
        before, final = _waves(written_MGNRP, left, initial, block.waves, block.kept is not None or block.carried_out is not None)
    return (before if block.place is None else before[block.place]), final


def _waves(
    written: torch.Tensor, left: torch.Tensor, initial: torch.Tensor, waves: tuple[int, ...], kept: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kept`: final states are wanted; otherwise what is returned for them holds nothing."""
    before, final = torch.empty_like(written), torch.empty_like(initial)
    before[: waves[0]] = initial
    start = 0
    for count, going in zip(waves, (*waves[1:], 0), strict=True):
        stay, end = start + going, start + count
        if going:
            torch.addcmul(written[start:stay], before[start:stay], left[start:stay], out=before[end : end + going])
        if going < count and kept:
            torch.addcmul(written[stay:end], before[stay:end], left[stay:end], out=final[going:count])
        start = end
    return before, final


def _recorded_waves(
    written: torch.Tensor, left: torch.Tensor, initial: torch.Tensor, waves: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_waves`, without writing to what gradients need."""
    before: list[torch.Tensor] = []
    final: list[torch.Tensor] = []
    states, start = initial, 0
    for count in waves:
        final.insert(0, states[count:])
        before.append(states[:count])
        states = torch.addcmul(written[start : start + count], before[-1], left[start : start + count])
        start += count
    return torch.cat(before), torch.cat([states, *final])


def _keep(ssm_SHNP: torch.Tensor, block: Block, final: torch.Tensor, recording: bool) -> torch.Tensor:
    if block.kept is None or block.lanes_out is None:
        return ssm_SHNP
    kept = final[block.kept].transpose(2, 3).flatten(1, 2)
    if recording:
        return ssm_SHNP.index_copy(0, block.lanes_out, kept)
    return ssm_SHNP.index_copy_(0, block.lanes_out, kept)


def _read(
    y_THP: torch.Tensor,
    inside_MHQP: torch.Tensor,
    C_MGQN: torch.Tensor,
    before_MGNRP: torch.Tensor,
    left_MQH: torch.Tensor,
    z_THP: torch.Tensor | None,
    recording: bool,
) -> None:
    """Write to y_THP: outputs from inside the tile, plus what C reads of the state before it, times silu(z)."""
    M, G, _, R, P = before_MGNRP.shape
    old_MQGRP = (C_MGQN @ before_MGNRP.flatten(3)).view(M, G, TILE, R, P).transpose(1, 2)
    inside_MQGRP = inside_MHQP.view(M, G, R, TILE, P).permute(0, 3, 1, 2, 4)
    left = left_MQH.view(M, TILE, G, R, 1)
    in_place = not recording and z_THP is None and y_THP.dtype == left.dtype
    y_MQGRP = torch.addcmul(inside_MQGRP, old_MQGRP, left, out=y_THP.view(M, TILE, G, R, P) if in_place else None)
    if in_place:
        return
    result_THP = y_MQGRP.reshape(y_THP.shape)
    if z_THP is not None:
        z_THP = z_THP.to(left.dtype, copy=True, memory_format=torch.contiguous_format)
        result_THP = result_THP * (F.silu(z_THP) if recording else silu_(z_THP))
    y_THP.copy_(result_THP)

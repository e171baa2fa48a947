"""SSD on CUDA Tile: a head's state stays on chip along a document and goes to memory once an entry, in fp32.

Three launches. `time_steps` turns raw time steps into exponents, `products` computes C B^T of each tile once a group, and
`scan` goes along each entry tile by tile. The state is kept as P x N: so it is an operand of the tensor cores straight from
the registers that accumulate it, in both products it takes part in, and outputs come out transposed (P x Q).

Exponents are in log2 units. Inside a tile, with a_t = dt_t A log2(e) summed from the tile's first row up to t:

    y_i = 2^(a_i) C_i S + sum over j <= i of (C_i . B_j) 2^(a_i - s_j) x_j + D x_i        s_j = a_j - log2(dt_j)
    S'  = 2^(a_last) S + sum over j of 2^(a_last - s_j) B_j x_j^T
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch
from longscan.kernels.segments import TILE, Entry, Segments

CI = ct.Constant[int]
CB = ct.Constant[bool]

LOG2_E = math.log2(math.e)
HEADS_A_BLOCK = 16
"""Heads of a block of `time_steps`."""
NEVER = 1.0e30
"""s_j of a row of padding, or of a time step of zero: 2^(a_i - s_j) is 0."""
HIGHEST_EXPONENT = 64.0
"""Bound of a_i - s_j, which is log2(dt_j) at most where it counts: above the diagonal, where products are 0, the power stays finite."""
LATENCY = 8
"""Hint of the scan's loads: far ahead of their use."""
DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (32, 64, 128)
STATE_SIZES = (16, 64, 128, 256)


@ct.kernel(occupancy=4)
def time_steps(  # type: ignore[no-untyped-def]
    dt_TH,
    bias_H,
    A_H,
    decay_HT,
    source_HT,
    left_HT,
    share_HT,
    tile_entry,
    first_tile,
    num_tokens,
    low: float,
    high: float,
    BLOCK: CI,
):
    """dt = clamp(softplus(raw + bias), low, high), 0 on rows of padding; then decay = a, source = s, left = 2^a, share = 2^(a_last - s).

    dt_TH: any float; bias_H, A_H: fp32; decay_HT, source_HT, left_HT, share_HT: fp32, not written in tiles of no entry.
    Grid: (T / 64, H / BLOCK), all in parallel.
    """
    tile = ct.bid(0)
    h = ct.bid(1)
    entry = ct.load(tile_entry, (tile,), (1,)).item()
    if entry >= 0:
        count = ct.load(num_tokens, (entry,), (1,)).item() - (tile - ct.load(first_tile, (entry,), (1,)).item()) * TILE
        raw = ct.load(dt_TH, (tile, h), (TILE, BLOCK), allow_tma=False).astype(ct.float32)
        raw = raw + ct.load(bias_H, (h,), (BLOCK,), allow_tma=False).reshape((1, BLOCK))
        # log(1 + e), exact where 1 + e rounds: a small time step keeps its relative precision.
        e = ct.exp2(ct.abs(raw) * -LOG2_E)
        one_and_e = 1.0 + e
        log1p = ct.where(one_and_e > 1.0, ct.log(one_and_e) * (e / (one_and_e - 1.0)), e)
        dt = ct.minimum(ct.maximum(ct.maximum(raw, 0.0) + log1p, low), high)
        row = ct.arange(TILE, dtype=ct.int32).reshape((TILE, 1))
        dt = ct.where(row < count, dt, 0.0)
        decay = ct.cumsum(dt * (ct.load(A_H, (h,), (BLOCK,), allow_tma=False).reshape((1, BLOCK)) * LOG2_E), 0)
        source = ct.where(dt > 0.0, decay - ct.log2(dt), NEVER)
        share = ct.exp2(ct.extract(decay, (TILE - 1, 0), (1, BLOCK)) - source, flush_to_zero=True)
        ct.store(decay_HT, (h, tile), ct.transpose(decay), allow_tma=False)
        ct.store(source_HT, (h, tile), ct.transpose(source), allow_tma=False)
        ct.store(left_HT, (h, tile), ct.transpose(ct.exp2(decay, flush_to_zero=True)), allow_tma=False)
        ct.store(share_HT, (h, tile), ct.transpose(share), allow_tma=False)


@ct.kernel(occupancy=2)
def products(B_TX, C_TX, cb_RQ, y_TI, tile_entry, HEADS: CI, N: CI, P: CI):  # type: ignore[no-untyped-def]
    """cb = C B^T of one tile and group, zero above the diagonal; zeros to y where the tile belongs to no entry.

    B_TX, C_TX: [T, G N] bf16 or fp16; cb_RQ: [G T, 64], theirs, group by group; y_TI: [T, H P]; HEADS: of a group.
    Grid: (T / 64, G), all in parallel.
    """
    tile = ct.bid(0)
    g = ct.bid(1)
    if ct.load(tile_entry, (tile,), (1,)).item() >= 0:
        b = ct.load(B_TX, (tile, g), (TILE, N))
        c = ct.load(C_TX, (tile, g), (TILE, N))
        cb = ct.mma(c, ct.transpose(b), ct.zeros((TILE, TILE), dtype=ct.float32))
        row = ct.arange(TILE, dtype=ct.int32).reshape((TILE, 1))
        column = ct.arange(TILE, dtype=ct.int32).reshape((1, TILE))
        cb = ct.where(row >= column, cb, 0.0).astype(cb_RQ.dtype)
        ct.store(cb_RQ, (g * ct.num_tiles(B_TX, 0, (TILE, N)) + tile, 0), cb)
    else:
        for h in range(HEADS):
            ct.store(y_TI, (tile, g * HEADS + h), ct.zeros((TILE, P), dtype=y_TI.dtype), allow_tma=False)


def _tile(  # type: ignore[no-untyped-def]
    tile, h, state_PN, b_QN, c_QN, D, x_TI, z_TI, cb_RQ, decay_HT, source_HT, left_HT, share_HT, y_TI, G_HEADS, P, GATE
):
    """One head's outputs of one tile, and its state after it."""
    # Each head reads cb by an index of its own: read once for two heads, it would be converted by one warp group for both.
    row = h // G_HEADS * ct.num_tiles(x_TI, 0, (TILE, P)) + tile
    cb_QQ = ct.load(cb_RQ, (row, 0), (TILE, TILE), latency=LATENCY).astype(ct.float32)
    decay_1Q = ct.load(decay_HT, (h, tile), (1, TILE))
    source_1Q = ct.load(source_HT, (h, tile), (1, TILE))
    left_1Q = ct.load(left_HT, (h, tile), (1, TILE))
    share_1Q = ct.load(share_HT, (h, tile), (1, TILE))
    x_PQ = ct.transpose(ct.load(x_TI, (tile, h), (TILE, P), latency=LATENCY))
    exponent_QQ = ct.minimum(decay_1Q.reshape((TILE, 1)) - source_1Q, HIGHEST_EXPONENT)
    weight_QQ = (cb_QQ * ct.exp2(exponent_QQ, flush_to_zero=True)).astype(x_TI.dtype)
    y_PQ = ct.mma(state_PN.astype(x_TI.dtype), ct.transpose(c_QN), ct.zeros((P, TILE), dtype=ct.float32))
    y_PQ = ct.mma(x_PQ, ct.transpose(weight_QQ), y_PQ * left_1Q)
    wide_PQ = x_PQ.astype(ct.float32)
    written_PQ = (wide_PQ * share_1Q).astype(x_TI.dtype)
    state_PN = ct.mma(written_PQ, b_QN, state_PN * ct.extract(left_1Q, (0, TILE - 1), (1, 1)))
    y_PQ = y_PQ + D * wide_PQ
    if GATE:
        z_PQ = ct.transpose(ct.load(z_TI, (tile, h), (TILE, P), latency=LATENCY)).astype(ct.float32)
        denominator = 1.0 + ct.exp2(z_PQ * -LOG2_E, flush_to_zero=True)
        y_PQ = y_PQ * ct.truediv(z_PQ, denominator, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    ct.store(y_TI, (tile, h), ct.transpose(y_PQ.astype(y_TI.dtype)), check_bounds=False)
    return state_PN


@ct.kernel
def scan(  # type: ignore[no-untyped-def]
    x_TI,
    B_TX,
    C_TX,
    z_TI,
    cb_RQ,
    decay_HT,
    source_HT,
    left_HT,
    share_HT,
    D_H,
    ssm_RP,
    y_TI,
    first_tile,
    num_tokens,
    lane_in,
    lane_out,
    H: CI,
    G_HEADS: CI,
    HEADS: CI,
    N: CI,
    P: CI,
    GATE: CB,
):
    """The recurrence over one entry for HEADS heads of a group, which share the reads of B and C.

    x_TI, z_TI: [T, H P]; B_TX, C_TX: [T, G N]; cb_RQ: as `products` leaves it; all bf16 or fp16; y_TI: [T, H P], theirs.
    decay_HT, source_HT, left_HT, share_HT: as `time_steps` leaves them; D_H: fp32.
    ssm_RP: [S H N, P] fp32, the table of states, read at lane_in and written at lane_out, in place.
    Grid: (H / HEADS, E), all in parallel; the tiles of an entry are serial. An entry of no tokens has no lanes and does nothing.
    """
    first_head = ct.bid(0) * HEADS
    entry = ct.bid(1)
    first = ct.load(first_tile, (entry,), (1,)).item()
    tiles = (ct.load(num_tokens, (entry,), (1,)).item() + (TILE - 1)) // TILE
    source = ct.load(lane_in, (entry,), (1,)).item()
    kept = ct.load(lane_out, (entry,), (1,)).item()
    states = ()
    skips = ()
    for k in ct.static_iter(range(HEADS)):
        state_PN = ct.zeros((P, N), dtype=ct.float32)
        if source >= 0:
            state_PN = ct.transpose(ct.load(ssm_RP, (source * H + first_head + k, 0), (N, P)))
        states += (state_PN,)
        skips += (ct.load(D_H, (first_head + k,), (1,)).reshape((1, 1)),)
    for tile in range(first, first + tiles):
        b_QN = ct.load(B_TX, (tile, first_head // G_HEADS), (TILE, N), latency=LATENCY)
        c_QN = ct.load(C_TX, (tile, first_head // G_HEADS), (TILE, N), latency=LATENCY)
        after = ()
        for k in ct.static_iter(range(HEADS)):
            vectors = (decay_HT, source_HT, left_HT, share_HT)
            arrays = (x_TI, z_TI, cb_RQ)
            state_PN = _tile(tile, first_head + k, states[k], b_QN, c_QN, skips[k], *arrays, *vectors, y_TI, G_HEADS, P, GATE)
            after += (state_PN,)
        states = after
    if kept >= 0:
        for k in ct.static_iter(range(HEADS)):
            ct.store(ssm_RP, (kept * H + first_head + k, 0), ct.transpose(states[k]))


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
    """As `longscan.kernels.ssd.ssd`, in bf16 or fp16 with P 32, 64 or 128 and N 16, 64, 128 or 256.

    Raises ValueError where the kernels have no form for the arguments; the torch backend takes them.
    """
    (T, H, P), (_, G, N) = x_THP.shape, B_TGN.shape
    _check(x_THP, B_TGN, C_TGN, z_THP, ssm_SHNP)
    device, s = x_THP.device, segments
    nothing_H = torch.zeros(H, dtype=torch.float32, device=device)
    x_TI, B_TX, C_TX = x_THP.flatten(1), B_TGN.flatten(1), C_TGN.flatten(1)
    z_TI = x_TI if z_THP is None else z_THP.flatten(1)
    y_TI = torch.empty((T, H * P), dtype=x_THP.dtype, device=device)
    exponents = tuple(torch.empty((H, T), dtype=torch.float32, device=device) for _ in range(4))
    cb_RQ = torch.empty((G * T, TILE), dtype=x_THP.dtype, device=device)
    stream = torch.cuda.current_stream()
    if s.num_tiles:
        raw = (dt_TH, nothing_H if dt_bias_H is None else dt_bias_H, A_H)
        arguments = (*raw, *exponents, s.tile_entry, s.first_tile, s.num_tokens, *dt_limit, HEADS_A_BLOCK)
        ct.launch(stream, (s.num_tiles, -(-H // HEADS_A_BLOCK)), time_steps, arguments)
        ct.launch(stream, (s.num_tiles, G), products, (B_TX, C_TX, cb_RQ, y_TI, s.tile_entry, H // G, N, P))
    if s.num_tokens.numel():
        heads = _heads(H // G, P, N)
        inputs = (x_TI, B_TX, C_TX, z_TI, cb_RQ, *exponents, nothing_H if D_H is None else D_H)
        lanes = (s.first_tile, s.num_tokens, s.lane_in, s.lane_out)
        arguments = (*inputs, ssm_SHNP.view(-1, P), y_TI, *lanes, H, H // G, heads, N, P, z_THP is not None)
        ct.launch(stream, (H // heads, s.num_tokens.numel()), _scan(heads, P), arguments)
    return y_TI.view(T, H, P), ssm_SHNP


def _heads(group: int, P: int, N: int) -> int:
    """Heads of a block of `scan`, each with a warp group of its own: two where their states fit the registers."""
    return 2 if group % 2 == 0 and P * N <= 64 * 128 else 1


@functools.cache
def _scan(heads: int, P: int) -> Any:
    """`scan` with the hints that fit: two blocks on an SM, or one whose two heads, or whose wide head, take it whole."""
    if heads == 2:
        return scan
    return scan.replace_hints(num_worker_warps=8) if P == 128 else scan.replace_hints(occupancy=2)


def _check(x_THP: torch.Tensor, B_TGN: torch.Tensor, C_TGN: torch.Tensor, z_THP: torch.Tensor | None, ssm_SHNP: torch.Tensor) -> None:
    """What the operator allows and the kernels do not take."""
    for name, tensor, sizes in (
        ("x_THP", x_THP, WIDTHS),
        ("B_TGN", B_TGN, STATE_SIZES),
        ("C_TGN", C_TGN, STATE_SIZES),
        ("z_THP", z_THP, WIDTHS),
    ):
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: expected bfloat16 or float16 on cutile, got {tensor.dtype}; use the torch backend")
        if tensor.shape[2] not in sizes:
            raise ValueError(f"{name}: expected a last axis of {sizes} on cutile, got {tensor.shape[2]}; use the torch backend")
        if tensor.stride()[1:] != (tensor.shape[2], 1) or tensor.stride(0) % 8 or tensor.storage_offset() % 8:
            expected = f"strides (a multiple of 8, {tensor.shape[2]}, 1) and an offset that is a multiple of 8 on cutile"
            raise ValueError(f"{name}: expected {expected}, got strides {tensor.stride()} at {tensor.storage_offset()}")
    if not ssm_SHNP.is_contiguous():
        raise ValueError(f"ssm_SHNP: expected a contiguous table on cutile, got strides {ssm_SHNP.stride()}")
    for name, tensor in (("x_THP", x_THP), ("B_TGN", B_TGN), ("ssm_SHNP", ssm_SHNP)):
        reach = sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if reach >= 2**31:
            raise ValueError(f"{name}: expected less than 2^31 elements from first to last on cutile, got {reach}; use smaller steps")


def variants() -> list[tuple[str, Callable[[], object]]]:
    """Shapes that are compiled ahead of time: a label, and a call that launches everything for one on tensors of no memory."""

    def call(H: int, G: int, P: int, N: int, gate: bool) -> Callable[[], object]:
        T = 4 * TILE
        segments = Segments.pack([Entry(first_tile=0, num_tokens=T, lane_in=0, lane_out=0)], T // TILE, "meta")

        def launch() -> object:
            wide = torch.empty((T, 2 * H * P + 2 * G * N + H), dtype=torch.bfloat16, device="meta")
            z_TI, x_TI, B_TX, C_TX, dt_TH = wide.split([H * P, H * P, G * N, G * N, H], dim=1)
            of_heads = [torch.empty(H, dtype=torch.float32, device="meta") for _ in range(3)]
            return ssd(
                x_TI.unflatten(1, (H, P)),
                dt_TH,
                of_heads[0],
                B_TX.unflatten(1, (G, N)),
                C_TX.unflatten(1, (G, N)),
                D_H=of_heads[1],
                dt_bias_H=of_heads[2],
                z_THP=z_TI.unflatten(1, (H, P)) if gate else None,
                dt_limit=(0.0, math.inf),
                ssm_SHNP=torch.empty((16, H, N, P), dtype=torch.float32, device="meta"),
                segments=segments,
            )

        return launch

    default = [(24, 1, 64, 128, False), (80, 1, 64, 128, False), (128, 8, 64, 128, False), (128, 8, 64, 128, True)]
    return [(f"H{H} G{G} P{P} N{N}{' gate' * gate}", call(H, G, P, N, gate)) for H, G, P, N, gate in default]

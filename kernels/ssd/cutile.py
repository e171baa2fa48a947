"""SSD on CUDA Tile: a head's state stays on chip along a document and goes to memory once an entry, in fp32.

Three launches. `time_steps` turns raw time steps into exponents, `products` computes C B^T of each tile once a group (or `prepare` does
both), and `scan` goes along each entry tile by tile. The state is kept as P x N: so it is an operand of the tensor cores straight from
the registers that accumulate it, in both products it takes part in, and outputs come out transposed (P x Q).

Exponents are in log2 units. Inside a tile, with a_t = dt_t A log2(e) summed from the tile's first row up to t:

    y_i = 2^(a_i) C_i S + sum over j <= i of (C_i . B_j) 2^(a_i - s_j) x_j + D x_i        s_j = a_j - log2(dt_j)
    S'  = 2^(a_last) S + sum over j of 2^(a_last - s_j) B_j x_j^T

C_i . B_j goes from `products` to `scan` as fp16, a sixteenth of it, and the exponent makes up for that: in bf16 its rounding would be
a third of the error of y, and in fp16 it is nothing for products from 1e-3 to a million.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import cuda.tile as ct
import torch
from longscan.kernels.segments import TILE, Segments
from longscan.kernels.ssd.forms import check_form
from longscan.kernels.ssd.spans import Spans, cut, heads_a_block
from longscan.kernels.tuning import setting, tuned

CI = ct.Constant[int]
CB = ct.Constant[bool]

LOG2_E = math.log2(math.e)
HEADS_A_BLOCK = 16
"""Heads of a block of `time_steps` at most."""
CB_SHIFT = 4
"""C B^T is kept divided by 2 to this power: up to a million it is in fp16's range."""
CB_MOST = 65504.0
"""fp16's largest number: where C B^T would pass it, it stays there, finite."""
NEVER = 1.0e30
"""s_j of a row of padding, or of a time step of zero: 2^(a_i - s_j) is 0."""
HIGHEST_EXPONENT = 64.0
"""Bound of a weight's exponent, which is CB_SHIFT + log2(dt_j) at most where it counts; above the diagonal, where products are 0,
the power stays finite."""
DECAY, SOURCE, LEFT, SHARE = range(4)
"""Rows of a tile's vectors: a, s - CB_SHIFT, 2^a and 2^(a_last - s)."""
VECTORS = 4
LATENCY = 8
"""Hint of the loads in loops over tiles; without one, or with a middling one, the compiler buffers some of them badly."""
ROWS = 16
"""Rows of a state that a block of `span_starts` passes on."""
SPANS = 4
"""Spans whose loads such a block makes at once."""


def _load_raw(dt_TH, bias_H, A_H, tile, h, BLOCK):  # type: ignore[no-untyped-def]
    """Raw time steps [BLOCK, 64] of BLOCK heads of a tile, their biases and decay rates; h: in blocks of heads."""
    raw = ct.transpose(ct.load(dt_TH, (tile, h), (TILE, BLOCK), allow_tma=False, check_bounds=False))
    bias = ct.load(bias_H, (h,), (BLOCK,), allow_tma=False, check_bounds=False).reshape((BLOCK, 1))
    rate = ct.load(A_H, (h,), (BLOCK,), allow_tma=False, check_bounds=False).reshape((BLOCK, 1))
    return raw, bias, rate


def _store_vectors(vectors_HAVQ, loaded, tile, h, count, low, high, BLOCK):  # type: ignore[no-untyped-def]
    """dt = clamp(softplus(raw + bias), low, high), 0 on rows of padding; then the four vectors of the tile, of BLOCK heads."""
    raw, bias, rate = loaded
    raw = raw.astype(ct.float32) + bias
    # log(1 + e), exact where 1 + e rounds: a small time step keeps its relative precision.
    e = ct.exp2(ct.abs(raw) * -LOG2_E)
    one_and_e = 1.0 + e
    rounding = ct.truediv(e, one_and_e - 1.0, rounding_mode=ct.RoundingMode.APPROX)
    log1p = ct.where(one_and_e > 1.0, ct.log(one_and_e) * rounding, e)
    # A raw time step that is no number stays so: as the least one it would hide in a token that changes nothing.
    dt = ct.minimum(ct.maximum(ct.maximum(raw, 0.0) + log1p, low, propagate_nan=True), high, propagate_nan=True)
    dt = ct.where(ct.arange(TILE, dtype=ct.int32).reshape((1, TILE)) < count, dt, 0.0)
    decay = ct.cumsum(dt * (rate * LOG2_E), 1)
    source = ct.where(dt > 0.0, decay - ct.log2(dt), NEVER)
    share = ct.exp2(ct.extract(decay, (0, TILE - 1), (BLOCK, 1)) - source, flush_to_zero=True)
    left = ct.exp2(decay, flush_to_zero=True)
    for v, vector in ct.static_iter(((DECAY, decay), (SOURCE, source - CB_SHIFT), (LEFT, left), (SHARE, share))):
        ct.store(vectors_HAVQ, (h, tile, v, 0), vector.reshape((BLOCK, 1, 1, TILE)), allow_tma=False, check_bounds=False)


def _product(b, c, dtype):  # type: ignore[no-untyped-def]
    """C B^T / 2^CB_SHIFT of one tile, zero above the diagonal."""
    cb = ct.mma(c, ct.transpose(b), ct.zeros((TILE, TILE), dtype=ct.float32))
    row = ct.arange(TILE, dtype=ct.int32).reshape((TILE, 1))
    column = ct.arange(TILE, dtype=ct.int32).reshape((1, TILE))
    cb = ct.minimum(ct.maximum(cb * 2.0**-CB_SHIFT, -CB_MOST, propagate_nan=True), CB_MOST, propagate_nan=True)
    return ct.where(row >= column, cb, 0.0).astype(dtype)


@ct.kernel(occupancy=8)
def time_steps(  # type: ignore[no-untyped-def]
    dt_TH, bias_H, A_H, vectors_HAVQ, tile_entry, first_tile, num_tokens, low: float, high: float, BLOCK: CI, BLOCKS: CI
):
    """Raw time steps to the four vectors of each tile.

    dt_TH: any float; bias_H, A_H: fp32, H a multiple of BLOCK; vectors_HAVQ: [H, T / 64, 4, 64] fp32, not written in tiles of no entry.
    Grid: (T / 64, H / BLOCK / BLOCKS), all in parallel; BLOCKS times BLOCK heads are loaded at once and worked on one after the other.
    """
    tile = ct.bid(0)
    entry = ct.load(tile_entry, (tile,), (1,), check_bounds=False).item()
    if entry >= 0:
        # All loads come first and without a check of bounds, which is a branch: none waits for another.
        first = ct.load(first_tile, (entry,), (1,), check_bounds=False).item()
        count = ct.load(num_tokens, (entry,), (1,), check_bounds=False).item() - (tile - first) * TILE
        loaded = ()
        for i in ct.static_iter(range(BLOCKS)):
            loaded += (_load_raw(dt_TH, bias_H, A_H, tile, ct.bid(1) * BLOCKS + i, BLOCK),)
        for i in ct.static_iter(range(BLOCKS)):
            _store_vectors(vectors_HAVQ, loaded[i], tile, ct.bid(1) * BLOCKS + i, count, low, high, BLOCK)


@ct.kernel(occupancy=2)
def products(B_TX, C_TX, cb_RQ, y_TI, tile_entry, HEADS: CI, N: CI, P: CI):  # type: ignore[no-untyped-def]
    """cb = C B^T / 2^CB_SHIFT of one tile and group, zero above the diagonal; zeros to y where the tile belongs to no entry.

    B_TX, C_TX: [T, G N] bf16 or fp16; cb_RQ: [G T, 64] fp16, group by group; y_TI: [T, H P]; HEADS: of a group.
    Grid: (T / 64, G), all in parallel.
    """
    tile = ct.bid(0)
    g = ct.bid(1)
    entry = ct.load(tile_entry, (tile,), (1,), check_bounds=False).item()
    # Before it is known whose tile it is: so no load waits for another.
    b = ct.load(B_TX, (tile, g), (TILE, N))
    c = ct.load(C_TX, (tile, g), (TILE, N))
    if entry >= 0:
        ct.store(cb_RQ, (g * ct.num_tiles(B_TX, 0, (TILE, N)) + tile, 0), _product(b, c, cb_RQ.dtype))
    else:
        _store_zeros(y_TI, tile, g, HEADS, P)


@ct.kernel(occupancy=4)
def prepare(  # type: ignore[no-untyped-def]
    dt_TH,
    bias_H,
    A_H,
    vectors_HAVQ,
    B_TX,
    C_TX,
    cb_RQ,
    y_TI,
    tile_entry,
    first_tile,
    num_tokens,
    low: float,
    high: float,
    BLOCK: CI,
    HEADS: CI,
    N: CI,
    P: CI,
):
    """`time_steps` and `products` of one tile and group in one block, whose loads are all under way at once.

    Arguments as theirs; HEADS: of a group, a multiple of BLOCK. Grid: (T / 64, G), all in parallel.
    """
    tile = ct.bid(0)
    g = ct.bid(1)
    entry = ct.load(tile_entry, (tile,), (1,), check_bounds=False).item()
    b = ct.load(B_TX, (tile, g), (TILE, N))
    c = ct.load(C_TX, (tile, g), (TILE, N))
    loaded = ()
    for i in ct.static_iter(range(HEADS // BLOCK)):
        loaded += (_load_raw(dt_TH, bias_H, A_H, tile, g * (HEADS // BLOCK) + i, BLOCK),)
    if entry >= 0:
        first = ct.load(first_tile, (entry,), (1,), check_bounds=False).item()
        count = ct.load(num_tokens, (entry,), (1,), check_bounds=False).item() - (tile - first) * TILE
        for i in ct.static_iter(range(HEADS // BLOCK)):
            _store_vectors(vectors_HAVQ, loaded[i], tile, g * (HEADS // BLOCK) + i, count, low, high, BLOCK)
        ct.store(cb_RQ, (g * ct.num_tiles(B_TX, 0, (TILE, N)) + tile, 0), _product(b, c, cb_RQ.dtype))
    else:
        _store_zeros(y_TI, tile, g, HEADS, P)


def _store_zeros(y_TI, tile, g, HEADS, P):  # type: ignore[no-untyped-def]
    for h in range(HEADS):
        ct.store(y_TI, (tile, g * HEADS + h), ct.zeros((TILE, P), dtype=y_TI.dtype), allow_tma=False, check_bounds=False)


def _tile(  # type: ignore[no-untyped-def]
    tile, h, state_PN, b_QN, c_QN, D, x_TI, z_TI, cb_RQ, vectors_RQ, y_TI, G_HEADS, P, GATE
):
    """One head's outputs of one tile, and its state after it."""
    tiles = ct.num_tiles(x_TI, 0, (TILE, P))
    # Each head reads cb by an index of its own: read once for two heads, it would be converted by one warp group for both.
    cb_QQ = ct.load(cb_RQ, (h // G_HEADS * tiles + tile, 0), (TILE, TILE), latency=LATENCY).astype(ct.float32)
    vectors = ct.load(vectors_RQ, (h * tiles + tile, 0), (VECTORS, TILE), latency=LATENCY)
    decay_1Q = ct.extract(vectors, (DECAY, 0), (1, TILE))
    source_1Q = ct.extract(vectors, (SOURCE, 0), (1, TILE))
    left_1Q = ct.extract(vectors, (LEFT, 0), (1, TILE))
    share_1Q = ct.extract(vectors, (SHARE, 0), (1, TILE))
    x_PQ = ct.transpose(ct.load(x_TI, (tile, h), (TILE, P), latency=LATENCY))
    exponent_QQ = ct.minimum(decay_1Q.reshape((TILE, 1)) - source_1Q, HIGHEST_EXPONENT)
    weight_QQ = (cb_QQ * ct.exp2(exponent_QQ, flush_to_zero=True)).astype(x_TI.dtype)
    y_PQ = ct.mma(state_PN.astype(x_TI.dtype), ct.transpose(c_QN), ct.zeros((P, TILE), dtype=ct.float32))
    y_PQ = ct.mma(x_PQ, ct.transpose(weight_QQ), y_PQ * left_1Q)
    wide_PQ = x_PQ.astype(ct.float32)
    written_PQ = (wide_PQ * share_1Q).astype(x_TI.dtype)
    state_PN = ct.mma(written_PQ, b_QN, state_PN * ct.extract(vectors, (LEFT, TILE - 1), (1, 1)))
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
    vectors_RQ,
    D_H,
    ssm_RP,
    y_TI,
    first_tile,
    num_tokens,
    lane_in,
    lane_out,
    order,
    H: CI,
    G_HEADS: CI,
    HEADS: CI,
    N: CI,
    P: CI,
    GATE: CB,
):
    """The recurrence over one entry for HEADS heads of a group, which share the reads of B and C.

    x_TI, z_TI: [T, H P]; B_TX, C_TX: [T, G N], bf16 or fp16; cb_RQ: as `products` leaves it; y_TI: [T, H P], as x_TI.
    vectors_RQ: [H T / 16, 64], as `time_steps` leaves them; D_H: fp32.
    ssm_RP: [S H N, P] fp32, the table of states, read at lane_in and written at lane_out, in place.
    Grid: (H / HEADS, E), all in parallel, entries by `order`; the tiles of an entry are serial.
    """
    first_head = ct.bid(0) * HEADS
    entry = ct.load(order, (ct.bid(1),), (1,), check_bounds=False).item()
    first = ct.load(first_tile, (entry,), (1,), check_bounds=False).item()
    tiles = (ct.load(num_tokens, (entry,), (1,), check_bounds=False).item() + (TILE - 1)) // TILE
    source = ct.load(lane_in, (entry,), (1,), check_bounds=False).item()
    kept = ct.load(lane_out, (entry,), (1,), check_bounds=False).item()
    states = ()
    skips = ()
    for k in ct.static_iter(range(HEADS)):
        state_PN = ct.zeros((P, N), dtype=ct.float32)
        if source >= 0:
            # Without TMA: its staging would take the shared memory that lets the loop's loads run ahead.
            state_PN = ct.transpose(ct.load(ssm_RP, (source * H + first_head + k, 0), (N, P), allow_tma=False, check_bounds=False))
        states += (state_PN,)
        skips += (ct.load(D_H, (first_head + k,), (1,), check_bounds=False).reshape((1, 1)),)
    for tile in range(first, first + tiles):
        b_QN = ct.load(B_TX, (tile, first_head // G_HEADS), (TILE, N), latency=LATENCY)
        c_QN = ct.load(C_TX, (tile, first_head // G_HEADS), (TILE, N), latency=LATENCY)
        after = ()
        for k in ct.static_iter(range(HEADS)):
            arrays = (x_TI, z_TI, cb_RQ, vectors_RQ, y_TI)
            after += (_tile(tile, first_head + k, states[k], b_QN, c_QN, skips[k], *arrays, G_HEADS, P, GATE),)
        states = after
    if kept >= 0:
        for k in ct.static_iter(range(HEADS)):
            ct.store(ssm_RP, (kept * H + first_head + k, 0), ct.transpose(states[k]), allow_tma=False, check_bounds=False)


@ct.kernel(occupancy=2)
def span_ends(  # type: ignore[no-untyped-def]
    x_TI, B_TX, vectors_RQ, state_RP, left_KH, first_tile, wanted, H: CI, G_HEADS: CI, HEADS: CI, N: CI, P: CI, LATENCY: CI
):
    """What one span's tokens leave in the state at its end, and how much of the state before it is left there, for HEADS heads of a group.

    x_TI, B_TX, vectors_RQ: as in `scan`; state_RP: [K H N, P] fp32; left_KH: fp32; wanted: tokens, 0 where nobody needs the end.
    LATENCY: the hint of the loop's loads. Grid: (H / HEADS, K), all in parallel; the tiles of a span are serial.
    """
    first_head = ct.bid(0) * HEADS
    span = ct.bid(1)
    first = ct.load(first_tile, (span,), (1,), check_bounds=False).item()
    tiles = (ct.load(wanted, (span,), (1,), check_bounds=False).item() + (TILE - 1)) // TILE
    if tiles > 0:
        states = ()
        decays = ()
        for _ in ct.static_iter(range(HEADS)):
            states += (ct.zeros((P, N), dtype=ct.float32),)
            decays += (ct.zeros((1, 1), dtype=ct.float32),)
        for tile in range(first, first + tiles):
            b_QN = ct.load(B_TX, (tile, first_head // G_HEADS), (TILE, N), latency=LATENCY)
            after = ()
            so_far = ()
            for k in ct.static_iter(range(HEADS)):
                h = first_head + k
                vectors = ct.load(vectors_RQ, (h * ct.num_tiles(x_TI, 0, (TILE, P)) + tile, 0), (VECTORS, TILE), latency=LATENCY)
                x_PQ = ct.transpose(ct.load(x_TI, (tile, h), (TILE, P), latency=LATENCY))
                written_PQ = (x_PQ.astype(ct.float32) * ct.extract(vectors, (SHARE, 0), (1, TILE))).astype(x_TI.dtype)
                after += (ct.mma(written_PQ, b_QN, states[k] * ct.extract(vectors, (LEFT, TILE - 1), (1, 1))),)
                so_far += (decays[k] + ct.extract(vectors, (DECAY, TILE - 1), (1, 1)),)
            states = after
            decays = so_far
        for k in ct.static_iter(range(HEADS)):
            ct.store(state_RP, (span * H + first_head + k, 0), ct.transpose(states[k]), allow_tma=False, check_bounds=False)
            ct.store(left_KH, (span, first_head + k), ct.exp2(decays[k], flush_to_zero=True), allow_tma=False, check_bounds=False)


@ct.kernel(occupancy=8)
def span_starts(  # type: ignore[no-untyped-def]
    state_RP, left_KH, ssm_RP, first_span, num_spans, lane_in, lane_out, H: CI, N: CI, P: CI, ROWS: CI, SPANS: CI
):
    """Pass the state of one entry from span to span: start := S, then S := left S + end.

    state_RP: [K H N, P] fp32: ends of spans, which starts take the place of; left_KH: as `span_ends` leaves it.
    ssm_RP: [S H N, P] fp32, the table of states, read at lane_in and written at lane_out, in place.
    An entry whose final state is not kept has no end of its last span, and one that begins from zero no start of its first.
    Grid: (H N / ROWS, E), all in parallel; the spans of an entry are serial, the loads of SPANS of them are made at once.
    """
    block = ct.bid(0)
    entry = ct.bid(1)
    blocks = H * (N // ROWS)
    first = ct.load(first_span, (entry,), (1,), check_bounds=False).item()
    count = ct.load(num_spans, (entry,), (1,), check_bounds=False).item()
    source = ct.load(lane_in, (entry,), (1,), check_bounds=False).item()
    kept = ct.load(lane_out, (entry,), (1,), check_bounds=False).item()
    state = ct.zeros((ROWS, P), dtype=ct.float32)
    if source >= 0:
        state = ct.load(ssm_RP, (source * blocks + block, 0), (ROWS, P), allow_tma=False, check_bounds=False)
    stop = first + count
    if kept < 0:
        stop = stop - 1
    for span in range(first, stop, SPANS):
        ends = ()
        lefts = ()
        for k in ct.static_iter(range(SPANS)):
            # Past the last span the last is loaded again, and not used: no load is behind a branch.
            at = ct.minimum(span + k, stop - 1)
            ends += (ct.load(state_RP, (at * blocks + block, 0), (ROWS, P), allow_tma=False, check_bounds=False),)
            lefts += (ct.load(left_KH, (at, block // (N // ROWS)), (1, 1), allow_tma=False, check_bounds=False),)
        for k in ct.static_iter(range(SPANS)):
            if k == 0 or span + k < stop:
                ct.store(state_RP, ((span + k) * blocks + block, 0), state, allow_tma=False, check_bounds=False)
                state = lefts[k] * state + ends[k]
    if kept >= 0:
        ct.store(ssm_RP, (kept * blocks + block, 0), state, allow_tma=False, check_bounds=False)
    elif count > 1 or (count == 1 and source >= 0):
        ct.store(state_RP, (stop * blocks + block, 0), state, allow_tma=False, check_bounds=False)


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
    check_form(x_THP, B_TGN, C_TGN, z_THP, ssm_SHNP)
    device, s, stream = x_THP.device, segments, torch.cuda.current_stream()
    D_H, dt_bias_H = (torch.zeros(H, dtype=torch.float32, device=device) if v is None else v for v in (D_H, dt_bias_H))
    x_TI, B_TX, C_TX = x_THP.flatten(1), B_TGN.flatten(1), C_TGN.flatten(1)
    z_TI = x_TI if z_THP is None else z_THP.flatten(1)
    y_TI = torch.empty((T, H * P), dtype=x_THP.dtype, device=device)
    vectors_HAVQ = torch.empty((H, s.num_tiles, VECTORS, TILE), dtype=torch.float32, device=device)
    cb_RQ = torch.empty((G * T, TILE), dtype=torch.float16, device=device)
    if s.num_tiles:
        raw = (dt_TH, dt_bias_H, A_H, vectors_HAVQ)
        _before_scan(raw, dt_limit, B_TX, C_TX, cb_RQ, y_TI, s, {"H": H, "G": G, "P": P, "N": N})
    if s.entries:
        vectors_RQ, ssm_RP = vectors_HAVQ.view(-1, TILE), ssm_SHNP.view(-1, P)
        lanes, chains = (s.first_tile, s.num_tokens, s.lane_in, s.lane_out, s.order), s.chains
        heads = heads_a_block(H // G, P, N)
        table_RP = ssm_RP
        if s.span_tiles is not None:
            spans = cut(s)
            table_RP = _start_spans(spans, segments, x_TI, B_TX, vectors_RQ, ssm_RP, (H, H // G, N, P))
            lanes, chains = (spans.first_tile, spans.num_tokens, spans.source, spans.none, spans.slot), spans.count
        inputs = (x_TI, B_TX, C_TX, z_TI, cb_RQ, vectors_RQ, D_H)
        arguments = (*inputs, table_RP, y_TI, *lanes, H, H // G, heads, N, P, z_THP is not None)
        ct.launch(stream, (H // heads, chains), _hinted(scan, heads, P), arguments)
    return y_TI.view(T, H, P), ssm_SHNP


def _before_scan(
    raw: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dt_limit: tuple[float, float],
    B_TX: torch.Tensor,
    C_TX: torch.Tensor,
    cb_RQ: torch.Tensor,
    y_TI: torch.Tensor,
    segments: Segments,
    shape: dict[str, int],
) -> None:
    """Launch what the scan takes of each tile, in one launch or two. raw: time steps, biases, decay rates, and where vectors go."""
    (H, G, P, N), s, stream = shape.values(), segments, torch.cuda.current_stream()
    of_entries = (s.tile_entry, s.first_tile, s.num_tokens)
    if setting("ssd.prepare", **shape).sizes.get("JOINED", 0):
        block = min(HEADS_A_BLOCK, H // G & -(H // G))
        arguments = (*raw, B_TX, C_TX, cb_RQ, y_TI, *of_entries, *dt_limit, block, H // G, N, P)
        ct.launch(stream, (s.num_tiles, G), tuned(prepare, "ssd.prepare", **shape), arguments)
    else:
        block = min(HEADS_A_BLOCK, H & -H)
        several = math.gcd(H // block, setting("ssd.time_steps", **shape).sizes.get("BLOCKS", 1))
        arguments = (*raw, *of_entries, *dt_limit, block, several)
        ct.launch(stream, (s.num_tiles, H // block // several), tuned(time_steps, "ssd.time_steps", **shape), arguments)
        of_a_tile = tuned(products, "ssd.products", **shape)
        ct.launch(stream, (s.num_tiles, G), of_a_tile, (B_TX, C_TX, cb_RQ, y_TI, s.tile_entry, H // G, N, P))


def _start_spans(
    spans: Spans,
    segments: Segments,
    x_TI: torch.Tensor,
    B_TX: torch.Tensor,
    vectors_RQ: torch.Tensor,
    ssm_RP: torch.Tensor,
    sizes: tuple[int, int, int, int],
) -> torch.Tensor:
    """The table [K H N, P] of states before each span; final states of entries go to ssm_RP."""
    H, G_HEADS, N, P = sizes
    K, s, stream = spans.slot.numel(), segments, torch.cuda.current_stream()
    state_RP = torch.empty((K * H * N, P), dtype=torch.float32, device=x_TI.device)
    left_KH = torch.empty((K, H), dtype=torch.float32, device=x_TI.device)
    shape = {"H": H, "G": H // G_HEADS, "P": P, "N": N}
    sizes_ends, sizes_starts = setting("ssd.span_ends", **shape).sizes, setting("ssd.span_starts", **shape).sizes
    heads = min(sizes_ends.get("HEADS", 1), heads_a_block(G_HEADS, P, N))
    spans_of = (spans.first_tile, spans.wanted)
    arguments = (x_TI, B_TX, vectors_RQ, state_RP, left_KH, *spans_of, H, G_HEADS, heads, N, P, sizes_ends.get("LATENCY", LATENCY))
    ct.launch(stream, (H // heads, spans.count), tuned(span_ends, "ssd.span_ends", **shape), arguments)
    rows, ahead = min(sizes_starts.get("ROWS", ROWS), N), sizes_starts.get("SPANS", SPANS)
    lanes = (spans.first_span, spans.num_spans, s.lane_in, s.lane_out)
    kernel = tuned(span_starts, "ssd.span_starts", **shape)
    ct.launch(stream, (H * N // rows, s.chains), kernel, (state_RP, left_KH, ssm_RP, *lanes, H, N, P, rows, ahead))
    return state_RP


@functools.cache
def _hinted(kernel: Any, heads: int, P: int) -> Any:
    """`kernel` with the hints that fit: two blocks on an SM, or one whose two heads, or whose wide head, take it whole."""
    if heads == 2:
        return kernel
    return kernel.replace_hints(num_worker_warps=8) if P == 128 else kernel.replace_hints(occupancy=2)

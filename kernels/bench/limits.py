"""What the chip allows: the least bytes that an operator moves, or the products it makes, whichever take longer.

Constants are what one H200 was measured to do. A run measures both anew (`measure.chip`), to be read beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from longscan.kernels.layouts import Layout
from longscan.kernels.segments import TILE
from longscan.kernels.ssd.cases import Shape

BYTES_A_SECOND = 4.3e12
"""Copied, read and written ones counted alike."""
FLOPS_A_SECOND = 790e12
"""bf16, 8192 x 8192 x 8192."""


@dataclass(frozen=True, slots=True)
class Work:
    """The least that has to be done."""

    bytes: float = 0.0
    flops: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.bytes / BYTES_A_SECOND, self.flops / FLOPS_A_SECOND)

    @property
    def bound(self) -> str:
        """What takes that long."""
        return "bytes" if self.bytes / BYTES_A_SECOND >= self.flops / FLOPS_A_SECOND else "FLOPs"


def tokens_of(load: Layout) -> int:
    return sum(entry.num_tokens for entry in load.entries)


def ssd_work(shape: Shape, load: Layout) -> Work:
    """Bytes: x and y, B and C, time steps, once each in 16 bits, and the fp32 state of each entry that is read or kept.

    FLOPs: inside a tile C B^T once a group and its product with x once a head; the state's update and its reading.
    """
    H, P, G, N = shape.H, shape.P, shape.G, shape.N
    tokens = tokens_of(load)
    states = sum((entry.lane_in >= 0) + (entry.lane_out >= 0) for entry in load.entries)
    bytes_moved = tokens * (4 * H * P + 4 * G * N + 2 * H) + states * 4 * H * N * P
    return Work(bytes_moved, tokens * (G * N * (TILE + 1) + H * P * (TILE + 1) + 4 * H * P * N))


def conv1d_work(channels: int, tokens: int) -> Work:
    """Inputs read and outputs written once in 16 bits. Tails are a few rows a document."""
    return Work(4 * channels * tokens)


def gated_norm_work(inner: int, tokens: int) -> Work:
    """x, z and y in 16 bits."""
    return Work(6 * inner * tokens)


def residual_norm_work(width: int, tokens: int) -> Work:
    """x and y in 16 bits, the residual stream read and written in fp32."""
    return Work(12 * width * tokens)


def stream_norm_work(width: int, tokens: int) -> Work:
    """The residual stream read in fp32, y written in 16 bits: the product before it has added to the stream."""
    return Work(6 * width * tokens)


def logprob_work(width: int, vocabulary: int, tokens: int) -> Work:
    """The product of hidden states and output projection; their bytes, once."""
    return Work(2 * width * (tokens + vocabulary) + 8 * tokens, 2 * tokens * width * vocabulary)


def pool_work(width: int, tokens: int) -> Work:
    """One read of the hidden states in 16 bits."""
    return Work(2 * width * tokens)


def product_work(rows: int, inner: int, columns: int, *, add: bool = False) -> Work:
    """[rows, inner] @ [inner, columns] in 16 bits; with add onto fp32, which is read and written."""
    out_bytes = 8 if add else 2
    return Work(2 * (rows * inner + inner * columns) + out_bytes * rows * columns, 2 * rows * inner * columns)

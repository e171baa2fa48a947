"""The product by cuBLASLt with a tile of our own choice: what cuBLAS takes of itself is not always the fastest that it has.

At mamba2-130m's shape the product that is added to the stream takes 0.268 ms with cuBLAS's own choice (256 x 128, one block on an
SM, which waits while it reads and writes the stream) and 0.224 with tiles of 128 x 128, two of which share an SM. PyTorch leaves no
choice, so this speaks to the library that PyTorch has loaded, through its C interface (cublasLt.h of CUDA 12 and 13).

The tile comes from the tuning table, by shape and architecture, and the first that cuBLAS proposes with it is taken: so every
worker with such a GPU and the same cuBLAS takes the same, and its bits are the same. Where there is none, PyTorch's product runs.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from longscan.kernels.tuning import setting

log = logging.getLogger(__name__)

TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""cudaDataType_t"""
COMPUTE_FP32 = 68
"""cublasComputeType_t: products of 16-bit numbers, summed in fp32."""
TRANSPOSE_A, TILE = 3, 1
"""Attributes of cublasLtMatmulDesc_t and of an algorithm's configuration."""
PROPOSALS = 64
SUCCESS, ALLOC_FAILED, NOT_SUPPORTED = 0, 3, 15
"""cublasStatus_t"""
ALIGNED_TO = 256
"""Bytes: what proposals take for granted of every operand's address, unless told otherwise."""


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t"""

    _fields_ = (("data", c_uint64 * 8),)


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (("algorithm", _Algorithm), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4))


@dataclass(frozen=True, slots=True)
class _Shape:
    """All that proposals depend on."""

    device: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    rows: int
    inner: int
    columns: int
    x_stride: int
    out_stride: int
    add: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """One product, ready to be launched on any operands of its shape."""

    library: Any
    handle: c_void_p
    operation: c_void_p
    weight: c_void_p
    x: c_void_p
    out: c_void_p
    algorithm: _Algorithm
    beta: c_float

    def launch(self, x_TK: torch.Tensor, weight_NK: torch.Tensor, out_TN: torch.Tensor) -> None:
        """cuBLAS counts columns first: out^T [N, T] = weight [K, N]^T x^T [K, T]. It needs no memory beside the operands."""
        weight, x, out = (c_void_p(tensor.data_ptr()) for tensor in (weight_NK, x_TK, out_TN))
        operands = (byref(c_float(1.0)), weight, self.weight, x, self.x, byref(self.beta), out, self.out, out, self.out)
        stream = c_void_p(torch.cuda.current_stream(x_TK.device).cuda_stream)
        _check(self.library.cublasLtMatmul(self.handle, self.operation, *operands, byref(self.algorithm), None, c_size_t(0), stream))


def product(x_TK: torch.Tensor, weight_NK: torch.Tensor, *, out_TN: torch.Tensor, add: bool) -> bool:
    """As `longscan.kernels.product.product`, without a bias. Returns whether it was made: not where there is no such tile for it.

    Raises RuntimeError where cuBLAS does not launch what it has proposed.
    """
    (T, K), N, tile = x_TK.shape, len(weight_NK), wanted(weight_NK, add=add)
    if tile is None or x_TK.dtype not in TYPES or not T:
        return False
    # Offsets of a step's rows and of weights are multiples of it; whoever asks for others gets PyTorch's product.
    dense = weight_NK.is_contiguous() and x_TK.stride(1) == out_TN.stride(1) == 1
    if not dense or any(tensor.data_ptr() % ALIGNED_TO for tensor in (x_TK, weight_NK, out_TN)):
        return False
    strides = (x_TK.stride(0), out_TN.stride(0))
    plan = _plan(_Shape(x_TK.get_device(), x_TK.dtype, out_TN.dtype, T, K, N, *strides, add), tile)
    if plan is None:
        return False
    plan.launch(x_TK, weight_NK, out_TN)
    return True


def wanted(weight_NK: torch.Tensor, *, add: bool) -> int | None:
    """The tile that the tuning table names for this GPU, as cublasLtMatmulTile_t counts them."""
    N, K = weight_NK.shape
    return setting("product.add" if add else "product.project", N=N, K=K).sizes.get("TILE")


@functools.cache
def _plan(shape: _Shape, tile: int) -> _Plan | None:
    """The first proposal with this tile; None, and a line in the log, where there is none."""
    library = _library()
    if library is None:
        return None
    handle, operation = _handle(library, shape.device), c_void_p()
    _check(library.cublasLtMatmulDescCreate(byref(operation), COMPUTE_FP32, TYPES[torch.float32]))
    yes = c_int(1)
    _check(library.cublasLtMatmulDescSetAttribute(operation, TRANSPOSE_A, byref(yes), c_size_t(ctypes.sizeof(yes))))
    weight = _layout(library, shape.dtype, shape.inner, shape.columns, shape.inner)
    x = _layout(library, shape.dtype, shape.inner, shape.rows, shape.x_stride)
    out = _layout(library, shape.out_dtype, shape.columns, shape.rows, shape.out_stride)
    for proposal in _proposals(library, handle, operation, (weight, x, out, out)):
        if _tile(library, proposal.algorithm) == tile:
            beta = c_float(1.0 if shape.add else 0.0)
            return _Plan(library, handle, operation, weight, x, out, proposal.algorithm, beta)
    sides = f"[{shape.rows}, {shape.inner}] @ [{shape.inner}, {shape.columns}]"
    log.info("cuBLAS proposes no tile %d for %s: PyTorch's product is taken", tile, sides)
    return None


def _proposals(library: Any, handle: c_void_p, operation: c_void_p, layouts: tuple[c_void_p, ...]) -> list[_Proposal]:
    """Best first, as cuBLAS thinks; none that would need memory beside the operands, and none at all where it knows of no such product."""
    preference, found, count = c_void_p(), (_Proposal * PROPOSALS)(), c_int()
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    rest = (preference, PROPOSALS, found, byref(count))
    status = library.cublasLtMatmulAlgoGetHeuristic(handle, operation, *layouts, *rest)
    _check(library.cublasLtMatmulPreferenceDestroy(preference))
    if status == NOT_SUPPORTED:
        return []
    _check(status)
    # Of one whose own state is another, nothing else holds.
    return [proposal for proposal in found[: count.value] if proposal.state == SUCCESS]


def _tile(library: Any, algorithm: _Algorithm) -> int:
    tile, written = c_int(), c_size_t()
    size = c_size_t(ctypes.sizeof(tile))
    _check(library.cublasLtMatmulAlgoConfigGetAttribute(byref(algorithm), TILE, byref(tile), size, byref(written)))
    return tile.value


def _layout(library: Any, dtype: torch.dtype, rows: int, columns: int, stride: int) -> c_void_p:
    """Of a matrix whose columns are `stride` elements apart."""
    layout = c_void_p()
    _check(library.cublasLtMatrixLayoutCreate(byref(layout), TYPES[dtype], c_uint64(rows), c_uint64(columns), c_int64(stride)))
    return layout


@functools.cache
def _handle(library: Any, device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(library.cublasLtCreate(byref(handle)))
    return handle


@functools.cache
def _library() -> Any:
    """The cuBLASLt that PyTorch has loaded; None, and a line in the log, where there is none by its name."""
    name = f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        log.warning("%s cannot be asked for tiles (%s): products are PyTorch's, some slower, and with other last bits", name, error)
        return None


def _check(status: int) -> None:
    if status != SUCCESS:
        # By the name that PyTorch tells: so it is known that memory is short, and the step is run again with less of it.
        name = "CUBLAS_STATUS_ALLOC_FAILED" if status == ALLOC_FAILED else "cublasStatus_t"
        raise RuntimeError(f"cuBLASLt: expected status {SUCCESS}, got {status} ({name})")

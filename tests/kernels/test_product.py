"""A layer's products: what they compute, whom cuBLAS is asked as, and on a GPU that every tile is right and stays within its rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from longscan.kernels import tuning
from longscan.kernels.bench.case import relative_error
from longscan.kernels.bench.tune import TILES
from longscan.kernels.product import cublas, product
from longscan.kernels.product.cases import Inputs, Shape, make
from longscan.kernels.tuning import Setting
from longscan.pipeline.engine.memory import is_out_of_memory

INTO = Shape("into", 48, 40, 64)
ONTO = Shape("onto", 48, 40, 40, add=True)
NAMES = {False: "product.project", True: "product.add"}
BIASED = (None, 0.5)


@pytest.mark.parametrize("bias", BIASED)
@pytest.mark.parametrize("shape", [INTO, ONTO], ids=lambda shape: shape.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_the_product(shape: Shape, dtype: torch.dtype, bias: float | None) -> None:
    inputs = make(shape, 128, dtype=dtype, device="cpu")
    out = inputs.out_TN.double() if dtype == torch.float64 else inputs.out_TN
    truth = inputs.x_TK.double() @ inputs.weight_NK.double().T + (bias or 0.0)
    truth = out.double() + truth if shape.add else truth
    bias_N = None if bias is None else torch.full((shape.columns,), bias, dtype=dtype)
    product(inputs.x_TK, inputs.weight_NK, bias_N, out_TN=out, add=shape.add, backend="torch")
    bound = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-3}[dtype]
    assert relative_error(out, truth) < bound


def test_what_lies_between_the_rows_is_not_touched() -> None:
    inputs = make(INTO, 64, dtype=torch.float32, device="cpu")
    whole = inputs.out_TN.as_strided((64, INTO.pitch), (INTO.pitch, 1))
    product(inputs.x_TK, inputs.weight_NK, out_TN=inputs.out_TN, backend="torch")
    assert not whole[:, : INTO.columns].isnan().any()
    assert whole[:, INTO.columns :].isnan().all()


WRONG = (
    ("x", {"x_TK": torch.zeros(64)}, r"x_TK: expected 2 axes \[T, K\], got shape \[64\]"),
    ("inner", {"weight_NK": torch.zeros(40, 47)}, r"weight_NK: expected shape \[40, 48\], got \[40, 47\]"),
    ("dtype", {"weight_NK": torch.zeros(40, 48).half()}, r"weight_NK: expected dtype torch.float32, got torch.float16"),
    ("rows", {"out_TN": torch.zeros(63, 40)}, r"out_TN: expected shape \[64, 40\], got \[63, 40\]"),
    ("rounded", {"out_TN": torch.zeros(64, 40).half()}, r"out_TN: expected dtype torch.float32, got torch.float16"),
    ("bias", {"bias_N": torch.zeros(41)}, r"bias_N: expected shape \[40\], got \[41\]"),
    ("no_gpu", {"backend": "cutile"}, "backend: expected 'torch' for tensors on cpu, got 'cutile'"),
)


@pytest.mark.parametrize(("changed", "message"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x_TK": torch.zeros(64, 48),
        "weight_NK": torch.zeros(40, 48),
        "out_TN": torch.zeros(64, 40),
        "backend": "torch",
    }
    with pytest.raises(ValueError, match=message):
        product(**{**arguments, **changed})


class Library:  # its methods are named as the library's functions
    """cuBLASLt as its documentation has it, over memory of the host: columns first, fp32. It proposes `tiles`, in this order."""

    def __init__(self, tiles: tuple[int, ...]) -> None:
        self.tiles = tiles
        self.asked = 0
        self.used: list[int] = []
        self._known: list[Any] = []

    def _new(self, reference: Any, thing: Any) -> int:
        self._known.append(thing)
        reference._obj.value = len(self._known)
        return 0

    def _of(self, handle: ctypes.c_void_p) -> Any:
        assert handle.value is not None
        return self._known[handle.value - 1]

    def cublasLtMatmulDescCreate(self, reference: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._new(reference, {})

    def cublasLtMatmulDescSetAttribute(self, operation: Any, attribute: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self._of(operation)[attribute] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, reference: Any, kind: int, rows: Any, columns: Any, stride: Any) -> int:
        assert kind == 0, "fp32"
        return self._new(reference, (rows.value, columns.value, stride.value))

    def cublasLtMatmulPreferenceCreate(self, reference: Any) -> int:
        return self._new(reference, "no memory beside the operands")

    def cublasLtMatmulPreferenceDestroy(self, preference: Any) -> int:
        assert self._of(preference)
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        most, found, count = arguments[-3:]
        self.asked += 1
        for proposal, tile in zip(found, self.tiles[:most], strict=False):
            proposal.algorithm.data[0] = tile
        count._obj.value = min(most, len(self.tiles))
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm: Any, attribute: int, value: Any, size: Any, written: Any) -> int:
        assert attribute == 1
        value._obj.value, written._obj.value = algorithm._obj.data[0], size.value
        return 0

    def cublasLtMatmul(self, _: Any, operation: Any, alpha: Any, *arguments: Any) -> int:
        a, of_a, b, of_b, beta, c, _, d, of_d, algorithm, workspace, size, _ = arguments
        assert self._of(operation) == {3: 1}, "A transposed, B as it is"
        assert c.value == d.value
        assert workspace is None
        assert size.value == 0
        result = self._matrix(d, of_d)
        made = alpha._obj.value * self._matrix(a, of_a).T @ self._matrix(b, of_b)
        result[:] = made + beta._obj.value * result if beta._obj.value else made
        self.used.append(algorithm._obj.data[0])
        return 0

    def _matrix(self, address: Any, layout: Any) -> Any:
        rows, columns, stride = self._of(layout)
        numbers = np.ctypeslib.as_array((ctypes.c_float * (stride * (columns - 1) + rows)).from_address(address.value))
        return np.lib.stride_tricks.as_strided(numbers, (rows, columns), (4, 4 * stride))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    fake = Library((128, 20, 29, 20))
    monkeypatch.setattr(cublas, "_library", lambda: fake)
    monkeypatch.setattr(cublas, "_handle", lambda *_: ctypes.c_void_p(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=7))
    cublas._plan.cache_clear()
    yield fake
    cublas._plan.cache_clear()


def aligned(shape: Shape, rows: int) -> Inputs:
    """Operands that begin where those of a GPU's allocator do."""

    def put(tensor: torch.Tensor, pitch: int) -> torch.Tensor:
        memory = torch.full((len(tensor) * pitch + 64,), torch.nan)
        first = -memory.data_ptr() % cublas.ALIGNED_TO // 4
        placed = memory[first : first + len(tensor) * pitch].view(len(tensor), pitch)[:, : tensor.shape[1]]
        return placed.copy_(tensor)

    found = make(shape, rows, dtype=torch.float32, device="cpu")
    return Inputs(put(found.x_TK, shape.inner), put(found.weight_NK, shape.inner), put(found.out_TN, shape.pitch))


@pytest.mark.parametrize("shape", [INTO, ONTO], ids=lambda shape: shape.name)
def test_cublas_is_asked_for_the_product_with_the_tile_of_the_table(shape: Shape, library: Library) -> None:
    for tile in (20, 29):
        inputs = aligned(shape, 64)
        truth = inputs.truth(add=shape.add)
        with tuning.trying(NAMES[shape.add], Setting({}, {"TILE": tile})):
            before = inputs.out_TN.clone()
            for _ in range(2):
                inputs.out_TN.copy_(before)
                assert cublas.product(inputs.x_TK, inputs.weight_NK, out_TN=inputs.out_TN, add=shape.add)
                assert relative_error(inputs.out_TN, truth) < 1e-6
    assert library.used == [20, 20, 29, 29]
    assert library.asked == 2, "once a shape and tile"


def test_what_cublas_does_not_propose_or_cannot_take_is_left_to_pytorch(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "longscan")
    inputs = aligned(INTO, 64)

    def made(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: int = 20) -> bool:
        with tuning.trying(NAMES[False], Setting({}, {"TILE": tile})):
            return cublas.product(x, weight, out_TN=out, add=False)

    x, weight, out = inputs.x_TK, inputs.weight_NK, inputs.out_TN
    assert not cublas.product(x, weight, out_TN=out, add=False), "no tile in the table"
    assert not made(x, weight, out, tile=31)
    assert "no tile 31 for [64, 48] @ [48, 40]" in caplog.text
    assert not made(x[1:], weight, out[1:]), "not aligned"
    assert not made(x.T.contiguous().T, weight, out)
    assert not made(x, weight.T.contiguous().T, out)
    assert not made(x[:0], weight, out[:0])
    assert not made(x.double(), weight.double(), out.double())
    assert not library.used
    assert made(x, weight, out)


def test_what_cublas_answers_is_told(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cublasLtMatmul", lambda *_: 15)
    inputs = aligned(INTO, 64)
    with tuning.trying(NAMES[False], Setting({}, {"TILE": 20})), pytest.raises(RuntimeError, match="expected status 0, got 15"):
        cublas.product(inputs.x_TK, inputs.weight_NK, out_TN=inputs.out_TN, add=False)


def test_a_lack_of_memory_is_known_as_one(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cublasLtMatmulDescCreate", lambda *_: 3)
    inputs = aligned(INTO, 64)
    with tuning.trying(NAMES[False], Setting({}, {"TILE": 20})), pytest.raises(RuntimeError, match="got 3") as raised:
        cublas.product(inputs.x_TK, inputs.weight_NK, out_TN=inputs.out_TN, add=False)
    assert is_out_of_memory(raised.value)


def test_no_proposal_that_cublas_takes_back_is_launched(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it proposes holds only where the proposal's own state says so."""
    propose = library.cublasLtMatmulAlgoGetHeuristic

    def taking_back(*arguments: Any) -> int:
        status = propose(*arguments)
        arguments[-2][1].state = 15
        arguments[-2][1].algorithm.data[1] = 666
        return status

    launched = library.cublasLtMatmul

    def launch(*arguments: Any) -> int:
        assert arguments[-4]._obj.data[1] != 666
        return launched(*arguments)

    monkeypatch.setattr(library, "cublasLtMatmulAlgoGetHeuristic", taking_back)
    monkeypatch.setattr(library, "cublasLtMatmul", launch)
    inputs = aligned(INTO, 64)
    with tuning.trying(NAMES[False], Setting({}, {"TILE": 20})):
        assert cublas.product(inputs.x_TK, inputs.weight_NK, out_TN=inputs.out_TN, add=False)
    assert library.used == [20], "the second of its proposals with this tile"


def test_a_product_that_cublas_knows_nothing_of_is_pytorchs(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cublasLtMatmulAlgoGetHeuristic", lambda *_: 15)
    inputs = aligned(INTO, 64)
    with tuning.trying(NAMES[False], Setting({}, {"TILE": 20})):
        assert not cublas.product(inputs.x_TK, inputs.weight_NK, out_TN=inputs.out_TN, add=False)


def test_without_the_library_products_are_pytorchs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "longscan")
    monkeypatch.setattr(torch.version, "cuda", "0.1")
    cublas._library.cache_clear()
    cublas._plan.cache_clear()
    inputs = aligned(INTO, 64)
    with tuning.trying(NAMES[False], Setting({}, {"TILE": 20})):
        assert not cublas.product(inputs.x_TK, inputs.weight_NK, out_TN=inputs.out_TN, add=False)
    cublas._library.cache_clear()
    assert "libcublasLt.so.0 cannot be asked for tiles" in caplog.text


def test_structures_are_as_long_as_cublas_has_them() -> None:
    assert ctypes.sizeof(cublas._Algorithm) == 64
    assert ctypes.sizeof(cublas._Proposal) == 96


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("add", [False, True])
def test_every_tile_is_right_on_a_gpu(dtype: torch.dtype, add: bool) -> None:
    """With NaN around each row of the output, which stays there; twice the same bits."""
    shape = Shape("", 1536, 768, 832, add)
    taken = []
    for tile in TILES:
        inputs = make(shape, 4160, dtype=dtype, device="cuda")
        whole = inputs.out_TN.as_strided((4160, shape.pitch), (shape.pitch, 1))
        whole[:, shape.columns :] = torch.nan
        truth, before = inputs.truth(add=add), inputs.out_TN.clone()
        with tuning.trying(NAMES[add], Setting({}, {"TILE": tile})):
            if not cublas.product(inputs.x_TK, inputs.weight_NK, out_TN=inputs.out_TN, add=add):
                continue
            taken.append(tile)
            first = inputs.out_TN.clone()
            assert relative_error(first, truth) < (1e-5 if add else 3e-3), tile
            assert whole[:, shape.columns :].isnan().all(), tile
            inputs.out_TN.copy_(before)
            product(inputs.x_TK, inputs.weight_NK, out_TN=inputs.out_TN, add=add, backend="cutile")
            assert torch.equal(inputs.out_TN, first), tile
    assert len(taken) > 1, "cuBLAS proposes several"


@pytest.mark.gpu
def test_the_tables_tiles_are_proposed_at_the_models_shapes() -> None:
    """Else the table says what this cuBLAS does not have, and is to be made anew."""
    from longscan.kernels.product.cases import MODELS

    named = [shape for shape in MODELS if tuning.setting(NAMES[shape.add], N=shape.columns, K=shape.inner).sizes]
    for shape in named:
        inputs = make(shape, 90_112, dtype=torch.bfloat16, device="cuda")
        assert cublas.product(inputs.x_TK, inputs.weight_NK, out_TN=inputs.out_TN, add=shape.add), shape
    assert named or tuning.architecture() != "sm_90"


@pytest.mark.gpu
def test_a_product_can_be_recorded_in_a_graph() -> None:
    """As the engine's steps are: launched once, then recorded in another stream, then replayed on other numbers in the same memory."""
    inputs = make(Shape("", 1536, 768, 768, add=True), 4096, dtype=torch.bfloat16, device="cuda")
    x, weight, out = inputs.x_TK, inputs.weight_NK, inputs.out_TN

    def made(tile: int) -> bool:
        with tuning.trying("product.add", Setting({}, {"TILE": tile})):
            return cublas.product(x, weight, out_TN=out, add=True)

    tile = next(tile for tile in range(1, 1000) if made(tile))
    before, graph, stream = out.clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with tuning.trying("product.add", Setting({}, {"TILE": tile})):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            assert cublas.product(x, weight, out_TN=out, add=True)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        x.copy_(x.flip(0))
        out.copy_(before)
        graph.replay()
        replayed = out.clone()
        out.copy_(before)
        assert cublas.product(x, weight, out_TN=out, add=True)
    assert torch.equal(replayed, out)
    assert not torch.equal(replayed, before)

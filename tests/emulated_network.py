"""A network on the CUDA Tile kernels' very source, over the emulator, and its steps recorded there as a CUDA graph records them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from emulator import runtime
from longscan.kernels.product import reference
from longscan.pipeline.engine import graphs
from longscan.pipeline.model import mamba2
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OPERATORS = {"ssd": "ssd", "causal_conv1d": "conv1d", "rms_norm": "norm", "gated_rms_norm": "norm"}
Launch = Callable[..., None]


def put_on_emulator(patch: pytest.MonkeyPatch) -> None:
    """The network's operators are those of kernels/*/cutile.py over the emulator from now on."""
    modules = {folder: runtime.load(folder) for folder in set(OPERATORS.values())}
    for module in modules.values():
        patch.setattr(module.ct, "launch", partial(_launch, module.ct.launch))
    patch.setattr(mamba2, "product", partial(_without_backend, reference.product))
    for name, folder in OPERATORS.items():
        patch.setattr(mamba2, name, _front(name, partial(_without_backend, getattr(modules[folder], name))))


def _without_backend(operator: Any, *operands: Any, **arguments: Any) -> Any:
    """An operator's CUDA Tile form with what its front door would hand on."""
    del arguments["backend"]
    return operator(*operands, **arguments)


def _front(name: str, operator: Any) -> Any:
    if name == "ssd":
        return lambda x, dt, A, B, C, z_THP=None, **rest: operator(x_THP=x, dt_TH=dt, A_H=A, B_TGN=B, C_TGN=C, z_THP=z_THP, **rest)
    if name == "causal_conv1d":
        return lambda x, weight, bias, activation="silu", **rest: operator(
            x_TC=x, weight_CK=weight, bias_C=bias, activation=activation, **rest
        )
    if name == "rms_norm":
        return lambda x, weight, **rest: operator(x_TD=x, weight_D=weight, residual_TD=None, **rest)
    return lambda x, z, weight, **rest: operator(x_TI=x, z_TI=z, weight_I=weight, **rest)


def _launch(launch: Launch, *arguments: Any) -> None:
    """A launch, or a note of it where it is recorded: states are as they were then."""
    if Graph.recording is None:
        launch(*arguments)
    else:
        Graph.recording.calls.append(partial(launch, *arguments))


class Graph(TorchDispatchMode):
    """Records what is done between `capture_begin` and `capture_end`, to be done on the same memory: as torch.cuda.CUDAGraph."""

    recording: Graph | None = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def capture_begin(self, **_: Any) -> None:
        Graph.recording = self
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        Graph.recording = None

    def replay(self) -> None:
        for call in self.calls:
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls.append(partial(_again, func, args, kwargs or {}, result))
        return result


def _again(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Once more, into the tensors of the first time."""
    for before, now in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
        assert isinstance(before, torch.Tensor), f"{func}: the host would wait for it"
        if before.data_ptr() != now.data_ptr():
            before.copy_(now)


class _Cuda:
    """Of torch.cuda what `graphs` asks for, on a machine without a GPU: one stream, and memory that nobody counts."""

    CUDAGraph = Graph

    class Stream:
        def __init__(self, _: object = None) -> None:
            pass

        def wait_stream(self, _: object) -> None:
            pass

    current_stream = Stream

    def stream(self, _: object) -> AbstractContextManager[None]:
        return nullcontext()

    def graph_pool_handle(self) -> object:
        return object()

    def empty_cache(self) -> None:
        pass


class _Torch:
    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def record_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """`graphs` records and replays on a CPU from now on."""
    patch.setattr(graphs, "torch", _Torch())

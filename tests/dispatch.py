"""What an operator asks of PyTorch: how many operations, and how large their results are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """While entered, counts operations, and the bytes of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.largest: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.largest[storage.data_ptr()] = storage.nbytes()
        return result

    def largest_besides(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the largest storage that is none of `tensors`'."""
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return max(size for pointer, size in self.largest.items() if pointer not in known)

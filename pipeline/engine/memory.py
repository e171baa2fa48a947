"""Memory that is short: how torch says so, and what gives some back."""

from __future__ import annotations

import gc

import torch

SAYINGS = ("out of memory", "can't allocate", "cannot allocate", "failed to allocate", "CUBLAS_STATUS_ALLOC_FAILED")
"""Of errors that have no type of their own: a CPU's allocator, a library on the GPU."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that there is no memory for what was asked."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in SAYINGS)


def drop_caches() -> None:
    """Give back what is held and not used. Call it behind an `except`: in it, the error holds what its frames had."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def in_a_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error) or type(error).__name__).splitlines()[0]

"""What the benchmark needs of a machine, told in words where it is not there."""

from __future__ import annotations

import importlib.util

import torch
from longscan.kernels.cache import use_cache
from longscan.kernels.compile import missing_tools
from longscan.pipeline.errors import ConfigError


def require_gpu(what: str) -> None:
    """Settle where compiled kernels are kept. Raise ConfigError where `what` cannot be measured: no GPU, or no CUDA Tile."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{what}: expected an NVIDIA GPU that torch can use, found none; `longscan-bench compile` needs no GPU")
    _require_tile(what)


def require_compiler() -> None:
    """Settle where compiled kernels are kept. Raise ConfigError where kernels cannot be compiled, or what became of them cannot be read."""
    _require_tile("compile")
    missing = missing_tools()
    if missing:
        packages = " ".join(f"nvidia-cuda-{name}" for name in missing)
        raise ConfigError(f"compile: expected {' and '.join(missing)} to read machine code with, found neither; pip install {packages}")


def _require_tile(what: str) -> None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.tile") is None:
        raise ConfigError(f"{what}: expected the package cuda-tile, which is not installed (it is only on Linux); pip install cuda-tile")
    use_cache()

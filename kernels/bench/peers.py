"""Other implementations, imported when they are timed and never needed otherwise: mamba_ssm and fla-core, both Triton.

`pip install mamba-ssm` with MAMBA_SKIP_CUDA_BUILD=TRUE, and `pip install fla-core`, give pure Python. The package mamba_ssm imports its
CUDA extensions as soon as it is imported, so its Triton modules are imported from beside its `__init__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


def mamba_ssm(module: str) -> Any:
    """`mamba_ssm.ops.triton.<module>`. Raises ImportError where it, or what it needs, is not installed."""
    if "mamba_ssm" not in sys.modules:
        spec = importlib.util.find_spec("mamba_ssm")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("No module named 'mamba_ssm'", name="mamba_ssm")
        package = ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules["mamba_ssm"] = package
    return importlib.import_module(f"mamba_ssm.ops.triton.{module}")


def fla(module: str) -> Any:
    """`fla.modules.<module>`. Raises ImportError where it, or what it needs, is not installed."""
    return importlib.import_module(f"fla.modules.{module}")

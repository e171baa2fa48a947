"""The model: a checkpoint's folder in, a Mamba-2 that takes packed steps out."""

from __future__ import annotations

from pathlib import Path

import torch
from longscan.kernels.cache import use_cache
from longscan.kernels.checks import Backend
from longscan.pipeline.model.config import Mamba2Geometry
from longscan.pipeline.model.formats import AUTO, read_geometry
from longscan.pipeline.model.mamba2 import Mamba2, ModelState
from longscan.pipeline.model.weights import check_weights, load_weights, model_hash

__all__ = ["Mamba2", "Mamba2Geometry", "ModelState", "check_weights", "load_model", "model_hash", "read_geometry"]


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: Backend,
    row_block: int | None = None,
    format: str = AUTO,
    decay_scale: float = 1.0,
) -> Mamba2:
    """Load the checkpoint in `folder`. Raises ModelError where longscan cannot run it, with what was found and what to do.

    dtype, device, backend, row_block, decay_scale: as `Mamba2` takes them. format: the checkpoint's; auto: by what the folder holds.
    On cutile it is settled first where this process keeps compiled kernels.
    """
    if backend == "cutile":
        use_cache()
    geometry = read_geometry(folder, format=format)
    weights = load_weights(folder, geometry, device=device, dtype=dtype, format=format)
    return Mamba2(geometry, weights, device=device, dtype=dtype, backend=backend, row_block=row_block, decay_scale=decay_scale)

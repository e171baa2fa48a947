"""From the pooled sums of the pool operator to the vectors that are written: truncate, then normalise, then narrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from longscan.pipeline.config import EmbeddingConfig
from longscan.pipeline.errors import ConfigError, DocumentError
from longscan.pipeline.records import Vector


def check_width(embedding: EmbeddingConfig, width: int) -> None:
    """Raise ConfigError where the model's `width` is less than the dimensions asked for."""
    if embedding.truncate_dim is not None and not 1 <= embedding.truncate_dim <= width:
        raise ConfigError(f"task.embedding.truncate_dim: expected 1 to {width}, the width of the model, got {embedding.truncate_dim}")


def finish_vectors(pooled_WD: npt.NDArray[np.floating[Any]], embedding: EmbeddingConfig) -> Vector:
    """Vectors as they are written, [W, truncate_dim or D], from pooled hidden states [W, D], fp32 or float64.

    Each row's bits depend on that row alone. The arithmetic is in float64 and rounds once; the zero vector stays zero.
    """
    vectors_WN = np.array(pooled_WD[:, : embedding.truncate_dim], dtype=np.float64, order="C")
    if embedding.normalize:
        lengths_W = np.sqrt(np.square(vectors_WN).sum(axis=1))
        vectors_WN /= np.where(lengths_W > 0, lengths_W, 1.0)[:, None]
    if embedding.dtype == "float32":
        return vectors_WN.astype(np.float32)
    with np.errstate(over="ignore"):  # check_range speaks of it, to the document's own row
        return vectors_WN.astype(np.float16)


def check_range(vectors: Vector) -> None:
    """Raise DocumentError where a float16 vector holds an infinity: a value was too large, and nothing is cut in silence."""
    if vectors.dtype == np.float16 and np.isinf(vectors).any():
        raise DocumentError(
            "engine",
            "the vector does not fit float16: expected values up to 65504, found larger ones; "
            "set task.embedding.normalize=true or task.embedding.dtype=float32",
        )

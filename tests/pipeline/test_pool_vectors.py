"""Truncate, then normalise, then narrow; a row's bits are its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from longscan.pipeline.config import EmbeddingConfig
from longscan.pipeline.engine.pool import check_range, check_width, finish_vectors
from longscan.pipeline.errors import ConfigError, DocumentError

FINITE = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


def vectors(rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(rows * 1000 + width).standard_normal((rows, width)).astype(np.float32)


def test_as_the_operator_gave_them() -> None:
    raw = vectors(3, 5)
    finished = finish_vectors(raw, EmbeddingConfig(normalize=False))
    assert finished.dtype == np.float32
    assert np.array_equal(finished, raw)
    assert not np.shares_memory(finished, raw), "the operator's buffer may be used again"


def test_normalised_after_truncation() -> None:
    finished = finish_vectors(np.array([[3.0, 4.0, 100.0]], dtype=np.float32), EmbeddingConfig(truncate_dim=2))
    assert np.array_equal(finished, np.array([[0.6, 0.8]], dtype=np.float32))


@given(hnp.arrays(np.float32, (4, 7), elements=FINITE))
def test_lengths_are_one_however_large_or_small(raw: np.ndarray) -> None:
    lengths = np.linalg.norm(finish_vectors(raw, EmbeddingConfig()).astype(np.float64), axis=1)
    assert np.allclose(lengths[np.any(raw != 0, axis=1)], 1.0, atol=1e-6)


def test_the_zero_vector_stays_zero() -> None:
    assert not finish_vectors(np.zeros((2, 4), dtype=np.float32), EmbeddingConfig()).any()


def test_float16_is_rounded_once_from_float64() -> None:
    raw = vectors(6, 33)
    finished = finish_vectors(raw, EmbeddingConfig(dtype="float16"))
    exact = raw.astype(np.float64)
    exact /= np.sqrt((exact**2).sum(axis=1))[:, None]
    assert finished.dtype == np.float16
    assert np.array_equal(finished, exact.astype(np.float16))


@pytest.mark.parametrize("width", [1, 2, 3, 8, 64, 127, 768, 4096])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_row_has_the_same_bits_alone_and_in_company(width: int, dtype: str) -> None:
    raw = vectors(37, width)
    embedding = EmbeddingConfig(dtype=dtype, truncate_dim=max(1, width - 1))
    together = finish_vectors(raw, embedding)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 20), slice(36, 37)):
        assert finish_vectors(raw[rows], embedding).tobytes() == together[rows].tobytes()


def test_no_rows() -> None:
    assert finish_vectors(np.zeros((0, 8), dtype=np.float32), EmbeddingConfig(truncate_dim=3)).shape == (0, 3)


def test_what_float16_cannot_hold_is_an_error_and_not_an_infinity() -> None:
    embedding = EmbeddingConfig(normalize=False, dtype="float16")
    check_range(finish_vectors(np.array([[65504.0, -65504.0]], dtype=np.float32), embedding))
    with pytest.raises(DocumentError, match="float16"):
        check_range(finish_vectors(np.array([[1.0, 65520.0]], dtype=np.float32), embedding))


@pytest.mark.parametrize("truncate_dim", [0, 9])
def test_a_vector_is_not_cut_beyond_its_width(truncate_dim: int) -> None:
    with pytest.raises(ConfigError, match=r"task\.embedding\.truncate_dim: expected 1 to 8"):
        check_width(EmbeddingConfig(truncate_dim=truncate_dim), 8)
    check_width(EmbeddingConfig(truncate_dim=8), 8)
    check_width(EmbeddingConfig(), 8)

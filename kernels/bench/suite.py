"""Which cases there are: every operator at the shapes of the models that people run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from longscan.kernels.bench import conv1d, logprob, norm, pool, product, ssd
from longscan.kernels.bench.case import Case
from longscan.kernels.conv1d import cases as conv1d_cases
from longscan.kernels.logprob import cases as logprob_cases
from longscan.kernels.norm import cases as norm_cases
from longscan.kernels.pool import cases as pool_cases
from longscan.kernels.product import cases as product_cases
from longscan.kernels.ssd import cases as ssd_cases

MODELS = {"130m": "mamba2-130m", "2.7b": "mamba2-2.7b", "7b": "codestral-7b"}
"""As a command names them -> as the cases do."""
WIDTHS = {"130m": 768, "2.7b": 2560, "7b": 4096}


def _ssd(models: Sequence[str], chunks: Sequence[int]) -> Iterator[Case]:
    return ssd.cases([shape for shape in ssd_cases.MODELS if shape.name in _names(models)], chunks=chunks)


def _conv1d(models: Sequence[str], _: Sequence[int]) -> Iterator[Case]:
    return conv1d.cases([shape for shape in conv1d_cases.MODELS if shape.name in _names(models)])


def _norm(models: Sequence[str], _: Sequence[int]) -> Iterator[Case]:
    residual = [shape for shape in norm_cases.RESIDUAL if shape.name in _names(models)]
    return norm.cases(residual, [shape for shape in norm_cases.GATED if shape.name in _names(models)])


def _pool(models: Sequence[str], _: Sequence[int]) -> Iterator[Case]:
    widths = {WIDTHS[model] for model in models}
    return pool.cases([shape for shape in pool_cases.BENCHMARKS if shape.width in widths])


def _logprob(models: Sequence[str], _: Sequence[int]) -> Iterator[Case]:
    return logprob.cases([shape for shape in logprob_cases.BENCHMARKS if shape.name in models])


def _product(models: Sequence[str], _: Sequence[int]) -> Iterator[Case]:
    return product.cases([shape for shape in product_cases.MODELS if shape.name in _names(models)])


_OPERATORS: dict[str, Callable[[Sequence[str], Sequence[int]], Iterator[Case]]] = {
    "ssd": _ssd,
    "conv1d": _conv1d,
    "norm": _norm,
    "pool": _pool,
    "logprob": _logprob,
    "product": _product,
}
OPERATORS = tuple(_OPERATORS)


def _names(models: Sequence[str]) -> set[str]:
    return {MODELS[model] for model in models}


def cases(
    operators: Sequence[str] = OPERATORS, models: Sequence[str] = tuple(MODELS), chunks: Sequence[int] = ssd.CHUNKS
) -> Iterator[Case]:
    """One after the other, each made when it is asked for: together they would not fit a GPU.

    chunks: sizes of mamba_ssm's chunks to try.
    """
    for operator in operators:
        yield from _OPERATORS[operator](models, chunks)

"""logprob: against softmax in float64, and a row's bits the same wherever it stands and whoever is beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from emulator import runtime
from longscan.kernels.bench.measure import peak_bytes
from longscan.kernels.checks import Backend
from longscan.kernels.logprob import UNWANTED, logprob, reference
from longscan.kernels.logprob.cases import BENCHMARKS, CASES, Case, Inputs, make
from threads import torch_threads
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def truth(inputs: Inputs) -> torch.Tensor:
    """[T], float64, on the host, NaN where nothing is wanted."""
    logits = inputs.hidden_TD.cpu().double() @ inputs.weight_VD.cpu().double().T
    scores = logits - torch.logsumexp(logits, -1, keepdim=True)
    targets = inputs.targets_T.cpu()
    chosen = scores.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return chosen.masked_fill(targets == UNWANTED, torch.nan)


def check(case: Case, dtype: torch.dtype, device: str = "cpu", backend: Backend = "torch", atol: float = 1e-5) -> None:
    inputs = make(case, device, dtype)
    expected = truth(inputs)
    found = logprob(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T, backend=backend)
    assert found.dtype == torch.float32
    assert found.shape == inputs.targets_T.shape
    assert torch.equal(found.isnan(), inputs.targets_T == UNWANTED)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-6, atol=atol, equal_nan=True)


# Operands of half precision are widened, so that their own rounding is part of the input and what is left is that of fp32.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_softmax_in_float64(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_pytorch_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.width % 64 == 0], ids=lambda case: case.name)
def test_on_cuda_tile(case: Case) -> None:
    check(case, torch.bfloat16, "cuda", "cutile", atol=1e-4)


MOST_BYTES = 256e6
"""Beyond the inputs, where the logits of the benchmark's rows would take six gigabytes."""


class Made(TorchDispatchMode):
    """Counts the bytes of all that operators return."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.num_bytes += sum(tensor.nbytes for tensor in tree_leaves(made) if isinstance(tensor, torch.Tensor))
        return made


@pytest.mark.parametrize("case", BENCHMARKS, ids=lambda case: case.name)
def test_nothing_of_the_size_of_logits_is_made_for_the_kernel(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = runtime.load("logprob")
    launched: list[object] = []
    monkeypatch.setattr(kernels.ct, "launch", lambda *given: launched.append(given))
    hidden_TD, weight_VD = (torch.empty(rows, case.width, dtype=torch.bfloat16, device="meta") for rows in (case.rows, case.vocabulary))
    targets_T = torch.empty(case.rows, dtype=torch.int64, device="meta")
    with Made() as made:
        kernels.logprob(hidden_TD, weight_VD, targets_T)
    assert len(launched) == 1
    assert 0 < made.num_bytes < MOST_BYTES


@pytest.mark.gpu
def test_memory_beyond_the_inputs_on_a_gpu() -> None:
    inputs = make(BENCHMARKS[1], "cuda", torch.bfloat16)
    assert peak_bytes(lambda: logprob(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T, backend="cutile")) < MOST_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [257, 1003, 4096])
def test_a_row_has_the_same_bits_wherever_it_stands(vocabulary: int, dtype: torch.dtype) -> None:
    inputs = make(Case("any", 700, 72, vocabulary, wanted=1.0), dtype=dtype)
    whole = logprob(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T, backend="torch")
    for first, last in ((0, 1), (17, 19), (5, 69), (255, 257), (600, 700)):
        rows = slice(first, last)
        alone = logprob(inputs.hidden_TD[rows], inputs.weight_VD, inputs.targets_T[rows], backend="torch")
        assert torch.equal(alone, whole[rows]), rows
    few = inputs.targets_T.clone()
    few[torch.arange(700) % 13 != 4] = UNWANTED
    among_gaps = logprob(inputs.hidden_TD, inputs.weight_VD, few, backend="torch")
    assert torch.equal(among_gaps[few != UNWANTED], whole[few != UNWANTED])


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_a_row_has_the_same_bits_among_any_number_of_rows(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 64, generator=generator).expand(70, -1)
    weight = torch.randn(320, 64, generator=generator)
    for target in range(0, 320, 40):
        targets = torch.full((70,), target)
        alone = logprob(hidden[:1], weight, targets[:1], backend="torch")
        with torch_threads(threads):
            for count in range(1, 71):
                found = logprob(hidden[:count], weight, targets[:count], backend="torch")
                assert torch.equal(found, alone.expand(count)), f"{count} rows"


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    inputs = make(CASES[0])
    usual = logprob(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T, backend="torch")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        other = logprob(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T, backend="torch")
    finally:
        torch.set_num_threads(before)
    assert torch.equal(usual.nan_to_num(1), other.nan_to_num(1))


def test_far_logits_neither_overflow_nor_vanish() -> None:
    hidden = torch.tensor([[1e4, 0.0]])
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    found = [logprob(hidden, weight, torch.tensor([target]), backend="torch").item() for target in range(3)]
    assert found == [0.0, -2e4, -1e4]


def test_a_vocabulary_of_equals_is_uniform() -> None:
    found = logprob(torch.randn(9, 16), torch.ones(50_000, 16), torch.arange(9), backend="torch")
    torch.testing.assert_close(found, torch.full((9,), -math.log(50_000)), rtol=1e-6, atol=0)


def test_int32_targets_are_targets() -> None:
    inputs = make(CASES[0])
    wide = logprob(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T, backend="torch")
    narrow = logprob(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T.int(), backend="torch")
    assert torch.equal(wide.nan_to_num(1), narrow.nan_to_num(1))


def test_logits_never_stand_for_more_than_a_block_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    compute = reference._logits

    def watched(hidden_BD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden_BD, weight_VD)
        shapes.append(tuple(logits.shape))
        return logits

    monkeypatch.setattr(reference, "_logits", watched)
    inputs = make(Case("long", 2048, 16, 300, wanted=1.0))
    logprob(inputs.hidden_TD, inputs.weight_VD, inputs.targets_T, backend="torch")
    assert sum(rows for rows, _ in shapes) == 2048
    assert max(rows for rows, _ in shapes) == reference.ROWS["cpu"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_TD": torch.zeros(4)}, r"hidden_TD: expected 2 axes \[T, D\], got shape \[4\]"),
        ({"hidden_TD": torch.zeros(4, 8, dtype=torch.int64)}, "hidden_TD: expected a floating-point dtype"),
        ({"weight_VD": torch.zeros(10, 9)}, r"weight_VD: expected shape \[10, 8\], got \[10, 9\]"),
        ({"weight_VD": torch.zeros(10, 8, dtype=torch.bfloat16)}, "weight_VD: expected dtype torch.float32, got torch.bfloat16"),
        ({"targets_T": torch.zeros(5, dtype=torch.int64)}, r"targets_T: expected shape \[4\], got \[5\]"),
        ({"targets_T": torch.zeros(4)}, "targets_T: expected dtype torch.int32 or torch.int64, got torch.float32"),
        ({"targets_T": torch.tensor([0, 1, 2, 10])}, "targets_T: expected values from -1 to 9, got 0 to 10"),
        ({"targets_T": torch.tensor([0, 1, 2, -100])}, "targets_T: expected values from -1 to 9, got -100 to 2"),
        ({"backend": "cutile"}, "backend: expected 'torch' for tensors on cpu"),
    ],
)
def test_what_does_not_fit_is_told_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "hidden_TD": torch.zeros(4, 8),
        "weight_VD": torch.zeros(10, 8),
        "targets_T": torch.zeros(4, dtype=torch.int64),
        "backend": "torch",
    }
    with pytest.raises(ValueError, match=message):
        logprob(**(arguments | change))  # type: ignore[arg-type]

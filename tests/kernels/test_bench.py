"""The benchmark: it checks before it times, says nothing of the speed of what is wrong, and peers may be absent or fail."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from longscan.kernels.bench import case as case_module
from longscan.kernels.bench import conv1d, limits, logprob, norm, pool, product, ssd, suite
from longscan.kernels.bench.case import NOT_INSTALLED, Candidate, Case, Peer, Row, relative_error, run_case
from longscan.kernels.bench.launches import launch_times
from longscan.kernels.bench.limits import Work
from longscan.kernels.bench.measure import in_turns
from longscan.kernels.bench.peers import fla, mamba_ssm
from longscan.kernels.bench.report import Results, lines, read
from longscan.kernels.conv1d.cases import MODELS as CONV1D_MODELS
from longscan.kernels.conv1d.cases import Shape as Conv1dShape
from longscan.kernels.layouts import packed
from longscan.kernels.logprob.cases import Case as LogprobShape
from longscan.kernels.norm.cases import GATED
from longscan.kernels.norm.cases import Shape as NormShape
from longscan.kernels.pool.cases import Case as PoolShape
from longscan.kernels.pool.cases import Piece
from longscan.kernels.product.cases import Shape as ProductShape
from longscan.kernels.ssd.cases import MODELS, Shape
from torch.utils._python_dispatch import TorchDispatchMode

TWO = packed("two documents", [128, 128])


def small_cases() -> Iterator[Case]:
    """Every operator, small, on the PyTorch path."""
    loads = (ssd.Load(TWO), ssd.Load(packed("one document", [256]), span_tiles=2))
    yield from ssd.cases([Shape("small", H=4, P=16, G=2, N=16)], loads=lambda _: loads, backend="torch", device="cpu")
    yield from conv1d.cases([Conv1dShape("K4", C=32, K=4, stride=64)], load=TWO, backend="torch", device="cpu")
    yield from norm.cases([NormShape("plain", 96)], [NormShape("gated", 96, 2)], num_rows=128, backend="torch", device="cpu")
    yield from logprob.cases([LogprobShape("small", 128, 32, 300)], backend="torch", device="cpu", memory=None)
    pieces = tuple(Piece(0, 100, True) for _ in range(4))
    yield from pool.cases([PoolShape("small", 32, pieces, 128, spare_tiles=0)], backend="torch", device="cpu")
    products = [ProductShape("into", 32, 40, 64), ProductShape("onto", 32, 40, 40, add=True)]
    yield from product.cases(products, num_rows=128, backend="torch", device="cpu")


def millisecond(call: Callable[[], object]) -> float:
    call()
    return 1e-3


def never(call: Callable[[], object]) -> float:
    raise AssertionError(f"{call} was timed")


def candidate(error: float, name: str = "", calls: list[str] | None = None) -> Candidate:
    def call() -> None:
        if calls is not None:
            calls.append(name)

    return Candidate(name, call, lambda: {"y": error}, tolerance=3e-3)


def case(error: float, *peers: Peer) -> Case:
    return Case("ssd", "small", "two documents", Work(bytes=4.3e9), candidate(error, "longscan"), peers, token_heads=1000)


def test_every_operator_is_checked_and_timed() -> None:
    rows = [run_case(found, millisecond) for found in small_cases()]
    assert [row.operator for row in rows] == [
        "ssd",
        "ssd",
        "conv1d",
        "norm",
        "norm",
        "norm",
        "logprob",
        "pool",
        "pool",
        "product",
        "product",
    ]
    for row in rows:
        assert row.ours.milliseconds == 1.0, row
        assert row.ours.errors
        torch_peers = [peer for peer in row.peers if peer.name.startswith(("torch", "the bf16"))]
        assert all(peer.milliseconds == 1.0 for peer in torch_peers), row
    assert all(any(peer.milliseconds for peer in row.peers) for row in rows if row.operator in ("conv1d", "norm", "logprob"))


def test_what_power_bounds_is_timed_in_turns_on_a_warm_device() -> None:
    """The first timer is told nothing of what counts; a peer that cannot be timed leaves both as they were."""
    clock = iter(range(100))
    made = [found for found in small_cases() if found.operator == "product"]
    for found in made:
        row = run_case(found, millisecond, warm=lambda call: (call(), 2e-3 + 1e-4 * (next(clock) % 2))[1])  # type: ignore[func-returns-value]
        assert (row.ours.milliseconds, row.peers[0].milliseconds) == (pytest.approx(2.0), pytest.approx(2.1))
        assert row.ours.errors
    absent = replace(made[0], peers=[Peer("absent", lambda: [candidate(1.0)])])
    assert run_case(absent, millisecond, warm=never).ours.milliseconds == 1.0
    assert run_case(made[0], millisecond, peers=False, warm=lambda _: 3e-3).ours.milliseconds == 3.0


def test_what_is_wrong_has_no_time() -> None:
    for error in (4e-3, math.inf, math.nan):
        row = run_case(case(error), never)
        assert row.ours.milliseconds is None
        assert row.ns_per_token_head is None
        assert row.ratio_to_limit is None
        assert row.ours.note == "wrong: more than 0.003"


def test_an_operator_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the cases themselves: each operator's result is spoiled by a part in fifty."""

    def spoiled(result: object) -> object:
        if isinstance(result, torch.Tensor):
            return result * 1.02
        if isinstance(result, pool.PoolOutput):
            return pool.PoolOutput({name: vector * 1.02 for name, vector in result.documents.items()}, result.windows)
        assert isinstance(result, tuple)
        return (spoiled(result[0]), result[1])

    def spoil(module: object, name: str) -> None:
        right = getattr(module, name)

        def wrong(*arguments: object, **options: object) -> object:
            first = arguments[0] if arguments else next(iter(options.values()))
            wide = isinstance(first, torch.Tensor) and first.dtype == torch.bfloat16
            return spoiled(right(*arguments, **options)) if wide else right(*arguments, **options)

        monkeypatch.setattr(module, name, wrong)

    for module, names in ((ssd, ["ssd"]), (conv1d, ["causal_conv1d"]), (norm, ["rms_norm", "gated_rms_norm"]), (logprob, ["logprob"])):
        for name in names:
            spoil(module, name)
    rows = [run_case(found, millisecond, peers=False) for found in small_cases()]
    assert {row.operator for row in rows if row.ours.milliseconds is None} == {"ssd", "conv1d", "norm", "logprob"}


def test_the_fastest_right_candidate_of_a_peer_counts() -> None:
    tried = [candidate(1.0, "chunk 64"), candidate(0.0, "chunk 128"), candidate(0.0, "chunk 256")]
    times = iter((2e-3, 8e-3, 6e-3))
    row = run_case(case(0.0, Peer("peer", lambda: tried)), lambda _: next(times))
    (peer,) = row.peers
    assert (peer.name, peer.milliseconds) == ("peer chunk 256", 6.0)
    assert row.ratio_to(peer) == 3.0
    assert row.ns_per_token_head == 2000.0
    assert row.ratio_to_limit == 2.0
    assert "chunk 128: 8.000 ms" in peer.note


def test_peers_that_are_absent_or_fail_are_told_of_and_ours_stands() -> None:
    def absent() -> list[Candidate]:
        raise ModuleNotFoundError("No module named 'mamba_ssm'")

    def fails() -> list[Candidate]:
        raise RuntimeError("out of registers\nand more")

    wrong = Peer("wrong", lambda: [candidate(1.0, "chunk 64")])
    row = run_case(case(0.0, Peer("absent", absent), Peer("fails", fails), wrong), lambda _: 1e-3)
    assert row.ours.milliseconds == 1.0
    assert [peer.note for peer in row.peers] == [NOT_INSTALLED, "failed: RuntimeError: out of registers", "wrong: more than 0.003"]
    assert [peer.name for peer in row.peers] == ["absent", "fails", "wrong chunk 64"]
    assert all(peer.milliseconds is None and row.ratio_to(peer) is None for peer in row.peers)
    assert "absent: not installed" in "\n".join(lines(row))
    assert run_case(case(0.0, Peer("absent", absent)), lambda _: 1e-3, peers=False).peers == []


def test_what_each_launch_takes_is_told_where_it_was_measured() -> None:
    asked: list[str] = []

    def parts(operator: str, call: Callable[[], object]) -> dict[str, float]:
        call()
        asked.append(operator)
        return {"time_steps": 0.25, "scan": 0.5}

    row = run_case(case(0.0), millisecond, parts=parts)
    assert asked == ["ssd"]
    assert "of it: time_steps 0.2500 ms (250.0000 ns/token-head), scan 0.5000 ms" in "\n".join(lines(row))
    assert row.as_dict()["longscan"]["launches"] == {"time_steps": 0.25, "scan": 0.5}
    assert run_case(case(1.0), never, parts=parts).launches == {}, "what is wrong is not measured in parts either"


class Widest(TorchDispatchMode):
    """Knows how many float64 numbers the largest tensor had that was made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize("shape", [(), (0, 7), (1,), (5,), (40, 7), (40, 3, 7)])
def test_an_error_is_found_part_by_part(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared may have no room in float64."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(shape, generator=generator)
    got = truth + 0.01 * torch.randn(shape, generator=generator)
    expected = float((got.double() - truth.double()).norm() / truth.double().norm()) if truth.numel() else 0.0
    monkeypatch.setattr(case_module, "AT_ONCE", 50)
    with Widest() as widest:
        assert relative_error(got, truth) == pytest.approx(expected, rel=1e-12)
    assert widest.numbers <= 50
    if len(shape) > 1 and truth.numel():
        got[-1] = torch.nan
        assert relative_error(got, truth) == float("inf")


def test_an_operator_without_kernels_of_its_own_has_no_launches() -> None:
    assert launch_times("product", never) == {}


@pytest.mark.gpu
def test_launches_are_timed_one_by_one() -> None:
    found = next(ssd.cases([MODELS[0]], loads=lambda _: (ssd.Load(packed("one document", [4096]), span_tiles=2),)))
    times = launch_times("ssd", found.ours.call)
    assert list(times) == ["time_steps", "products", "span_ends", "span_starts", "scan"]
    assert all(0 < milliseconds < 100 for milliseconds in times.values())


@pytest.mark.skipif(importlib.util.find_spec("mamba_ssm") is not None, reason="mamba_ssm is installed")
def test_mamba_ssm_is_not_needed() -> None:
    with pytest.raises(ModuleNotFoundError):
        mamba_ssm("ssd_combined")


def test_mamba_ssm_is_imported_without_its_own_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("import selective_scan_cuda_that_nobody_built\n")
    (folder / "ssd_combined.py").write_text("CHUNK = 128\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.ssd_combined"):
        monkeypatch.delitem(importlib.sys.modules, name, raising=False)  # type: ignore[attr-defined]
    assert mamba_ssm("ssd_combined").CHUNK == 128
    for name in [name for name in importlib.sys.modules if name.startswith("mamba_ssm")]:  # type: ignore[attr-defined]
        monkeypatch.delitem(importlib.sys.modules, name)  # type: ignore[attr-defined]


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="fla-core is installed")
def test_fla_is_not_needed() -> None:
    with pytest.raises(ModuleNotFoundError):
        fla("causal_conv1d")


def test_limits_are_those_of_the_chip() -> None:
    """Microseconds for 65,536 tokens at 4.3 TB/s and 790 TFLOP/s, counted by hand."""
    fresh = packed("fresh", [4096] * 16, lanes=False)
    found = {shape.name: limits.ssd_work(shape, fresh) for shape in MODELS}
    assert found["mamba2-130m"].seconds * 1e6 == pytest.approx(102, abs=0.5)
    assert found["mamba2-2.7b"].seconds * 1e6 == pytest.approx(322, abs=0.5)
    assert found["codestral-7b"].seconds * 1e6 == pytest.approx(566, abs=0.5)
    assert {work.bound for work in found.values()} == {"bytes"}
    products = Shape("wide state", H=128, P=64, G=8, N=256)
    assert limits.ssd_work(products, fresh).seconds == pytest.approx(65536 * (8 * 256 * 65 + 8192 * 65 + 4 * 8192 * 256) / 790e12)
    carried = limits.ssd_work(MODELS[1], ssd.DOCUMENTS).seconds - found["mamba2-130m"].seconds
    assert carried == pytest.approx(16 * 8 * 24 * 128 * 64 / 4.3e12)
    convolutions = [limits.conv1d_work(shape.C, ssd.TOKENS).seconds * 1e6 for shape in CONV1D_MODELS[1:]]
    assert convolutions == pytest.approx([109, 328, 624], abs=0.7)
    gated = [limits.gated_norm_work(shape.width, ssd.TOKENS).seconds * 1e6 for shape in GATED[1:]]
    assert gated == pytest.approx([140, 468, 749], abs=0.7)
    assert limits.residual_norm_work(2560, ssd.TOKENS).seconds == pytest.approx(12 * 2560 * 65536 / 4.3e12)
    assert limits.logprob_work(768, 50288, ssd.TOKENS).seconds == pytest.approx(2 * 65536 * 768 * 50288 / 790e12)
    assert limits.pool_work(768, ssd.TOKENS).bound == "bytes"


def test_loads_fill_the_gpu_or_are_one_document() -> None:
    for shape in MODELS[1:]:
        many, one = ssd.loads(shape)
        assert len(many.layout.entries) * shape.H >= 264
        assert many.span_tiles is None
        assert (len(one.layout.entries), one.span_tiles) == (1, 32 if shape.H == 24 else 64)
        assert limits.tokens_of(one.layout) == 65_536
        assert 65_536 - 64 <= limits.tokens_of(many.layout) <= 65_536


def test_results_are_whole_after_each_row(tmp_path: Path) -> None:
    row: Row = run_case(case(0.0, Peer("peer", lambda: [candidate(math.inf, "chunk 64")])), lambda _: 1e-3)
    results = Results(tmp_path / "new" / "one.json", "kernels", {"date": "2026-01-02"})
    for count in (1, 2):
        results.add(row.as_dict())
        (found,) = read([tmp_path / "new" / "one.json"])
        assert len(found["rows"]) == count
    kept = found["rows"][0]
    assert kept["longscan"] == {
        "name": "longscan",
        "milliseconds": 1.0,
        "errors": {"y": 0.0},
        "note": "",
        "ratio_to_limit": 1.0,
        "ns_per_token_head": 1000.0,
    }
    assert kept["peers"][0]["errors"] == {"y": None}
    assert json.dumps(found, allow_nan=False)


def test_the_suite_has_every_operator_at_every_model() -> None:
    assert suite.OPERATORS == ("ssd", "conv1d", "norm", "pool", "logprob", "product")
    assert set(suite.MODELS.values()) < {shape.name for shape in MODELS}


def test_a_device_that_gets_slower_is_no_ones_loss() -> None:
    """Each call takes as long as the other, and more by a tenth each time: who is timed behind has no worse a time than that."""
    clock = iter(range(100))
    first, second = in_turns([lambda: None, lambda: None], lambda _: 1.0 + 0.1 * next(clock))
    assert first == pytest.approx(1.2)
    assert second == pytest.approx(1.3)

"""Whole networks in the benchmark: the stack of peers is the same network as longscan's, and no speed is told of another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
from compare import relative_error
from longscan.jobs.benchmark.layers import LOADS, Load, ModelRow, measure
from longscan.jobs.benchmark.stacks import GEOMETRIES, Parts, States, carrying_stack, peer_stack, random_weights
from longscan.pipeline.model import Mamba2Geometry
from plain_stack import PLAIN, gate

TINY = Mamba2Geometry(100, 32, 2, num_heads=4, head_dim=16, num_groups=2, state_size=16, conv_kernel=4, tied=True)
LOAD = Load("two documents of 70", 2, 70, kept=False)


def timer(call: Callable[[], object]) -> float:
    call()
    return 0.5


def run(parts: Callable[[int], Parts], dtype: torch.dtype = torch.float32, load: Load = LOAD) -> ModelRow:
    weights = random_weights(TINY, device="cpu", dtype=dtype)
    with torch.inference_mode():
        return measure("tiny", TINY, weights, load, timer=timer, parts=parts, chunks=(64, 128), backend="torch")


@pytest.mark.parametrize("load", [LOAD, Load("one document of 256", 1, 256, kept=True)], ids=lambda load: load.name)
def test_the_stack_of_peers_is_the_same_network(load: Load) -> None:
    row = run(lambda _: PLAIN, load=load)
    assert row.distance is not None
    assert row.distance < 1e-5
    tokens = load.documents * load.tokens
    assert row.tokens_per_second == row.peer_tokens_per_second == tokens / 0.5
    assert (row.layer_milliseconds, row.products_milliseconds, row.times_peer) == (250.0, 250.0, 1.0)
    assert row.ratio_to_products_and_limits == pytest.approx(1, abs=1e-3)
    assert "ours 1.00 x" in "\n".join(row.lines())


@pytest.mark.parametrize("cuts", [(70,), (1, 2, 3, 64), (33, 37)], ids=str)
def test_a_stack_that_carries_its_states_is_the_same_network(cuts: tuple[int, ...]) -> None:
    weights = random_weights(TINY, device="cpu", dtype=torch.float32)
    ids_BL = torch.randint(TINY.vocab_size, (2, 70), generator=torch.Generator().manual_seed(2))
    states: States | None = None
    parts = []
    for piece in ids_BL.split(list(cuts), 1):
        hidden, states = carrying_stack(TINY, weights, PLAIN, piece, states)
        parts.append(hidden)
    assert relative_error(torch.cat(parts, 1), peer_stack(TINY, weights, PLAIN, ids_BL)) < 1e-5


def test_in_bf16_they_agree_as_far_as_bf16_goes() -> None:
    row = run(lambda _: PLAIN, torch.bfloat16)
    assert row.distance is not None
    assert 1e-4 < row.distance < 1.5e-2


def test_another_network_has_no_speed() -> None:
    row = run(lambda _: replace(PLAIN, gate=lambda y, z, weight, size, eps: gate(z, y, weight, size, eps)))
    assert row.distance is not None
    assert row.distance > 0.1
    assert (row.peer_tokens_per_second, row.times_peer) == (None, None)
    assert row.note.startswith("the two do not agree")
    assert row.note in "\n".join(row.lines())


def test_peers_that_are_absent_or_fail_are_told_of() -> None:
    def absent(_: int) -> Parts:
        raise ModuleNotFoundError("No module named 'mamba_ssm'")

    def fails(_: int) -> Parts:
        raise RuntimeError("no such target\nand more")

    assert run(absent).note == "not installed"
    row = run(fails)
    assert row.note == "failed: RuntimeError: no such target"
    assert asdict(row)["tokens_per_second"] == 280.0


def test_the_models_are_those_that_people_run() -> None:
    sizes = {name: round(geometry.num_parameters / 1e6) for name, geometry in GEOMETRIES.items()}
    assert sizes == {"130m": 129, "2.7b": 2703, "7b": 7285}
    assert [load.documents * load.tokens for load in LOADS] == [65_472, 65_536, 65_536, 65_000]

"""The device never waits for the host: the next step is launched before one is waited for, and no launch asks the device anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from emulator import runtime
from fake_model import CountingModel, engine_of, stream
from late_device import LateForward
from longscan.kernels.segments import TILE
from longscan.pipeline.config import EmbeddingConfig, ScoreConfig, TaskConfig
from longscan.pipeline.engine import forward
from longscan.pipeline.engine.forward import Forward
from longscan.pipeline.engine.results import EntryResult, Launched
from longscan.pipeline.engine.steps import Step
from longscan.pipeline.records import DocumentRow
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

STEP, STEPS = 512, 8
SIZES = {"lanes": 4, "step_tokens": STEP, "segment_tokens": 128, "context_id": 3, "constant_shape": True}
VOCABULARY = 64


def test_a_step_is_launched_before_the_one_before_it_is_waited_for() -> None:
    """On a device that is slower than the host: no step is done before the next one is there."""
    events: list[str] = []
    tokens = [0]

    class Told(LateForward):
        def launch(self, step: Step) -> Launched:
            events.append("launch")
            tokens[0] += step.num_tokens
            return super().launch(step)

        def collect(self, launched: Launched) -> list[EntryResult]:
            events.append("wait")
            return super().collect(launched)

        def finished(self, _: Launched) -> bool:
            return tokens[0] == STEP * STEPS

    with engine_of(CountingModel(), TaskConfig("embed", EmbeddingConfig(pooling=["mean"])), forward=Told, **SIZES) as one:
        rows = list(one.process([stream(0, [1] * (STEP * STEPS), block=100)]))
    assert len(rows) == 1
    assert events == ["launch", *["launch", "wait"] * (len(events) // 2 - 1), "wait"]
    assert len(events) >= 2 * STEPS


WAITS = ("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "equal", "bincount", "repeat_interleave")
"""Operators of torch whose answer, or its size, the host waits for."""


class Unasked(TorchDispatchMode):
    """Fails where the host would wait for a number, or for how many there are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        assert name not in WAITS, f"{func}: the host would wait for it"
        assert name not in ("index", "index_put_") or not any(tensor.dtype == torch.bool for tensor in given), f"{func}: by a mask"
        result = func(*args, **(kwargs or {}))
        assert all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)), f"{func}: the host would wait for it"
        return result


def launched_by_itself(launch: Callable[..., None], *arguments: Any) -> None:
    """A kernel's launch, whose emulation may ask what it likes."""
    with _disable_current_modes():
        launch(*arguments)


class Scoring(CountingModel):
    """Its scores are those of the CUDA Tile kernels."""

    def __init__(self, logprob: Callable[..., torch.Tensor]) -> None:
        super().__init__(VOCABULARY)
        self.logprob, self.head_VD = logprob, torch.eye(VOCABULARY, dtype=torch.bfloat16)

    def logprobs(self, hidden_TD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        return self.logprob(hidden_TD.bfloat16(), self.head_VD, targets_T)


WRONG = {"as it is": None, "item": lambda hidden_TD: hidden_TD.sum().item(), "mask": lambda hidden_TD: hidden_TD[hidden_TD > 0]}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_no_launch_asks_the_device_anything(wrong: Callable[[torch.Tensor], object] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the network, whose graph could not be recorded if it did: pools, windows and scores by their CUDA Tile forms, and copies."""
    pools, scores = runtime.load("pool"), runtime.load("logprob")
    for module in (pools, scores):
        monkeypatch.setattr(module.ct, "launch", partial(launched_by_itself, module.ct.launch))

    def pool(hidden_TD: torch.Tensor, **arguments: Any) -> Any:
        if wrong is not None:
            wrong(hidden_TD)
        del arguments["backend"]
        return pools.pool(hidden_TD, **arguments)

    class Watched(Forward):
        def launch(self, step: Step) -> Launched:
            with Unasked():
                return super().launch(step)

    monkeypatch.setattr(forward, "pool", pool)
    poolings = ["mean", "last", "max", "weighted_mean"]
    task = TaskConfig("embed_score", EmbeddingConfig(pooling=poolings, window_tokens=TILE), ScoreConfig(window_tokens=TILE, per_token=True))
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 700)
    with engine_of(Scoring(scores.logprob), task, forward=Watched, **SIZES) as one:
        rows = one.process(stream(n, ids[:length]) for n, length in enumerate((1, 700, 65, 130)))
        if wrong is None:
            assert sum(isinstance(row, DocumentRow) for row in rows) == 4
        else:
            with pytest.raises(RuntimeError, match=r"the host would wait for it|by a mask"):
                list(rows)

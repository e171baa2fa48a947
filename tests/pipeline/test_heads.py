"""Heads from their file, and which token stands for a place in a document, however it is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from longscan.pipeline.engine.opened import TokenQueue
from longscan.pipeline.engine.places import pick
from longscan.pipeline.errors import ModelError
from longscan.pipeline.model.classify import apply, read_heads
from longscan.pipeline.records import TokenBlock
from longscan.pipeline.schemas import HeadShape
from safetensors.torch import save_file


def written(file: Path, labels: Any = None, **tensors: torch.Tensor) -> Path:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(named, file, metadata=None if labels is None else {"labels": labels if isinstance(labels, str) else json.dumps(labels)})
    return file


def test_heads_by_name_with_and_without_bias_and_labels(tmp_path: Path) -> None:
    one = written(tmp_path / "one", ["no", "yes"], weight=torch.randn(2, 8), bias=torch.randn(2))
    (head,) = read_heads(one, 8)
    assert head.shape == HeadShape("", 2, ("no", "yes"))
    assert head.shape.columns == ("logits", "label")
    several = written(
        tmp_path / "several", {"topic": ["a", "b", "c"]}, topic__weight=torch.randn(3, 8).half(), age__weight=torch.randn(1, 8)
    )
    age, topic = read_heads(several, 8)
    assert (age.shape, topic.shape) == (HeadShape("age", 1, None), HeadShape("topic", 3, ("a", "b", "c")))
    assert topic.shape.columns == ("logits_topic", "label_topic")
    hidden = np.random.default_rng(0).normal(size=(700, 8)).astype(np.float32)
    logits = apply((age, topic), hidden)
    assert np.allclose(logits["topic"], hidden.astype(np.float64) @ topic.weight_LD.T, atol=1e-6)
    assert all(np.array_equal(apply((topic,), hidden[n : n + 1])["topic"][0], logits["topic"][n]) for n in range(0, 700, 13))
    assert apply((topic,), hidden[:0])["topic"].shape == (0, 3)


@pytest.mark.parametrize(
    ("labels", "tensors", "message"),
    [
        (None, {"weight": torch.ones(2, 7)}, r"shape: weight is \[2, 7\], expected \[2, 8\]"),
        (None, {"weight": torch.ones(8)}, r"shape: weight is \[8\]"),
        (None, {"weight": torch.ones(0, 8)}, "of at least one label"),
        (None, {"weight": torch.ones(2, 8), "bias": torch.ones(3)}, r"shape: bias is \[3\], expected \[2\]"),
        (None, {"weight": torch.ones(2, 8, dtype=torch.int64)}, "dtype: weight is torch.int64"),
        (None, {"weight": torch.full((2, 8), torch.nan)}, "weight holds NaN or infinity"),
        (None, {"bias": torch.ones(2)}, r"(?s)unexpected: bias \[2\].*missing: weight, or <head>.weight"),
        (None, {"weight": torch.ones(2, 8), "dense__kernel": torch.ones(1)}, "unexpected: dense.kernel"),
        (["a"], {"weight": torch.ones(2, 8)}, "labels: the head has 2 outputs and 1 names"),
        ({"x": ["a", "b"]}, {"weight": torch.ones(2, 8)}, "labels: there is no head 'x'"),
        ("{", {"weight": torch.ones(2, 8)}, "labels: expected a list of names"),
        ([1, 2], {"weight": torch.ones(2, 8)}, "labels: expected a list of names"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_with_a_file_is_told(labels: Any, tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    file = written(tmp_path / "head.safetensors", labels, **tensors)
    with pytest.raises(ModelError, match=message) as caught:
        read_heads(file, 8)
    assert str(file) in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no")
    for name in ("text", "nowhere"):
        with pytest.raises(ModelError, match=r"task\.classify\.head: expected a safetensors file of linear heads at .*" + name):
            read_heads(tmp_path / name, 8)


@given(
    widths=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    places=st.lists(st.integers(0, 70), max_size=12).map(sorted),
    cuts=st.lists(st.integers(1, 9), max_size=30),
    offsets=st.booleans(),
)
def test_every_place_has_one_token_however_the_document_is_cut(
    widths: list[int], places: list[int], cuts: list[int], offsets: bool
) -> None:
    """Tokens may be empty (a character of several) and have gaps between them (spaces that belong to none)."""
    starts = np.cumsum([0, *widths[:-1]])
    wanted = np.array(places, dtype=np.int64)
    places_of = starts if offsets else np.arange(len(starts))
    expected = [max((n for n, start in enumerate(places_of) if start < place), default=-1) for place in places]
    queue = TokenQueue()
    queue.push(TokenBlock(np.zeros(len(starts), np.int32), *((starts, starts + 1) if offsets else ())))
    found: dict[int, int] = {}
    position = 0
    while queue.held:
        taken = queue.take(min(queue.held, cuts.pop() if cuts else queue.held))
        picks = pick(wanted, taken, position, ends=not queue.held)
        for index, row in zip(picks.indices.tolist(), picks.rows.tolist(), strict=True):
            assert index not in found
            found[index] = position + row if row >= 0 else -1
        position += len(taken.ids)
    assert [found[index] for index in range(len(places))] == expected

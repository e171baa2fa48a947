"""What cannot be carried out is told at once, every key of it, with what was expected and what was found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from longscan.pipeline.config import EmbeddingConfig, JobConfig, ScoreConfig, TaskConfig
from longscan.pipeline.errors import ConfigError
from longscan.pipeline.rules import validate, without_effect


def job(**values: Any) -> JobConfig:
    """A valid job with these keys changed; `__` stands for a dot."""
    config = JobConfig()
    config.output.path = "out"
    for key, value in values.items():
        *sections, field = key.split("__")
        place: Any = config
        for section in sections:
            place = getattr(place, section)
        assert hasattr(place, field), key
        setattr(place, field, value)
    return config


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"task__name": "embed_score", "task__embedding__window_tokens": 128, "task__score__window_tokens": 128},
        {"task__name": "score", "task__embedding__window_tokens": 64, "task__score__window_tokens": 128},
        {"task__embedding__pooling": ["mean", "last", "max", "weighted_mean"]},
        {"engine__step_tokens": 8192, "engine__lanes": 1, "engine__segment_tokens": 64},
        {"cluster__mode": "ray", "cluster__address": "auto", "cluster__workers": [1, 8], "cluster__gpus_per_worker": 0.25},
        {"cluster__mode": "local", "cluster__workers": 3, "cluster__gpus_per_worker": 2, "cluster__cpus_per_worker": 1},
        {"cluster__mode": "inprocess", "cluster__workers": 1},
        {"model__add_bos": True, "model__dtype": "bfloat16", "limit": 1, "max_errors": 0},
    ],
)
def test_what_can_be_carried_out(values: dict[str, Any]) -> None:
    validate(job(**values))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"output__path": ""}, "output.path: the folder to write to is not set, and there is no default: set output.path=FOLDER"),
        ({"input__path": ""}, "set input.path=DOCUMENTS"),
        ({"model__path": ""}, "set model.path=MODEL"),
        ({"input__passthrough": ["a", ""]}, "input: expected names of columns"),
        ({"task__name": "rank"}, "task.name: expected one of embed, score, embed_score, classify, got 'rank'"),
        ({"task__embedding__pooling": ["mean", "first"]}, "task.embedding.pooling"),
        ({"task__embedding__pooling": ["mean", "mean"]}, "each once"),
        ({"task__embedding__pooling": []}, "task.embedding.pooling"),
        ({"task__embedding__dtype": "int8"}, "task.embedding.dtype: expected one of float32, float16"),
        ({"task__embedding__truncate_dim": 0}, "task.embedding.truncate_dim: expected a whole number, at least 1, got 0"),
        ({"task__embedding__window_tokens": 100}, "task.embedding.window_tokens: expected a positive multiple of 64"),
        ({"task__score__window_tokens": 0}, "task.score.window_tokens"),
        ({"task__score__first_token": "guess"}, "task.score.first_token: expected one of auto, skip"),
        ({"task__name": "embed_score", "task__embedding__window_tokens": 64, "task__score__window_tokens": 128}, "one table holds both"),
        ({"engine__backend": "triton"}, "engine.backend: expected one of auto, torch, cutile"),
        ({"engine__lanes": 0}, "engine.lanes: expected auto or a whole number"),
        ({"engine__lanes": True}, "engine.lanes"),
        ({"engine__step_tokens": 100}, "engine.step_tokens: expected a positive multiple of 64"),
        ({"engine__step_tokens": 64}, "at least engine.segment_tokens (8192), got 64"),
        ({"engine__segment_tokens": 8191}, "engine.segment_tokens"),
        ({"engine__checkpoint_tokens": -64}, "engine.checkpoint_tokens"),
        ({"engine__reset_tokens": 192, "engine__segment_tokens": 128}, "engine.reset_tokens: expected a multiple of 64 that divides"),
        ({"task__embedding__pooling": "mean"}, "task.embedding.pooling: expected auto, or a list of some of mean"),
        ({"task__embedding__normalize": "yes"}, "task.embedding.normalize: expected one of auto, true, false"),
        ({"task__embedding__prompt": "query", "task__embedding__prompt_text": "query: "}, "task.embedding.prompt_text: expected null"),
        ({"model__append_eos": "no"}, "model.append_eos"),
        ({"engine__reset_tokens": 32}, "engine.reset_tokens"),
        ({"engine__reset_tokens": 0}, "engine.reset_tokens"),
        ({"model__decay_scale": 0}, "model.decay_scale: expected a positive number"),
        ({"model__decay_scale": float("nan")}, "model.decay_scale"),
        ({"model__tokenizer_revision": "main"}, "model.tokenizer_revision: expected null, or model.tokenizer"),
        ({"output__shard_tokens": 0}, "output.shard_tokens"),
        ({"model__dtype": "int4"}, "model.dtype"),
        ({"model__add_bos": "yes"}, "model.add_bos: expected one of auto, true, false, got 'yes'"),
        ({"model__add_bos": 1}, "model.add_bos"),
        ({"cluster__mode": "slurm"}, "cluster.mode: expected one of auto, inprocess, local, ray"),
        ({"cluster__mode": "ray"}, "cluster.address"),
        ({"cluster__address": "auto"}, "cluster=ray instead of cluster=auto"),
        ({"cluster__mode": "inprocess", "cluster__workers": 2}, "cluster.workers"),
        ({"cluster__workers": [4, 2]}, "1 <= min <= max, got [4, 2]"),
        ({"cluster__workers": 0}, "cluster.workers"),
        ({"cluster__workers": [1, 2, 3]}, "cluster.workers"),
        ({"cluster__gpus_per_worker": 1.5}, "cluster.gpus_per_worker"),
        ({"cluster__gpus_per_worker": -1}, "cluster.gpus_per_worker"),
        ({"cluster__gpus_per_worker": float("nan")}, "cluster.gpus_per_worker"),
        ({"cluster__gpus_per_worker": float("inf")}, "cluster.gpus_per_worker"),
        ({"cluster__cpus_per_worker": 0}, "cluster.cpus_per_worker"),
        ({"limit": 0}, "limit: expected a whole number, at least 1, got 0"),
        ({"max_errors": -1}, "max_errors: expected a whole number, at least 0, got -1"),
        ({"seed": -1}, "seed"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(job(**values))
    assert says in str(caught.value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(job(limit=0, seed=-1, task__name="x"))
    assert all(key in str(caught.value) for key in ("limit", "seed", "task.name"))


def test_sections_are_independent() -> None:
    """A default list of one job is not another's."""
    one, other = JobConfig(), JobConfig()
    one.input.passthrough.append("author")
    assert other.input.passthrough == []
    assert replace(one, limit=3).task is one.task


@pytest.mark.parametrize(
    ("task", "wanted"),
    [
        (TaskConfig("score", EmbeddingConfig(window_tokens=64)), ["task.embedding.window_tokens has no effect with task=score: "]),
        (
            TaskConfig("embed", score=ScoreConfig(per_token=True, window_tokens=64)),
            ["task.score.window_tokens has no effect with task=embed: ", "task.score.per_token has no effect with task=embed: "],
        ),
        (TaskConfig("embed_score", EmbeddingConfig(window_tokens=64), ScoreConfig(per_token=True, window_tokens=64)), []),
    ],
    ids=["score", "embed", "embed_score"],
)
def test_what_has_no_effect_is_said(task: TaskConfig, wanted: list[str]) -> None:
    said = list(without_effect(task))
    assert len(said) == len(wanted)
    assert all(line.startswith(begin) for line, begin in zip(said, wanted, strict=True))

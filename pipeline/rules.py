"""Which values of the configuration can be carried out, and what is asked for in vain. Pure: looks at nothing but the values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longscan.kernels.pool import POOLINGS
from longscan.kernels.segments import TILE
from longscan.pipeline.config import ClusterConfig, EngineConfig, JobConfig, TaskConfig
from longscan.pipeline.errors import ConfigError

FORMATS = ("auto", "hugging_face", "state_spaces", "mistral")
"""Of checkpoints; auto: by what the folder holds."""
TASKS = ("embed", "score", "embed_score", "classify")


def validate(config: JobConfig) -> None:
    """Raise one ConfigError that names every value that cannot be carried out, what was expected and what was found."""
    problems = [*_unset(config), *(f"{key}: expected {expected}, got {got!r}" for key, expected, got in _problems(config))]
    if problems:
        raise ConfigError("\n  ".join(problems) if len(problems) == 1 else "\n  ".join(["the configuration has errors:", *problems]))


Problem = tuple[str, str, object]


def _problems(config: JobConfig) -> Iterator[Problem]:
    yield from _columns(config)
    yield from _states(config)
    yield from _task(config.task)
    yield from _classify(config)
    yield from _engine(config.engine)
    if config.model.tokenizer_revision is not None and config.model.tokenizer is None:
        yield "model.tokenizer_revision", "null, or model.tokenizer to be the hub id that it is of", config.model.tokenizer_revision
    yield from _choice("model.format", config.model.format, FORMATS)
    yield from _choice("model.dtype", config.model.dtype, ("auto", "float32", "bfloat16", "float16"))
    yield from _choice("model.append_eos", config.model.append_eos, ("auto", True, False))
    yield from _choice("model.add_bos", config.model.add_bos, ("auto", True, False))
    scale = config.model.decay_scale
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < float("inf"):
        yield "model.decay_scale", "a positive number; 1 leaves the model as it is", scale
    yield from _cluster(config.cluster)
    yield from _auto_or_number("output.shard_tokens", config.output.shard_tokens)
    yield from _at_least("max_errors", config.max_errors, 0)
    yield from _at_least("seed", config.seed, 0)
    if config.input.max_document_bytes is not None:
        yield from _at_least("input.max_document_bytes", config.input.max_document_bytes, 1)
    yield from _at_least("input.max_read_bytes", config.input.max_read_bytes, 1 << 20)
    if config.limit is not None:
        yield from _at_least("limit", config.limit, 1)


def _unset(config: JobConfig) -> Iterator[str]:
    """Paths without which there is no job."""
    for key, value, what, example in (
        ("model.path", config.model.path, "the model's folder or hub id", "MODEL"),
        ("input.path", config.input.path, "the Parquet files to read", "DOCUMENTS"),
        ("output.path", config.output.path, "the folder to write to", "FOLDER"),
    ):
        if not value:
            yield f"{key}: {what} is not set, and there is no default: set {key}={example}"


def _columns(config: JobConfig) -> Iterator[Problem]:
    columns = [
        config.input.text_column,
        config.input.id_column,
        config.input.tokens_column,
        config.input.positions_column,
        *config.input.passthrough,
    ]
    if any(column == "" for column in columns):
        yield "input", "names of columns that are not empty", columns


def _states(config: JobConfig) -> Iterator[Problem]:
    asked = ["output.keep_state"] * (config.output.keep_state is True) + ["input.state_path"] * (config.input.state_path is not None)
    yield from _choice("output.keep_state", config.output.keep_state, (True, False))
    if config.input.state_path == "":
        yield "input.state_path", "the output of an earlier run, or null", config.input.state_path
    if asked and config.input.id_column is None:
        yield "input.id_column", f"a column, with {' and '.join(asked)}: a state is found again by its document's id", None
    if asked and config.task.classifies == "positions":
        yield "task.classify.at", f"document, with {' and '.join(asked)}", config.task.classify.at


def _task(task: TaskConfig) -> Iterator[Problem]:
    yield from _choice("task.name", task.name, TASKS)
    embedding, score = task.embedding, task.score
    asked = embedding.pooling if isinstance(embedding.pooling, list) else []
    if embedding.pooling != "auto" and (not asked or any(asked.count(p) != 1 or p not in POOLINGS for p in asked)):
        yield (
            "task.embedding.pooling",
            f"auto, or a list of some of {', '.join(POOLINGS)}, each once, such as [mean]",
            embedding.pooling,
        )
    for key in ("normalize", "include_prompt"):
        yield from _choice(f"task.embedding.{key}", getattr(embedding, key), ("auto", True, False))
    if embedding.prompt_text is not None and embedding.prompt not in ("auto", None):
        yield "task.embedding.prompt_text", "null where task.embedding.prompt names a prompt of the model", embedding.prompt_text
    yield from _choice("task.embedding.dtype", embedding.dtype, ("float32", "float16"))
    if embedding.truncate_dim is not None:
        yield from _at_least("task.embedding.truncate_dim", embedding.truncate_dim, 1)
    yield from _choice("task.score.first_token", score.first_token, ("auto", "skip"))
    for key, size in (("embedding", embedding.window_tokens), ("score", score.window_tokens)):
        if size is not None and (size < TILE or size % TILE):
            yield f"task.{key}.window_tokens", f"a positive multiple of {TILE}, or null", size
    sizes = {embedding.window_tokens, score.window_tokens} - {None}
    if task.embeds and task.scores and len(sizes) > 1:
        yield (
            "task.score.window_tokens",
            f"task.embedding.window_tokens ({embedding.window_tokens}): one table holds both",
            score.window_tokens,
        )


def _classify(config: JobConfig) -> Iterator[Problem]:
    classify, column = config.task.classify, config.input.positions_column
    yield from _choice("task.classify.at", classify.at, ("document", "positions"))
    yield from _choice("task.classify.pooling", classify.pooling, POOLINGS)
    yield from _choice("input.positions_unit", config.input.positions_unit, ("chars", "tokens"))
    if config.task.classifies == "positions" and column is None:
        yield "input.positions_column", "a column of the positions that task.classify.at=positions asks for", column
    if config.task.classifies != "positions" and column is not None:
        yield "input.positions_column", "null, or task=classify and task.classify.at=positions", column
    if column is not None and config.input.tokens_column is not None and config.input.positions_unit == "chars":
        yield "input.positions_unit", "tokens with input.tokens_column, as token ids have no characters", config.input.positions_unit


def without_effect(task: TaskConfig) -> Iterator[str]:
    """What is asked for, in words, that this task has none of."""
    asked = {
        "task.embedding.window_tokens": (
            task.embedding.window_tokens is not None,
            task.embeds,
            "task=embed and embed_score have windows' vectors",
        ),
        "task.score.window_tokens": (task.score.window_tokens is not None, task.scores, "task=score and embed_score have windows' scores"),
        "task.score.per_token": (task.score.per_token, task.scores, "task=score and embed_score have tokens' scores"),
    }
    yield from (f"{key} has no effect with task={task.name}: {who}" for key, (given, taken, who) in asked.items() if given and not taken)


def _engine(engine: EngineConfig) -> Iterator[Problem]:
    yield from _choice("engine.backend", engine.backend, ("auto", "torch", "cutile"))
    yield from _auto_or_number("engine.lanes", engine.lanes)
    yield from _choice("engine.spans", engine.spans, ("auto", True, False))
    for key in ("segment_tokens", "checkpoint_tokens"):
        yield from _multiple(f"engine.{key}", getattr(engine, key))
    if engine.reset_tokens is not None:
        yield from _reset(engine.reset_tokens, engine.segment_tokens)
    if engine.step_tokens != "auto":
        yield from _multiple("engine.step_tokens", engine.step_tokens)
        if isinstance(engine.step_tokens, int) and engine.step_tokens < engine.segment_tokens:
            yield "engine.step_tokens", f"at least engine.segment_tokens ({engine.segment_tokens})", engine.step_tokens


def _reset(reset: int, segment: int) -> Iterator[Problem]:
    """A step takes whole segments, so the two kinds of borders must fall together."""
    if not _is_number(reset, TILE) or reset % TILE or not _is_number(segment, TILE) or (reset % segment and segment % reset):
        expected = f"a multiple of {TILE} that divides engine.segment_tokens ({segment}), or a multiple of that, or null"
        yield "engine.reset_tokens", expected, reset


def _cluster(cluster: ClusterConfig) -> Iterator[Problem]:
    yield from _choice("cluster.mode", cluster.mode, ("auto", "inprocess", "local", "ray"))
    if cluster.mode == "ray" and not cluster.address:
        yield "cluster.address", "the address of a Ray cluster (auto, host:port or ray://host:port) with cluster=ray", cluster.address
    if cluster.mode != "ray" and cluster.address:
        yield "cluster.address", f"null, or cluster=ray instead of cluster={cluster.mode}", cluster.address
    yield from _workers(cluster.workers)
    if cluster.mode == "inprocess" and cluster.workers not in ("auto", 1, [1, 1]):
        yield "cluster.workers", "1 with cluster=inprocess, which is one worker; several take cluster=local or ray", cluster.workers
    yield from _auto_or_number("cluster.cpus_per_worker", cluster.cpus_per_worker)
    yield from _at_least("cluster.max_attempts", cluster.max_attempts, 2)
    if isinstance(cluster.grace_s, bool) or not isinstance(cluster.grace_s, int | float) or not cluster.grace_s >= 0:
        yield "cluster.grace_s", "seconds, at least 0", cluster.grace_s
    if isinstance(cluster.hang_s, bool) or not isinstance(cluster.hang_s, int | float) or not cluster.hang_s > 0:
        yield "cluster.hang_s", "seconds, more than 0", cluster.hang_s
    gpus = cluster.gpus_per_worker
    # Written as what is allowed: every comparison with NaN is false.
    if gpus != "auto" and (isinstance(gpus, bool) or not isinstance(gpus, int | float) or not (0 <= gpus <= 1 or gpus % 1 == 0 < gpus)):
        yield "cluster.gpus_per_worker", "auto, a share of a GPU, or a whole number that is not negative", gpus


def _choice(key: str, value: object, choices: tuple[object, ...]) -> Iterator[Problem]:
    if not any(value is choice or (value == choice and type(value) is type(choice)) for choice in choices):
        yield key, "one of " + ", ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices), value


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _at_least(key: str, value: object, least: int) -> Iterator[Problem]:
    if not _is_number(value, least):
        yield key, f"a whole number, at least {least}", value


def _multiple(key: str, value: object) -> Iterator[Problem]:
    if not _is_number(value, TILE) or not isinstance(value, int) or value % TILE:
        yield key, f"a positive multiple of {TILE}", value


def _auto_or_number(key: str, value: object) -> Iterator[Problem]:
    if value != "auto" and not _is_number(value, 1):
        yield key, "auto or a whole number, at least 1", value


def _workers(value: Any) -> Iterator[Problem]:
    bounds = value if isinstance(value, list) and len(value) == 2 else [value, value]
    if value != "auto" and not (all(_is_number(bound, 1) for bound in bounds) and bounds[0] <= bounds[1]):
        yield "cluster.workers", "auto, a number of workers, or [min,max] with 1 <= min <= max", value

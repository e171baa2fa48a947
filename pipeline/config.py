"""The job's configuration as typed data, and its validation. Knows nothing of Hydra: it is plain data by the time it gets here.

Plain dataclasses, because a frozen one cannot be a Hydra schema. `None` stands for "not set", "auto" for "longscan
decides": `pipeline.run` replaces every "auto" by a number before the plan is written, so that a resumed run uses the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

POOLINGS = ("mean", "last", "max", "weighted_mean")
TASKS = ("embed", "score", "embed_score")


@dataclass
class ModelConfig:
    path: str = "demo"
    revision: str | None = None
    dtype: str = "auto"
    tokenizer: str | None = None
    add_bos: str = "auto"
    append_eos: bool = False


@dataclass
class InputConfig:
    path: str = "demo"
    text_column: str = "text"
    id_column: str | None = None
    tokens_column: str | None = None
    passthrough: list[str] = field(default_factory=list)


@dataclass
class EmbeddingConfig:
    pooling: list[str] = field(default_factory=lambda: ["mean"])
    normalize: bool = True
    truncate_dim: int | None = None
    dtype: str = "float32"
    window_tokens: int | None = None


@dataclass
class ScoreConfig:
    per_token: bool = False
    window_tokens: int | None = None
    first_token: str = "auto"


@dataclass
class TaskConfig:
    name: str = "embed"
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)

    @property
    def embeds(self) -> bool:
        return self.name in ("embed", "embed_score")

    @property
    def scores(self) -> bool:
        return self.name in ("score", "embed_score")


@dataclass
class EngineConfig:
    backend: str = "auto"
    lanes: str = "auto"
    step_tokens: str = "auto"
    segment_tokens: int = 8192
    checkpoint_tokens: int = 1048576


@dataclass
class OutputConfig:
    path: str = ""
    overwrite: bool = False
    shard_tokens: str = "auto"


@dataclass
class ClusterConfig:
    mode: str = "auto"
    address: str | None = None
    workers: str = "auto"
    gpus_per_worker: str = "auto"
    cpus_per_worker: str = "auto"


@dataclass
class JobConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    input: InputConfig = field(default_factory=InputConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    dry_run: bool = False
    max_errors: int = 0
    limit: int | None = None
    seed: int = 0

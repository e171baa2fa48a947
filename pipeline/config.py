"""The job's configuration as typed data. Knows nothing of Hydra: it is plain data by the time it gets here.

Plain dataclasses, because a frozen one cannot be a Hydra schema. `None` stands for "not set", "auto" for "longscan
decides": `pipeline.resolve` replaces every "auto" that matters by what it stands for, once a run; a resumed run uses the
same. A field that takes "auto" or a number is `Any` to Hydra; `pipeline.rules` says which values can be carried out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DEMO = "demo"
"""As model.path and input.path: what ships with longscan."""


@dataclass
class ModelConfig:
    path: str = "demo"
    revision: str | None = None
    format: str = "auto"
    dtype: str = "auto"
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    parse_special: bool = False
    decay_scale: float = 1.0
    add_bos: Any = "auto"
    append_eos: Any = "auto"


@dataclass
class InputConfig:
    path: str = "demo"
    text_column: str = "text"
    id_column: str | None = None
    tokens_column: str | None = None
    positions_column: str | None = None
    positions_unit: str = "chars"
    passthrough: list[str] = field(default_factory=list)
    max_document_bytes: int | None = None
    max_read_bytes: int = 1 << 32
    state_path: str | None = None


@dataclass
class EmbeddingConfig:
    pooling: Any = "auto"
    normalize: Any = "auto"
    truncate_dim: int | None = None
    dtype: str = "float32"
    window_tokens: int | None = None
    prompt: str | None = "auto"
    prompt_text: str | None = None
    include_prompt: Any = "auto"

    @property
    def poolings(self) -> list[str]:
        """The list of them; auto, where no model's folder has said another (`pipeline.recipe`), is the mean."""
        return ["mean"] if self.pooling == "auto" else list(self.pooling)


@dataclass
class ScoreConfig:
    per_token: bool = False
    window_tokens: int | None = None
    first_token: str = "auto"


@dataclass
class ClassifyConfig:
    head: str | None = None
    at: str = "document"
    pooling: str = "last"


@dataclass
class TaskConfig:
    name: str = "embed"
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    classify: ClassifyConfig = field(default_factory=ClassifyConfig)
    state_norm: bool = False

    @property
    def embeds(self) -> bool:
        return self.name in ("embed", "embed_score")

    @property
    def classifies(self) -> str | None:
        """What has logits: document, positions, or None where the task is another."""
        return self.classify.at if self.name == "classify" else None

    @property
    def pools(self) -> bool:
        """Hidden states are pooled: as an embedding, or for a head on it."""
        return self.embeds or self.classifies == "document"

    @property
    def scores(self) -> bool:
        return self.name in ("score", "embed_score")


@dataclass
class EngineConfig:
    backend: str = "auto"
    lanes: Any = "auto"
    step_tokens: Any = "auto"
    segment_tokens: int = 8192
    reset_tokens: int | None = None
    checkpoint_tokens: int = 1048576
    spans: Any = "auto"


@dataclass
class OutputConfig:
    path: str = ""
    overwrite: bool = False
    shard_tokens: Any = "auto"
    keep_state: bool = False


@dataclass
class ClusterConfig:
    mode: str = "auto"
    address: str | None = None
    workers: Any = "auto"
    gpus_per_worker: Any = "auto"
    cpus_per_worker: Any = "auto"
    max_attempts: int = 4
    hang_s: float = 1800.0
    grace_s: float = 30.0


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

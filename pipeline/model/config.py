"""A checkpoint's geometry: what config.json says, checked, and nothing else. What longscan does not compute is refused by name.

A geometry is one format-free set of fields. `read_geometry` looks at what a folder holds and picks its reader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longscan.pipeline.errors import ModelError

ATTENTION = "it has attention layers, whose cache grows with the document"
NOT_MAMBA2: Mapping[str, str] = {
    "mamba": "it is a Mamba-1, another recurrence",
    "falcon_mamba": "it is a Mamba-1, another recurrence",
    "bamba": ATTENTION,
    "falcon_h1": ATTENTION,
    "granitemoehybrid": ATTENTION,
    "jamba": ATTENTION,
    "lfm2": ATTENTION,
    "mamba2attn": ATTENTION,
    "nemotron_h": ATTENTION,
    "zamba": ATTENTION,
    "zamba2": ATTENTION,
}
"""model_type -> why it cannot run."""


@dataclass(frozen=True, slots=True)
class Mamba2Geometry:
    """The shape of a Mamba-2 and the constants of its computation. Letters as in kernels/SHAPES.md."""

    vocab_size: int
    """V, rows of the embedding: the tokenizer's, often padded."""
    d_model: int
    """D"""
    num_layers: int
    num_heads: int
    """H"""
    head_dim: int
    """P"""
    num_groups: int
    """G"""
    state_size: int
    """N"""
    conv_kernel: int
    """K"""
    eps: float = 1e-5
    """Of every norm."""
    dt_limit: tuple[float, float] = (0.0, math.inf)
    """Bounds of the time step after softplus."""
    tied: bool = False
    """The output projection is the embedding."""
    has_head: bool = True
    """There is an output projection; without one a model embeds but does not score."""
    norm_before_gate: bool = False
    use_bias: bool = False
    """in_proj and out_proj have a bias."""
    use_conv_bias: bool = True
    residual_in_fp32: bool = True
    """What the checkpoint asks for. The residual stream is kept in fp32 either way."""
    bos_id: int | None = None
    eos_id: int | None = None
    max_trained_tokens: int | None = None
    """Longest text of its training, where the checkpoint says so."""

    @property
    def inner(self) -> int:
        """I = H P"""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """C = I + 2 G N"""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def projected(self) -> int:
        """Rows of in_proj: z (I), x (I), B (G N), C (G N), dt (H)."""
        return self.inner + self.channels + self.num_heads

    @property
    def num_parameters(self) -> int:
        biases = (self.projected + self.d_model) * self.use_bias + self.channels * self.use_conv_bias
        layer = (
            self.d_model * (self.projected + self.inner + 1) + self.channels * self.conv_kernel + 3 * self.num_heads + self.inner + biases
        )
        tables = 1 + (self.has_head and not self.tied)
        return tables * self.vocab_size * self.d_model + self.num_layers * layer + self.d_model

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of one lane's state: SSM in fp32, convolution tails in items of `itemsize` bytes."""
        return self.num_layers * (4 * self.inner * self.state_size + itemsize * (self.conv_kernel - 1) * self.channels)


def read_geometry(folder: str | Path) -> Mamba2Geometry:
    """Find out what `folder` holds and read its geometry.

    Raises ModelError where it is no checkpoint, one of another architecture, or one with features that longscan does not compute.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else None
    if config is None:
        raise ModelError(_no_config(folder))
    model_type = config.get("model_type")
    if model_type == "mamba2":
        return _hugging_face(config, folder / "config.json")
    where = f"{folder / 'config.json'}"
    if model_type is None and ("ssm_cfg" in config or "d_model" in config):
        raise ModelError(
            f"{where}: expected a Hugging Face config with model_type mamba2, found one of the original state-spaces format"
            " (ssm_cfg, no model_type). Convert the checkpoint to Hugging Face format, or use a converted one (mamba2-*-hf)."
        )
    reason = NOT_MAMBA2.get(str(model_type), "longscan runs Mamba-2 only")
    raise ModelError(f"{where}: expected model_type mamba2, found {model_type!r}: {reason}. Choose a pure Mamba-2 checkpoint.")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or ModelError."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: expected a JSON object, but it cannot be read: {error}. Download the checkpoint again.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(values).__name__}. Download the checkpoint again.")
    return values


def _no_config(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: expected the folder of a checkpoint, found {'a file' if folder.exists() else 'nothing'}. Check model.path."
    if (folder / "params.json").exists():
        return (
            f"{folder}: expected config.json, found params.json: a checkpoint of Mistral's consolidated format."
            " Use the same model in Hugging Face format (config.json beside model*.safetensors)."
        )
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "an empty folder"
    return f"{folder}: expected config.json of a Mamba-2 in Hugging Face format, found {found}. Check model.path."


# Keys of a Hugging Face config that change what a Mamba-2 computes, and the values that longscan computes.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "rms_norm": (True,),
    "rmsnorm": (True,),
    "D_has_hdim": (False,),
    "attn_layer_idx": (None, []),
    "attn_cfg": (None, {}),
    "d_intermediate": (0, None),
    "d_ssm": (None,),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}
_LAYER_TYPES = {"linear_attention", "mamba", "mamba2"}


def _hugging_face(config: Mapping[str, Any], path: Path) -> Mamba2Geometry:
    fields = _Fields(config)
    for key, values in _SUPPORTED.items():
        if key in config and config[key] not in values:
            fields.problems.append(f"{key}: longscan computes {' or '.join(map(repr, values))} only, found {config[key]!r}")
    for key in ("layer_types", "layers_block_type"):
        strange = sorted(set(map(str, config.get(key) or [])) - _LAYER_TYPES)
        if strange:
            fields.problems.append(f"{key}: longscan computes layers of Mamba-2 only, found {', '.join(strange)}")
    # The key norm_before_gate is not read: older transformers wrote `true` there by default, and no release computed it.
    geometry = fields.build(
        lambda: Mamba2Geometry(
            vocab_size=fields.integer("vocab_size"),
            d_model=fields.integer("hidden_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=fields.integer("num_heads"),
            head_dim=fields.integer("head_dim"),
            num_groups=fields.integer("n_groups"),
            state_size=fields.integer("state_size"),
            conv_kernel=fields.integer("conv_kernel", 4),
            eps=fields.positive("layer_norm_epsilon", 1e-5),
            dt_limit=fields.bounds("time_step_limit"),
            tied=fields.flag("tie_word_embeddings", False),
            has_head="Mamba2Model" not in (config.get("architectures") or []) or fields.flag("tie_word_embeddings", False),
            use_bias=fields.flag("use_bias", False),
            use_conv_bias=fields.flag("use_conv_bias", True),
            residual_in_fp32=fields.flag("residual_in_fp32", True),
            bos_id=fields.token("bos_token_id"),
            eos_id=fields.token("eos_token_id"),
            max_trained_tokens=fields.integer("max_position_embeddings", None),
        )
    )
    if geometry is not None:
        _contradictions(geometry, fields)
    if geometry is None or fields.problems:
        raise ModelError(
            f"{path}: expected the config of a Mamba-2 that longscan can run, found\n  "
            + "\n  ".join(fields.problems)
            + "\nCorrect the file if it is wrong, or choose another checkpoint."
        )
    return geometry


def _contradictions(geometry: Mamba2Geometry, fields: _Fields) -> None:
    """Note what does not fit together."""
    inner = round(fields.positive("expand", 2.0) * geometry.d_model)
    for key, width in (("expand", inner), ("intermediate_size", fields.integer("intermediate_size", inner))):
        if width != geometry.inner:
            found = f"{key} asks for {width}, num_heads x head_dim for {geometry.inner}"
            fields.problems.append(f"{key}: expected the mixer's inner width once, found two: {found}")
    if geometry.num_heads % geometry.num_groups:
        fields.problems.append(f"n_groups: expected a divisor of num_heads ({geometry.num_heads}), found {geometry.num_groups}")


_REQUIRED: Any = object()


class _Fields:
    """Typed reads of a config that note what is wrong and go on, so that one error tells everything."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def build(self, make: Callable[[], Mamba2Geometry]) -> Mamba2Geometry | None:
        """What `make` reads, None where a read found a problem."""
        before = len(self.problems)
        geometry = make()
        return geometry if len(self.problems) == before else None

    def _get(self, key: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        value = self.config.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if value is None or not fits(value):
            found = "nothing" if value is None else repr(value)
            self.problems.append(f"{key}: expected {expected}, found {found}")
            return 1
        return value

    def integer(self, key: str, default: int | None = _REQUIRED) -> Any:
        return self._get(key, default, "a positive integer", lambda v: isinstance(v, int) and not isinstance(v, bool) and v > 0)

    def positive(self, key: str, default: float) -> float:
        value = self._get(key, default, "a positive number", lambda v: _number(v) is not None and 0 < v < math.inf)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, default, "true or false", lambda v: isinstance(v, bool)))

    def token(self, key: str) -> int | None:
        """A token id; the first one of a list."""
        value = self.config.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def bounds(self, key: str) -> tuple[float, float]:
        """Two numbers, low <= high, in any of the ways that checkpoints spell infinity; null stands for no bound."""
        value = self.config.get(key)
        if isinstance(value, str):
            value = value.strip("()[] ").split(",")
        if value is None:
            return 0.0, math.inf
        if isinstance(value, list | tuple) and len(value) == 2:
            low = 0.0 if value[0] is None else _number(value[0])
            high = math.inf if value[1] is None else _number(value[1])
            if low is not None and high is not None and 0 <= low <= high:
                return low, high
        self.problems.append(f"{key}: expected two numbers 0 <= low <= high, found {self.config[key]!r}")
        return 0.0, math.inf


def _number(value: Any) -> float | None:
    """A number, also as a string ("inf", "Infinity") or as transformers 5 writes infinity; None for anything else."""
    if isinstance(value, dict):
        value = value.get("__float__")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None

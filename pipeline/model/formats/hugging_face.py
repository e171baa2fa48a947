"""Hugging Face folders: config.json with model_type mamba2, and model*.safetensors or pytorch_model*.bin, whole or in shards.

Two spellings of the embedding are known: `backbone.embeddings.weight`, and the original `backbone.embedding.weight` of the
first conversions. A base model's names have no `backbone.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longscan.pipeline.errors import ModelError
from longscan.pipeline.model.config import Mamba2Geometry
from longscan.pipeline.model.formats.fields import Fields, read_json
from longscan.pipeline.model.formats.files import PYTORCH, SAFETENSORS, find_weights, inside

CONFIG = "config.json"
TIED_KEY = "tie_word_embeddings"
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


def read_geometry(folder: Path) -> Mamba2Geometry:
    """Raises ModelError where the config is of another architecture or asks for what longscan does not compute."""
    path = inside(folder, CONFIG)
    config = read_json(path)
    model_type = config.get("model_type")
    if model_type != "mamba2":
        reason = NOT_MAMBA2.get(str(model_type), "longscan runs Mamba-2 only")
        raise ModelError(f"{path}: expected model_type mamba2, found {model_type!r}: {reason}. Choose a pure Mamba-2 checkpoint.")
    fields = Fields(config)
    fields.supported(_SUPPORTED)
    for key in ("layer_types", "layers_block_type"):
        strange = sorted(set(map(str, fields.items(key))) - _LAYER_TYPES)
        if strange:
            fields.note(key, f"longscan computes layers of Mamba-2 only, found {', '.join(strange)}")

    # The key norm_before_gate is not read: older transformers wrote `true` there by default, and no release computed it.
    def make() -> Mamba2Geometry:
        tied = fields.flag(TIED_KEY, False)
        return Mamba2Geometry(
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
            tied=tied,
            has_head="Mamba2Model" not in fields.items("architectures") or tied,
            use_bias=fields.flag("use_bias", False),
            use_conv_bias=fields.flag("use_conv_bias", True),
            residual_in_fp32=fields.flag("residual_in_fp32", True),
            bos_id=fields.token("bos_token_id"),
            eos_id=fields.token("eos_token_id"),
            max_trained_tokens=fields.integer("max_position_embeddings", None),
        )

    return fields.finish(path, make, lambda geometry: _contradictions(geometry, fields))


def _contradictions(geometry: Mamba2Geometry, fields: Fields) -> None:
    """Note what does not fit together."""
    inner = round(fields.positive("expand", 2.0) * geometry.d_model)
    for key, width in (("expand", inner), ("intermediate_size", fields.integer("intermediate_size", inner))):
        if width != geometry.inner:
            found = f"{key} asks for {width}, num_heads x head_dim for {geometry.inner}"
            fields.note(key, f"expected the mixer's inner width once, found two: {found}")
    if geometry.num_heads % geometry.num_groups:
        fields.note("n_groups", f"expected a divisor of num_heads ({geometry.num_heads}), found {geometry.num_groups}")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the tensors, or ModelError."""
    return find_weights(folder, SAFETENSORS, PYTORCH)


def canonical(key: str) -> str:
    """The name of a tensor as Hugging Face's Mamba2Model has it, without the prefix `backbone.`."""
    name = key.removeprefix("backbone.")
    return "embeddings.weight" if name == "embedding.weight" else name

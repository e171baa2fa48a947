"""The original format of mamba_ssm (state-spaces/mamba2-*): config.json without model_type, its `ssm_cfg` read in full.

Where ssm_cfg says nothing, mamba_ssm's defaults hold: those of its classes Mamba2 (modules/mamba2.py) and MambaConfig
(models/config_mamba.py). The vocabulary is padded to a multiple of pad_vocab_size_multiple, in the file as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longscan.pipeline.model.config import Mamba2Geometry
from longscan.pipeline.model.formats import hugging_face
from longscan.pipeline.model.formats.fields import Fields, read_json
from longscan.pipeline.model.formats.files import inside

CONFIG = "config.json"
TIED_KEY = "tie_embeddings"
EPS = 1e-5
"""Of every norm: mamba_ssm takes it from no config."""
TRAINING_ONLY = {"A_init_range", "conv_init", "dt_init_floor", "dt_max", "dt_min"}
SPEED_ONLY = {"chunk_size", "process_group", "sequence_parallel", "use_mem_eff_path"}
READ = {"layer", "d_state", "d_conv", "expand", "headdim", "ngroups", "d_ssm", "dt_limit", "bias", "conv_bias", "norm_before_gate"}
REFUSED: Mapping[str, tuple[Any, str]] = {
    "rmsnorm": (True, "without it the mixer has no norm, which longscan does not compute"),
    "D_has_hdim": (False, "it has a D for every channel, longscan one for every head"),
}
"""Key of ssm_cfg -> the value that longscan computes, and what another one means."""

weight_files = hugging_face.weight_files
canonical = hugging_face.canonical


def is_original(folder: Path) -> bool:
    """Whether config.json is one of mamba_ssm's, of a Mamba-2 or not. Those of transformers say their model_type."""
    config = read_json(inside(folder, CONFIG))
    return config.get("model_type") is None and ("ssm_cfg" in config or "d_model" in config)


def read_geometry(folder: Path) -> Mamba2Geometry:
    """Raises ModelError where the config is of another architecture or asks for what longscan does not compute."""
    path = inside(folder, CONFIG)
    fields = Fields(read_json(path))
    layer = fields.section("ssm_cfg")
    _refuse(fields, layer)
    return build(path, fields, layer)


def build(path: Path, fields: Fields, layer: Fields) -> Mamba2Geometry:
    """The Mamba-2 that mamba_ssm builds, or ModelError. fields: of its MambaConfig. layer: of the ssm_cfg in it."""

    def make() -> Mamba2Geometry:
        d_model, head_dim = fields.integer("d_model"), layer.integer("headdim", 64)
        multiple = fields.integer("pad_vocab_size_multiple", 8)
        return Mamba2Geometry(
            vocab_size=-(-fields.integer("vocab_size") // multiple) * multiple,
            d_model=d_model,
            num_layers=fields.integer("n_layer"),
            num_heads=layer.integer("expand", 2) * d_model // head_dim,
            head_dim=head_dim,
            num_groups=layer.integer("ngroups", 1),
            state_size=layer.integer("d_state", 128),
            conv_kernel=layer.integer("d_conv", 4),
            eps=EPS,
            dt_limit=layer.bounds("dt_limit"),
            tied=fields.flag(TIED_KEY, True),
            norm_before_gate=layer.flag("norm_before_gate", False),
            use_bias=layer.flag("bias", False),
            use_conv_bias=layer.flag("conv_bias", True),
            residual_in_fp32=fields.flag("residual_in_fp32", True),
        )

    def check(g: Mamba2Geometry) -> None:
        inner = layer.integer("expand", 2) * g.d_model
        if g.inner != inner:
            layer.note("headdim", f"expected a divisor of expand x d_model ({inner}), found {g.head_dim}")
        elif g.num_heads % g.num_groups:
            layer.note("ngroups", f"expected a divisor of the number of heads ({g.num_heads}), found {g.num_groups}")
        if layer.get("d_ssm") not in (None, inner):
            found = f"found {layer.get('d_ssm')!r}: the other channels are an MLP, which longscan does not run"
            layer.note("d_ssm", f"expected null or the whole inner width ({inner}), {found}")

    return fields.finish(path, make, check)


def _refuse(fields: Fields, layer: Fields) -> None:
    """Note every setting that makes a network of another kind."""
    kind = layer.config.get("layer", "Mamba1")  # mamba_ssm's default
    if kind != "Mamba2":
        of_another = "it is a Mamba-1, another recurrence" if kind == "Mamba1" else "longscan runs Mamba-2 only"
        layer.note("layer", f"expected 'Mamba2', found {layer.config.get('layer')!r}: {of_another}")
    if fields.config.get("attn_layer_idx"):
        found = f"found {fields.config['attn_layer_idx']!r}: it has attention layers, whose cache grows with the document"
        fields.note("attn_layer_idx", f"expected no layer, {found}")
    if fields.config.get("d_intermediate"):
        found = f"found {fields.config['d_intermediate']!r}: it has MLP layers, which longscan does not run"
        fields.note("d_intermediate", f"expected 0, {found}")
    fields.supported({"rms_norm": (True, None), "bidirectional": (False, None), "norm_epsilon": (EPS, None)})
    for key, (value, meaning) in REFUSED.items():
        if layer.config.get(key, value) is not value:
            layer.note(key, f"expected {str(value).lower()}, found {layer.config[key]!r}: {meaning}")
    for key in sorted(set(layer.config) - READ - set(REFUSED) - TRAINING_ONLY - SPEED_ONLY):
        layer.note(key, f"expected settings of mamba_ssm's Mamba2 only, found {layer.config[key]!r}")

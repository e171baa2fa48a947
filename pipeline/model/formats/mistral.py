"""Mistral's consolidated format (Mamba-Codestral): params.json and consolidated.safetensors, every name behind `model.`.

params.json gives a few numbers; for the rest mistral-inference builds its network from mamba_ssm's defaults, and so does
this reader.
"""

from __future__ import annotations

from pathlib import Path

from longscan.pipeline.errors import ModelError
from longscan.pipeline.model.config import Mamba2Geometry
from longscan.pipeline.model.formats import hugging_face
from longscan.pipeline.model.formats.fields import Fields, read_json
from longscan.pipeline.model.formats.files import CONSOLIDATED, find_weights, inside
from longscan.pipeline.model.formats.state_spaces import build

CONFIG = "params.json"
TIED_KEY = "tie_embeddings"
NAMES = {"d_model": "dim", "n_layer": "n_layers", "ngroups": "n_groups"}
"""Key of mamba_ssm -> the one of params.json."""
REQUIRED = ("dim", "n_layers", "vocab_size", "n_groups", "rms_norm", "residual_in_fp32", "pad_vocab_size_multiple", TIED_KEY)


def read_geometry(folder: Path) -> Mamba2Geometry:
    """Raises ModelError where params.json is of another architecture or asks for what longscan does not compute."""
    path = inside(folder, CONFIG)
    params = read_json(path)
    # mistral-inference calls its Mamba-2 "mamba"; a transformer's params.json often has no model_type.
    if params.get("model_type") != "mamba":
        found = f"{params.get('model_type')!r}: " + (
            "a transformer with attention" if "n_heads" in params else "longscan runs Mamba-2 only"
        )
        raise ModelError(f"{path}: expected model_type mamba, as of Mamba-Codestral, found {found}. Choose a pure Mamba-2 checkpoint.")
    fields = Fields(params, names=NAMES)
    layer = Fields({"n_groups": params.get("n_groups")}, names=NAMES, problems=fields.problems)
    for key in REQUIRED:
        if params.get(key) is None:
            fields.note(key, "expected a value, found nothing")
    fields.supported({"rms_norm": (True, None)})
    return build(path, fields, layer)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the tensors, or ModelError."""
    return find_weights(folder, CONSOLIDATED)


def canonical(key: str) -> str:
    """The name of a tensor as Hugging Face's Mamba2Model has it, without any prefix."""
    return hugging_face.canonical(key.removeprefix("model."))

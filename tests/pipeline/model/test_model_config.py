"""Geometry from config.json: every spelling that checkpoints use, and every refusal by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fakes import tiny_checkpoint
from longscan.pipeline.errors import ModelError
from longscan.pipeline.model import read_geometry
from safetensors.torch import load_file
from transformers import Mamba2Config


def change(folder: Path, **config: Any) -> Path:
    """Set keys of config.json; None removes one."""
    values = json.loads((folder / "config.json").read_text("utf-8")) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}), "utf-8")
    return folder


def test_every_field_arrives(tmp_path: Path) -> None:
    folder = tiny_checkpoint(
        tmp_path,
        vocab_size=300,
        d_model=48,
        num_layers=3,
        head_dim=24,
        num_groups=2,
        state_size=8,
        conv_kernel=3,
        expand=3,
        eps=1e-3,
        time_step_limit=(0.001, 0.5),
        tied=False,
        use_bias=True,
        use_conv_bias=False,
        residual_in_fp32=False,
        bos_token_id=7,
        eos_token_id=[9, 8],
        max_position_embeddings=2048,
    )
    g = read_geometry(folder)
    assert (g.vocab_size, g.d_model, g.num_layers, g.num_heads, g.head_dim, g.num_groups) == (300, 48, 3, 6, 24, 2)
    assert (g.state_size, g.conv_kernel, g.eps, g.dt_limit) == (8, 3, 1e-3, (0.001, 0.5))
    assert (g.tied, g.has_head, g.use_bias, g.use_conv_bias, g.residual_in_fp32) == (False, True, True, False, False)
    assert (g.bos_id, g.eos_id, g.max_trained_tokens) == (7, 9, 2048)
    assert (g.inner, g.channels, g.projected) == (144, 144 + 32, 144 + 176 + 6)
    assert g.state_bytes(2) == 3 * (4 * 6 * 8 * 24 + 2 * 2 * 176)
    assert not g.norm_before_gate


@pytest.mark.parametrize(
    "shape", [{"tied": True}, {"tied": False, "use_bias": True, "num_groups": 4}, {"use_conv_bias": False, "num_layers": 1}]
)
def test_parameters_are_counted_as_the_file_has_them(tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = tiny_checkpoint(tmp_path, **shape)
    assert read_geometry(folder).num_parameters == sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("[0.0, Infinity]", (0.0, math.inf)),
        ('[0.0, {"__float__": "Infinity"}]', (0.0, math.inf)),
        ("null", (0.0, math.inf)),
        ("[0.0, null]", (0.0, math.inf)),
        ('["0.0", "inf"]', (0.0, math.inf)),
        ('"(0.0, inf)"', (0.0, math.inf)),
        ('"[0.001, 0.1]"', (0.001, 0.1)),
        ("[0, 1]", (0.0, 1.0)),
    ],
)
def test_a_limit_of_the_time_step_is_read_however_it_is_spelled(tmp_path: Path, written: str, expected: tuple[float, float]) -> None:
    folder = tiny_checkpoint(tmp_path, time_step_limit=(0.25, 0.75))
    config = folder / "config.json"
    values = json.loads(config.read_text("utf-8")) | {"time_step_limit": "HERE"}
    config.write_text(json.dumps(values).replace('"HERE"', written), "utf-8")
    assert read_geometry(folder).dt_limit == expected


def test_an_absent_limit_is_no_limit(tmp_path: Path) -> None:
    folder = change(tiny_checkpoint(tmp_path, time_step_limit=(0.25, 0.75)), time_step_limit=None)
    assert read_geometry(folder).dt_limit == (0.0, math.inf)


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    Mamba2Config(hidden_size=64, num_heads=4, head_dim=32, num_hidden_layers=1, vocab_size=100, state_size=16, n_groups=2).save_pretrained(
        tmp_path
    )
    g = read_geometry(tmp_path)
    assert (g.d_model, g.num_heads, g.num_groups, g.dt_limit, g.tied) == (64, 4, 2, (0.0, math.inf), False)


def test_a_gate_before_the_norm_is_what_transformers_computes_whatever_an_old_config_says(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, norm_before_gate=True, rms_norm=True, intermediate_size=128)
    assert not read_geometry(folder).norm_before_gate


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "expected model_type mamba2, found 'mamba': it is a Mamba-1"),
        ({"model_type": "falcon_mamba"}, "it is a Mamba-1"),
        ({"model_type": "bamba"}, "attention layers, whose cache grows with the document"),
        ({"model_type": "granitemoehybrid"}, "attention layers"),
        ({"model_type": "nemotron_h"}, "attention layers"),
        ({"model_type": "zamba2"}, "attention layers"),
        ({"model_type": "falcon_h1"}, "attention layers"),
        ({"model_type": "llama"}, "found 'llama': longscan runs Mamba-2 only"),
        ({"model_type": None, "d_model": 64}, "ssm_cfg.layer: expected 'Mamba2', found None: it is a Mamba-1"),
        ({"model_type": None}, "found None: longscan runs Mamba-2 only"),
        ({"hidden_act": "gelu"}, "hidden_act: longscan computes 'silu' or 'swish' only, found 'gelu'"),
        ({"rms_norm": False}, "rms_norm: longscan computes True only, found False"),
        ({"D_has_hdim": True}, "D_has_hdim: longscan computes False only"),
        ({"attn_layer_idx": [3]}, "attn_layer_idx: longscan computes None or"),
        ({"d_intermediate": 128}, "d_intermediate: longscan computes 0 or None only, found 128"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "layer_types: longscan computes layers of Mamba-2 only, found full_attention",
        ),
        ({"hidden_size": None}, "hidden_size: expected a positive integer, found nothing"),
        ({"hidden_size": "64"}, "hidden_size: expected a positive integer, found '64'"),
        ({"num_heads": True}, "num_heads: expected a positive integer, found True"),
        ({"state_size": 0}, "state_size: expected a positive integer, found 0"),
        ({"layer_norm_epsilon": -1}, "layer_norm_epsilon: expected a positive number, found -1"),
        ({"time_step_limit": [1, 0]}, "time_step_limit: expected two numbers 0 <= low <= high"),
        ({"time_step_limit": "often"}, "time_step_limit: expected two numbers"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false, found 'yes'"),
        ({"n_groups": 3}, r"n_groups: expected a divisor of num_heads \(4\), found 3"),
        ({"expand": 4}, "expand asks for 256, num_heads x head_dim for 128"),
        ({"expand": "two"}, "expand: expected a positive number, found 'two'"),
        ({"intermediate_size": 100}, "intermediate_size asks for 100"),
    ],
    ids=str,
)
def test_what_longscan_does_not_compute_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = change(tiny_checkpoint(tmp_path), **config)
    with pytest.raises(ModelError, match=message) as caught:
        read_geometry(folder)
    assert str(folder / "config.json") in str(caught.value)


def test_one_error_tells_everything(tmp_path: Path) -> None:
    folder = change(tiny_checkpoint(tmp_path), hidden_act="relu", head_dim=None, num_hidden_layers=-1)
    with pytest.raises(ModelError) as caught:
        read_geometry(folder)
    assert all(f"\n  {key}: " in str(caught.value) for key in ("hidden_act", "head_dim", "num_hidden_layers"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "expected the folder of a checkpoint, found nothing"),
        ({}, "expected config.json or params.json of a Mamba-2, found an empty folder"),
        ({"notes.txt": "hello"}, "found notes.txt"),
        ({"params.json": "{}"}, "params.json: expected model_type mamba, as of Mamba-Codestral, found None: longscan runs Mamba-2 only"),
        ({"config.json": "{"}, "expected a JSON object, but it cannot be read"),
        ({"config.json": "[]"}, "expected a JSON object, found list"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_told(tmp_path: Path, files: dict[str, str] | None, message: str) -> None:
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text, "utf-8")
    with pytest.raises(ModelError, match=message):
        read_geometry(folder)

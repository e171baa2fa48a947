"""One Mamba-2 in every format: the same geometry, the same bits, and hidden states of the float64 recurrence.

What other loaders get wrong, in silence, and the tests that longscan does not:

* an original config read as Hugging Face's, which gives a 7B model's geometry:
      test_mamba_ssm_defaults_stand_where_ssm_cfg_is_silent_and_the_vocabulary_is_padded
* the original name of the embedding is not known, and it stays random:
      test_every_format_gives_the_same_bits[hugging_face_first_spelling]
      test_weights.test_one_error_lists_all_tensors_that_are_wrong
* ssm_cfg is not read:
      test_ssm_cfg_is_read_in_full
      test_variants_are_refused_by_name
      test_formats_malformed.test_codestral_with_the_geometry_of_one_group
* a limit of the time step is written as Infinity, null or text:
      test_a_limit_of_the_time_step_in_ssm_cfg
      test_model_config.test_a_limit_of_the_time_step_is_read_however_it_is_spelled
* A_log, dt_bias and D become bf16:
      test_files_of_any_dtype_and_decays_in_fp32
* pickles and a repository's code are run:
      test_formats_malformed.test_pickled_code_is_not_run
      test_no_code_of_a_checkpoint_is_run
      test_fetch.test_no_code_of_a_repository_is_run
* hybrids and Mamba-1 are taken for a Mamba-2:
      test_model_config.test_what_longscan_does_not_compute_is_refused_by_name
* eight groups and an untied head are lost; BOS and EOS are the config's defaults:
      test_codestral_has_mamba_ssm_defaults_and_eight_groups
      test_convert.test_token_ids_come_from_the_tokenizer_where_the_config_has_none
* prompt, pooling and end token are left out:
      test_recipe.test_a_folder_says_how_it_is_used
* the joins of a tokenizer.model are put in another order:
      test_tokenize_load.test_joins_are_those_of_the_scores_and_not_of_the_ids
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_formats import CODESTRAL, MAMBA2, WRITERS, config_of, mamba_ssm_config, rewrite, tensors_of, write_json
from fakes import tiny_checkpoint
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.pipeline import rules
from longscan.pipeline.errors import ModelError
from longscan.pipeline.model import load_model, model_hash, read_geometry
from longscan.pipeline.model.formats import AUTO, FORMATS, find_format
from longscan.pipeline.model.weights import load_weights, weight_files
from recurrence import truth

FAMILIES = {"mamba2": MAMBA2, "codestral": {**CODESTRAL, "num_layers": 1}}
LENGTH = 70


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the family's checkpoint in Hugging Face format, safetensors in one file."""
    return tiny_checkpoint(tmp_path_factory.mktemp(request.param) / "hugging_face", **FAMILIES[request.param])


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_weights(folder, read_geometry(folder), dtype=dtype)


def equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == weights[name].dtype, name
        assert torch.equal(weights[name], tensor), name


def hidden(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = load_model(folder, dtype=torch.float32, device="cpu", backend="torch")
    segments = Segments.pack([Entry(0, len(ids))], -(-len(ids) // TILE), "cpu")
    rows = torch.zeros(segments.num_rows, dtype=torch.int64)
    rows[: len(ids)] = ids
    with torch.inference_mode():
        return model.step(rows, segments, model.new_state(1))[0][: len(ids)]


def some_ids(vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(3))


def within_1e5_of_the_recurrence(folder: Path, source: Path, **options: Any) -> None:
    ids = some_ids(read_geometry(folder).vocab_size)
    assert (hidden(folder, ids).double() - truth(source, ids, **options).hidden_LD).abs().max() < 1e-5


@pytest.mark.parametrize("form", WRITERS)
def test_every_format_gives_the_same_bits(form: str, family: Path, tmp_path: Path) -> None:
    folder = rewrite(family, tmp_path / form, form)
    assert form.startswith(find_format(folder))
    expected = read_geometry(family)
    assert read_geometry(folder) == replace(expected, bos_id=read_geometry(folder).bos_id, eos_id=read_geometry(folder).eos_id)
    equal(load(folder), load(family))


def test_hidden_states_are_those_of_the_recurrence(family: Path, tmp_path: Path) -> None:
    for form in ("hugging_face_bin_shards", "state_spaces", "mistral"):
        folder = rewrite(family, tmp_path / form, form)
        assert torch.equal(hidden(folder, some_ids(300)), hidden(family, some_ids(300)))
    within_1e5_of_the_recurrence(folder, family)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["hugging_face_bin", "state_spaces", "mistral"])
def test_files_of_any_dtype_and_decays_in_fp32(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", dtype=dtype, **MAMBA2)
    weights = load(rewrite(source, tmp_path / form, form), torch.bfloat16)
    for name, tensor in weights.items():
        kept = name.endswith(("norm", "A_log", "dt_bias", "D"))
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
    stored = tensors_of(source)
    assert torch.equal(weights["layers.1.A_log"], stored["backbone.layers.1.mixer.A_log"].float())
    assert torch.equal(weights["layers.1.in_proj"], stored["backbone.layers.1.mixer.in_proj.weight"].bfloat16())


def test_mamba_ssm_defaults_stand_where_ssm_cfg_is_silent_and_the_vocabulary_is_padded(tmp_path: Path) -> None:
    """transformers' Mamba2Config reads the same file without complaint and returns Codestral's geometry."""
    config = {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}}
    write_json(tmp_path / "config.json", config)
    g = read_geometry(tmp_path)
    assert (g.d_model, g.num_layers, g.num_heads, g.head_dim, g.num_groups, g.state_size, g.conv_kernel) == (768, 24, 24, 64, 1, 128, 4)
    assert (g.vocab_size, g.tied, g.eps, g.dt_limit) == (50280, True, 1e-5, (0.0, math.inf))
    assert (g.use_bias, g.use_conv_bias, g.norm_before_gate, g.residual_in_fp32, g.has_head) == (False, True, False, True, True)
    write_json(tmp_path / "config.json", config | {"pad_vocab_size_multiple": 16, "tie_embeddings": False, "residual_in_fp32": False})
    g = read_geometry(tmp_path)
    assert (g.vocab_size, g.tied, g.residual_in_fp32) == (50288, False, False)


def test_codestral_has_mamba_ssm_defaults_and_eight_groups(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_layers=1, **CODESTRAL)
    folder = rewrite(source, tmp_path / "mistral", "mistral")
    params = json.loads((folder / "params.json").read_text("utf-8")) | {"dim": 4096, "n_layers": 64, "vocab_size": 32768}
    write_json(folder / "params.json", params)
    g = read_geometry(folder)
    assert (g.num_heads, g.num_groups, g.state_size, g.tied, g.vocab_size, g.bos_id) == (128, 8, 128, False, 32768, None)
    assert round(g.num_parameters, -7) == 7_290_000_000


def test_ssm_cfg_is_read_in_full(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "d_model": 48,
        "head_dim": 24,
        "num_groups": 3,
        "state_size": 8,
        "conv_kernel": 3,
        "expand": 3,
        "vocab_size": 304,
    }
    source = tiny_checkpoint(tmp_path / "source", **shape, time_step_limit=(0.01, 0.05), use_bias=True, use_conv_bias=False)
    cfg: dict[str, Any] = {
        "headdim": 24,
        "ngroups": 3,
        "d_state": 8,
        "d_conv": 3,
        "expand": 3,
        "dt_limit": [0.01, 0.05],
        "bias": True,
        "conv_bias": False,
    }
    spelled: dict[str, Any] = {
        "chunk_size": 64,
        "D_has_hdim": False,
        "rmsnorm": True,
        "norm_before_gate": True,
        "d_ssm": 144,
        "dt_min": 0.01,
    }
    folder = rewrite(source, tmp_path / "folder", "state_spaces", **cfg, **spelled)
    g = read_geometry(folder)
    assert g == replace(read_geometry(source), norm_before_gate=True, bos_id=None, eos_id=None)
    within_1e5_of_the_recurrence(folder, source, norm_before_gate=True)


@pytest.mark.parametrize("written", ["[0.0, Infinity]", "null", '[0.0, "inf"]', '"(0.0, inf)"'])
def test_a_limit_of_the_time_step_in_ssm_cfg(written: str, tmp_path: Path) -> None:
    text = json.dumps({"d_model": 64, "n_layer": 1, "vocab_size": 64, "ssm_cfg": {"layer": "Mamba2", "dt_limit": "HERE"}})
    (tmp_path / "config.json").write_text(text.replace('"HERE"', written), "utf-8")
    assert read_geometry(tmp_path).dt_limit == (0.0, math.inf)


@pytest.mark.parametrize(
    ("top", "ssm_cfg", "message"),
    [
        ({}, {"rmsnorm": False}, "ssm_cfg.rmsnorm: expected true, found False: without it the mixer has no norm"),
        ({}, {"D_has_hdim": True}, "ssm_cfg.D_has_hdim: expected false, found True: it has a D for every channel"),
        ({}, {"d_ssm": 64}, r"ssm_cfg.d_ssm: expected null or the whole inner width \(128\), found 64: the other channels are an MLP"),
        ({}, {"layer": "Mamba1"}, "ssm_cfg.layer: expected 'Mamba2', found 'Mamba1': it is a Mamba-1, another recurrence"),
        ({}, {"layer": "Mamba3"}, "ssm_cfg.layer: expected 'Mamba2', found 'Mamba3': longscan runs Mamba-2 only"),
        ({}, {"rope_fraction": 0.5}, "ssm_cfg.rope_fraction: expected settings of mamba_ssm's Mamba2 only, found 0.5"),
        ({}, {"headdim": 48}, r"ssm_cfg.headdim: expected a divisor of expand x d_model \(128\), found 48"),
        ({}, {"ngroups": 3}, r"ssm_cfg.ngroups: expected a divisor of the number of heads \(2\), found 3"),
        ({}, {"dt_limit": [1, 0]}, "ssm_cfg.dt_limit: expected two numbers 0 <= low <= high"),
        ({}, {"expand": 1.5}, "ssm_cfg.expand: expected a positive integer, found 1.5"),
        ({"ssm_cfg": None}, {}, "ssm_cfg.layer: expected 'Mamba2', found None: it is a Mamba-1"),
        ({"ssm_cfg": "Mamba2"}, {}, "ssm_cfg: expected an object, found 'Mamba2'"),
        (
            {"attn_layer_idx": [9, 18]},
            {},
            r"attn_layer_idx: expected no layer, found \[9, 18\]: it has attention layers, whose cache grows",
        ),
        ({"d_intermediate": 128}, {}, "d_intermediate: expected 0, found 128: it has MLP layers"),
        ({"rms_norm": False}, {}, "rms_norm: longscan computes True or None only, found False"),
        ({"bidirectional": True}, {}, "bidirectional: longscan computes False or None only, found True"),
        ({"norm_epsilon": 1e-6}, {}, "norm_epsilon: longscan computes 1e-05 or None only, found 1e-06"),
        ({"d_model": None}, {}, "d_model: expected a positive integer, found nothing"),
        ({"pad_vocab_size_multiple": 0}, {}, "pad_vocab_size_multiple: expected a positive integer, found 0"),
    ],
    ids=str,
)
def test_variants_are_refused_by_name(top: dict[str, Any], ssm_cfg: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 67, "n_groups": 1, "tie_word_embeddings": True}
    write_json(tmp_path / "config.json", mamba_ssm_config(source, **ssm_cfg) | top)
    with pytest.raises(ModelError, match=message) as caught:
        read_geometry(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"model_type": "transformer", "n_heads": 32},
            "expected model_type mamba, as of Mamba-Codestral, found 'transformer': a transformer",
        ),
        ({"model_type": None, "n_heads": 32}, "found None: a transformer with attention"),
        ({"n_groups": None}, "n_groups: expected a value, found nothing"),
        ({"dim": -1}, "dim: expected a positive integer, found -1"),
        ({"dim": 100}, r"headdim: expected a divisor of expand x d_model \(200\), found 64"),
        ({"n_groups": 3}, r"n_groups: expected a divisor of the number of heads \(2\), found 3"),
        ({"rms_norm": False}, "rms_norm: longscan computes True or None only, found False"),
        ({"tie_embeddings": "no"}, "tie_embeddings: expected true or false, found 'no'"),
    ],
    ids=str,
)
def test_params_that_longscan_does_not_compute_are_refused(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = rewrite(tiny_checkpoint(tmp_path / "source", num_layers=1, **MAMBA2), tmp_path / "mistral", "mistral")
    file = folder / "params.json"
    write_json(file, json.loads(file.read_text("utf-8")) | params)
    with pytest.raises(ModelError, match=message) as caught:
        read_geometry(folder)
    assert str(file) in str(caught.value)


def test_a_format_that_is_named_overrides_what_the_folder_looks_like(tmp_path: Path) -> None:
    """Codestral's repository holds the model twice."""
    source = tiny_checkpoint(tmp_path / "source", num_layers=1, **CODESTRAL)
    other = rewrite(tiny_checkpoint(tmp_path / "other", num_layers=1, seed=5, **CODESTRAL), tmp_path / "mistral", "mistral")
    for file in other.iterdir():
        file.rename(source / file.name)
    assert find_format(source) == "hugging_face"
    assert [file.name for file in weight_files(source, format="mistral")] == ["consolidated.safetensors"]
    assert len({model_hash(source), model_hash(source, format="mistral"), model_hash(source, format="hugging_face")}) == 2
    one = load_weights(source, read_geometry(source), format="mistral")
    equal(one, load(rewrite(tmp_path / "other", tmp_path / "again", "mistral")))
    assert not torch.equal(one["embedding"], load(source)["embedding"])
    for name, message in (("state_spaces", "ssm_cfg.layer: expected 'Mamba2'"), ("gguf", "format: expected one of auto, ")):
        with pytest.raises(ModelError, match=message):
            read_geometry(source, format=name)
    (source / "params.json").unlink()
    with pytest.raises(ModelError, match=r"expected params\.json, found "):
        read_geometry(source, format="mistral")


def test_the_configuration_knows_every_format() -> None:
    assert set(rules.FORMATS) == {AUTO, *FORMATS}


def test_the_hash_covers_the_files_that_are_read(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_layers=1, **CODESTRAL)
    for form, changed in (
        ("state_spaces", "config.json"),
        ("hugging_face_bin_shards", "pytorch_model-00002-of-00002.bin"),
        ("mistral", "params.json"),
    ):
        folder = rewrite(source, tmp_path / form, form)
        before = model_hash(folder)
        (folder / "notes.txt").write_text("notes", "utf-8")
        assert model_hash(folder) == before
        with (folder / changed).open("ab") as file:
            file.write(b"\n")
        assert model_hash(folder) != before


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "folder", auto_map={"AutoModel": "modeling.Model", "AutoConfig": "modeling.Config"})
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", "utf-8")
    hidden(folder, some_ids(320))
    assert not (tmp_path / "ran").exists()


def test_links_into_the_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    plain = tiny_checkpoint(tmp_path / "plain")
    repository = tmp_path / "models--someone--mamba2"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(plain.iterdir()):
        file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert config_of(snapshot)["model_type"] == "mamba2"
    assert load(snapshot)["embedding"].shape == (320, 64)
    (tmp_path / "link").symlink_to(snapshot)
    assert load(tmp_path / "link")["embedding"].shape == (320, 64)

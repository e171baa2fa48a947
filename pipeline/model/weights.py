"""A checkpoint's tensors, under one set of names whatever format they came in.

    embedding [V, D]   head [V, D]   final_norm [D]          head is the embedding itself where they are tied
    layers.<l>.  norm [D]   in_proj [2I + 2GN + H, D]   in_proj_bias   conv_weight [C, K]   conv_bias [C]
                 A_log [H]   dt_bias [H]   D [H]   gated_norm [I]   out_proj [D, I]   out_proj_bias

The rows of in_proj are z (I), x (I), B (G N), C (G N), dt (H). Norms, A_log, dt_bias and D are fp32 in any dtype: cast to bf16
they cost more accuracy than all products together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from longscan.pipeline.errors import ModelError
from longscan.pipeline.model.config import Mamba2Geometry, read_json
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "BF16", "F16")
"""Dtypes of tensors in files, as safetensors names them."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    name: str
    """The internal name."""
    shape: tuple[int, ...]
    """In the file."""
    fp32: bool = False


@dataclass(frozen=True, slots=True)
class _Found:
    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


def load_weights(
    folder: str | Path, geometry: Mamba2Geometry, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Read the safetensors files of `folder` onto `device`, one tensor at a time.

    dtype: of the embedding, the projections and the convolution; the rest is fp32.

    Raises ModelError where files are missing or broken, and, all in one, where tensors are missing, unexpected, of another
    shape, of no floating-point dtype, or hold NaN or infinity.
    """
    folder = Path(folder)
    wanted, found = _hugging_face(geometry), _find(folder)
    _compare(folder, wanted, found, geometry)
    weights: dict[str, torch.Tensor] = {}
    broken: list[str] = []
    for file in sorted({tensor.file for tensor in found.values()}):
        with _opened(file, device) as tensors:
            for name, tensor in found.items():
                if tensor.file != file:
                    continue
                # A copy: what safetensors hands out on a CPU is the mapped file, which may change or vanish under a long run.
                values = tensors.get_tensor(tensor.key).to(device, torch.float32 if wanted[name].fp32 else dtype, copy=True)
                if not bool(torch.isfinite(values).all()):
                    broken.append(f"{tensor.key} ({file.name})")
                weights[wanted[name].name] = values.squeeze(1) if name.endswith("conv1d.weight") else values
    if broken:
        raise ModelError(f"{folder}: expected finite weights, found NaN or infinity in {', '.join(broken)}. Download the checkpoint again.")
    if geometry.tied:
        _tie(folder, weights)
    return weights


def check_weights(folder: str | Path, geometry: Mamba2Geometry) -> None:
    """Raise ModelError as `load_weights` does, as far as the files' headers tell."""
    folder = Path(folder)
    _compare(folder, _hugging_face(geometry), _find(folder), geometry)


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of `folder`, by its index where it has one, or ModelError."""
    folder = Path(folder)
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{folder / INDEX}: expected a weight_map of file names, found none. Download the checkpoint again.")
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(
                f"{folder / INDEX}: expected plain file names in the folder, found {', '.join(outside)}. Do not use this checkpoint."
            )
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ModelError(f"{folder}: expected the {len(names)} files of {INDEX}, missing {', '.join(missing)}. Download them.")
        return [folder / name for name in names]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    found = sorted(entry.name for entry in folder.iterdir() if entry.suffix in {".bin", ".safetensors", ".pt", ".pth"})
    hint = "Convert the weights to safetensors." if found else "Download the checkpoint again, or check model.path."
    raise ModelError(f"{folder}: expected {SINGLE} or {INDEX}, found {', '.join(found) or 'no weights'}. {hint}")


def model_hash(folder: str | Path) -> str:
    """sha256 over config.json and the weight files, names and contents: what a run's fingerprint knows the model by."""
    digest = hashlib.sha256()
    for file in [Path(folder) / "config.json", *weight_files(folder)]:
        try:
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise ModelError(f"{folder}: expected config.json and weights that can be read: {error}. Check model.path.") from error
        digest.update(f"{file.name}\n{content}\n".encode())
    return digest.hexdigest()


def _hugging_face(geometry: Mamba2Geometry) -> dict[str, _Wanted]:
    """What a Hugging Face checkpoint holds, by its names without the prefix `backbone.`."""
    g = geometry
    wanted = {
        "embeddings.weight": _Wanted("embedding", (g.vocab_size, g.d_model)),
        "norm_f.weight": _Wanted("final_norm", (g.d_model,), True),
    }
    if g.has_head:
        wanted["lm_head.weight"] = _Wanted("head", (g.vocab_size, g.d_model))
    for layer in range(g.num_layers):
        tensors = {
            "norm.weight": _Wanted("norm", (g.d_model,), True),
            "mixer.in_proj.weight": _Wanted("in_proj", (g.projected, g.d_model)),
            "mixer.conv1d.weight": _Wanted("conv_weight", (g.channels, 1, g.conv_kernel)),
            "mixer.A_log": _Wanted("A_log", (g.num_heads,), True),
            "mixer.dt_bias": _Wanted("dt_bias", (g.num_heads,), True),
            "mixer.D": _Wanted("D", (g.num_heads,), True),
            "mixer.norm.weight": _Wanted("gated_norm", (g.inner,), True),
            "mixer.out_proj.weight": _Wanted("out_proj", (g.d_model, g.inner)),
        }
        if g.use_conv_bias:
            tensors["mixer.conv1d.bias"] = _Wanted("conv_bias", (g.channels,))
        if g.use_bias:
            tensors["mixer.in_proj.bias"] = _Wanted("in_proj_bias", (g.projected,))
            tensors["mixer.out_proj.bias"] = _Wanted("out_proj_bias", (g.d_model,))
        for key, tensor in tensors.items():
            wanted[f"layers.{layer}.{key}"] = _Wanted(f"layers.{layer}.{tensor.name}", tensor.shape, tensor.fp32)
    return wanted


def _find(folder: Path) -> dict[str, _Found]:
    """The tensors in the files, by name without the prefix `backbone.`, which base models are saved without."""
    found: dict[str, _Found] = {}
    for file in weight_files(folder):
        with _opened(file, "cpu") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - an open file, which cannot be iterated
                part = tensors.get_slice(key)
                name = key.removeprefix("backbone.")
                # The original spelling of the first conversions.
                name = "embeddings.weight" if name == "embedding.weight" else name
                if name in found:
                    raise ModelError(
                        f"{folder}: expected each tensor once, found {found[name].key} and {key}. Download the checkpoint again."
                    )
                found[name] = _Found(file, key, tuple(part.get_shape()), str(part.get_dtype()))
    return found


@contextmanager
def _opened(file: Path, device: torch.device | str) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: expected a safetensors file, but it cannot be read: {error}. Download it again.") from error


def _compare(folder: Path, wanted: Mapping[str, _Wanted], found: Mapping[str, _Found], geometry: Mamba2Geometry) -> None:
    """Raise one ModelError with all that differs."""
    optional = {"lm_head.weight"} if geometry.tied else set()
    problems = [f"missing: {name} {list(wanted[name].shape)}" for name in wanted if name not in found and name not in optional]
    for name, tensor in found.items():
        if name not in wanted:
            problems.append(f"unexpected: {tensor.key} {list(tensor.shape)} ({tensor.file.name})")
        elif tensor.shape != wanted[name].shape:
            problems.append(f"shape: {tensor.key} is {list(tensor.shape)}, expected {list(wanted[name].shape)} ({tensor.file.name})")
        elif tensor.dtype not in FLOATS:
            problems.append(f"dtype: {tensor.key} is {tensor.dtype}, expected one of {', '.join(FLOATS)} ({tensor.file.name})")
    if problems:
        raise ModelError(
            f"{folder}: expected the {len(wanted)} tensors that config.json describes, found\n  "
            + "\n  ".join(problems)
            + "\nconfig.json and the weights do not belong together, or the checkpoint is not whole: download it again."
        )


def _tie(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Make the head the embedding; a head in the files that is another one is an error, since only one of the two can be meant."""
    if "head" in weights and not torch.equal(weights["head"], weights["embedding"]):
        raise ModelError(
            f"{folder}: config.json says tie_word_embeddings, but lm_head.weight is not the embedding."
            " Set tie_word_embeddings to false in config.json to use lm_head.weight, or remove lm_head.weight."
        )
    weights["head"] = weights["embedding"]

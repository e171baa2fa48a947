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
from dataclasses import dataclass
from pathlib import Path

import torch
from longscan.pipeline.errors import ModelError
from longscan.pipeline.model.config import Mamba2Geometry
from longscan.pipeline.model.formats import AUTO, FORMATS, find_format
from longscan.pipeline.model.formats.files import FLOATS, Stored, opened


@dataclass(frozen=True, slots=True)
class _Wanted:
    name: str
    """The internal name."""
    shape: tuple[int, ...]
    """In the file."""
    fp32: bool = False


def load_weights(
    folder: str | Path,
    geometry: Mamba2Geometry,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    format: str = AUTO,
) -> dict[str, torch.Tensor]:
    """Read the files of `folder` onto `device`, one tensor at a time.

    dtype: of the embedding, the projections and the convolution; the rest is fp32. format: one of FORMATS, or by content.

    Raises ModelError where files are missing or broken, and, all in one, where tensors are missing, unexpected, of another
    shape, of no floating-point dtype, or hold NaN or infinity, be it in `dtype` only.
    """
    folder, format = Path(folder), find_format(folder, format)
    check_weights(folder, geometry, format=format)
    wanted = _wanted(geometry)
    weights: dict[str, torch.Tensor] = {}
    too_large: list[str] = []
    for name, values in read_tensors(folder, geometry, format=format, device=device):
        # A copy: what is read may be the mapped file, which may change or vanish under a long run.
        tensor = values.to(device, torch.float32 if wanted[name].fp32 else dtype, copy=True)
        narrower = torch.finfo(tensor.dtype).max < torch.finfo(values.dtype).max
        if narrower and not all_finite(tensor) and bool((tensor.isinf() & values.to(device).isfinite()).any()):
            too_large.append(f"{name} in {tensor.dtype}")
        weights[wanted[name].name] = tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor
    if too_large:
        raise ModelError(
            f"{folder}: expected weights within the range of their dtype, found larger ones in {', '.join(too_large)}."
            " Use model.dtype=bfloat16 or float32."
        )
    if geometry.tied:
        if "head" in weights and not torch.equal(weights["head"], weights["embedding"]):
            raise not_tied(folder, format)
        weights["head"] = weights["embedding"]
    return weights


def read_tensors(
    folder: Path, geometry: Mamba2Geometry, *, format: str, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor as it is in the files, by its Hugging Face name without the prefix `backbone.`, file by file.

    A tensor may be a view of the mapped file. Raises ModelError as `load_weights` does; of values that are not finite at the end.
    """
    found = check_weights(folder, geometry, format=format)
    broken: list[str] = []
    for file in sorted({tensor.file for tensor in found.values()}):
        with opened(file, device) as tensors:
            for name, tensor in found.items():
                if tensor.file == file:
                    values = tensors.read(tensor.key)
                    if not all_finite(values):
                        broken.append(f"{tensor.key} ({file.name})")
                    yield name, values
    if broken:
        raise ModelError(f"{folder}: expected finite weights, found NaN or infinity in {', '.join(broken)}. Download the checkpoint again.")


def all_finite(values: torch.Tensor) -> bool:
    """Whether none is NaN or infinity: no sum with one of these is finite. To look at each, on a CPU, takes thirty times as long."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def check_weights(folder: str | Path, geometry: Mamba2Geometry, *, format: str = AUTO) -> dict[str, Stored]:
    """The tensors in the files, by Hugging Face name without the prefix `backbone.`; ModelError as `load_weights` raises it,
    as far as the files' headers tell.
    """
    folder, format = Path(folder), find_format(folder, format)
    found = _find(folder, format)
    if geometry.num_layers > len(found):  # so that no config makes a list of millions of names
        config = FORMATS[format].CONFIG
        raise ModelError(
            f"{folder}: expected the tensors of {geometry.num_layers} layers, as {config} says, found {len(found)} tensors in all."
            f" {config} and the weights do not belong together, or the checkpoint is not whole: download it again."
        )
    _compare(folder, _wanted(geometry), found, geometry, FORMATS[format].CONFIG)
    return found


def weight_files(folder: str | Path, *, format: str = AUTO) -> list[Path]:
    """The files that hold the tensors of `folder`, or ModelError."""
    return FORMATS[find_format(folder, format)].weight_files(Path(folder))


def model_hash(folder: str | Path, *, format: str = AUTO) -> str:
    """sha256 over the config and the weight files, names and contents: what a run's fingerprint knows the model by."""
    digest = hashlib.sha256()
    config = FORMATS[find_format(folder, format)].CONFIG
    for file in [Path(folder) / config, *weight_files(folder, format=format)]:
        try:
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise ModelError(f"{folder}: expected {config} and weights that can be read: {error}. Check model.path.") from error
        digest.update(f"{file.name}\n{content}\n".encode())
    return digest.hexdigest()


def hugging_face_key(name: str, geometry: Mamba2Geometry) -> str:
    """A tensor's name in a Hugging Face file, of its name without the prefix `backbone.`, which is there where the model has a head."""
    return f"backbone.{name}" if geometry.has_head and name != "lm_head.weight" else name


def as_hugging_face(weights: Mapping[str, torch.Tensor], geometry: Mamba2Geometry) -> dict[str, torch.Tensor]:
    """What `load_weights` gave as a Hugging Face file has it: its names and shapes, without a head that is the embedding."""
    return {
        hugging_face_key(name, geometry): weights[wanted.name].reshape(wanted.shape)
        for name, wanted in _wanted(geometry).items()
        if not (geometry.tied and wanted.name == "head")
    }


def _wanted(geometry: Mamba2Geometry) -> dict[str, _Wanted]:
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


def _find(folder: Path, format: str) -> dict[str, Stored]:
    reader = FORMATS[format]
    found: dict[str, Stored] = {}
    for file in reader.weight_files(folder):
        with opened(file) as content:
            for tensor in content.tensors:
                name = reader.canonical(tensor.key)
                if name in found:
                    raise ModelError(
                        f"{folder}: expected each tensor once, found {found[name].key} and {tensor.key}. Download the checkpoint again."
                    )
                found[name] = tensor
    return found


def _compare(folder: Path, wanted: Mapping[str, _Wanted], found: Mapping[str, Stored], geometry: Mamba2Geometry, config: str) -> None:
    """Raise one ModelError with all that differs."""
    optional = {"lm_head.weight"} if geometry.tied else set()
    problems = [f"missing: {name} {list(wanted[name].shape)}" for name in wanted if name not in found and name not in optional]
    for name, tensor in found.items():
        if name not in wanted:
            problems.append(f"unexpected: {tensor.key} {list(tensor.shape)} ({tensor.file.name})")
        elif tensor.dtype not in FLOATS:
            problems.append(f"dtype: {tensor.key} is {tensor.dtype}, expected one of {', '.join(FLOATS)} ({tensor.file.name})")
        elif tensor.shape != wanted[name].shape:
            problems.append(f"shape: {tensor.key} is {list(tensor.shape)}, expected {list(wanted[name].shape)} ({tensor.file.name})")
    if problems:
        raise ModelError(
            f"{folder}: expected the {len(wanted)} tensors that {config} describes, found\n  "
            + "\n  ".join(problems)
            + f"\n{config} and the weights do not belong together, or the checkpoint is not whole: download it again."
        )


def not_tied(folder: Path, format: str) -> ModelError:
    """Head and embedding are to be one, and the files have two: only one of them can be meant."""
    reader = FORMATS[format]
    return ModelError(
        f"{folder}: {reader.CONFIG} says {reader.TIED_KEY}, but lm_head.weight is not the embedding."
        f" Set {reader.TIED_KEY} to false in {reader.CONFIG} to use lm_head.weight, or remove lm_head.weight."
    )

"""The files of a checkpoint: which ones hold its tensors, what is in them, and nothing outside its folder.

safetensors are mapped and read tensor by tensor. PyTorch's own files are pickles: they are read with weights_only=True,
which runs no code of theirs, and mapped as well where they are zip archives (the format since PyTorch 1.6).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from longscan.pipeline.errors import ModelError
from longscan.pipeline.model.formats.fields import read_json
from safetensors import SafetensorError, safe_open

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of weights, as safetensors names them."""
_NAMES = {dtype: name for name, dtype in FLOATS.items()}
INDEX_SUFFIX = ".index.json"
SAFETENSORS = "model.safetensors"
PYTORCH = "pytorch_model.bin"
CONSOLIDATED = "consolidated.safetensors"


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it; of what is no plain tensor in memory, what it is."""


@dataclass(frozen=True, slots=True)
class Opened:
    """One file of tensors, open."""

    tensors: tuple[Stored, ...]
    read: Callable[[str], torch.Tensor]
    """Key -> the tensor, possibly a view of the mapped file."""


def inside(folder: Path, name: str) -> Path:
    """`folder / name`, or ModelError where that is a link to a place outside. A link to the hub cache's blobs is at home."""
    path, home = folder / name, folder.resolve()
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    real = path.resolve()
    if not any(real.is_relative_to(place) for place in homes):
        raise ModelError(
            f"{path}: expected a file of the checkpoint, found a link that leaves its folder, to {real}."
            " Put a copy of the file in its place if you trust it."
        )
    return path


def find_weights(folder: Path, *singles: str) -> list[Path]:
    """The files that hold a checkpoint's tensors: of the first of `singles` that is there, as the shards of its index or alone."""
    for single in singles:
        if (folder / (single + INDEX_SUFFIX)).exists():
            return _shards(folder, single + INDEX_SUFFIX)
        if (folder / single).is_symlink() or (folder / single).exists():
            return [inside(folder, single)]
    found = sorted(entry.name for entry in folder.iterdir() if entry.suffix in {".bin", ".safetensors", ".pt", ".pth", ".gguf"})
    expected = " or ".join(f"{single} (or {single}{INDEX_SUFFIX})" for single in singles)
    raise ModelError(
        f"{folder}: expected {expected}, found {', '.join(found) or 'no weights'}. Download the checkpoint again, or check model.path."
    )


def _shards(folder: Path, index: str) -> list[Path]:
    weight_map = read_json(inside(folder, index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{folder / index}: expected a weight_map of file names, found none. Download the checkpoint again.")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(
            f"{folder / index}: expected plain file names in the folder, found {', '.join(outside)}. Do not use this checkpoint."
        )
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelError(f"{folder}: expected the {len(names)} files of {index}, missing {', '.join(missing)}. Download them.")
    return [inside(folder, name) for name in names]


@contextmanager
def opened(file: Path, device: torch.device | str = "cpu") -> Iterator[Opened]:
    """The tensors of one file, those of safetensors on `device`, others on the CPU. ModelError where the file cannot be read."""
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt", device=str(device)) as tensors:
                parts = {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118 - an open file, which cannot be iterated
                found = tuple(Stored(file, key, tuple(part.get_shape()), str(part.get_dtype())) for key, part in parts.items())
                yield Opened(found, tensors.get_tensor)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: expected a safetensors file, but it cannot be read: {error}. Download it again.") from error
    else:
        loaded = _unpickled(file)
        yield Opened(tuple(_described(file, key, value) for key, value in loaded.items()), loaded.__getitem__)


def _unpickled(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            is_zip = stream.read(4) == b"PK\x03\x04"
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a damaged or hostile pickle raises anything
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found:
            message = f"{file}: expected tensors and nothing else, found {found[1]}, which was not run. Do not use this checkpoint."
        else:
            message = f"{file}: expected a file of tensors as torch.save writes it, but it cannot be read. Download it again."
        raise ModelError(message) from error
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ModelError(f"{file}: expected tensors by name, found {type(loaded).__name__}. Save the model's state_dict alone.")
    return loaded


def _described(file: Path, key: str, value: Any) -> Stored:
    if not isinstance(value, torch.Tensor):
        return Stored(file, key, (), f"{type(value).__name__}, no tensor")
    plain = value.layout is torch.strided and value.device.type == "cpu"
    dtype = _NAMES.get(value.dtype, str(value.dtype)) if plain else f"a {value.layout} tensor on {value.device}"
    return Stored(file, key, tuple(value.shape), dtype)

"""The formats that a Mamba-2 comes in. What a folder holds decides which one it is; a name decides where it is given.

Each format is a module: what it is recognised by, how its geometry is read, which files hold its tensors, and what
Hugging Face calls each of them. From there on all formats are one (`longscan.pipeline.model.weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from longscan.pipeline.errors import ModelError
from longscan.pipeline.model.config import Mamba2Geometry
from longscan.pipeline.model.formats import hugging_face, mistral, state_spaces

AUTO = "auto"


class Format(Protocol):
    """What a format's module has."""

    CONFIG: str
    """Name of the file with the geometry."""
    TIED_KEY: str
    """Its key that makes head and embedding one."""

    def read_geometry(self, folder: Path) -> Mamba2Geometry: ...
    def weight_files(self, folder: Path) -> list[Path]: ...
    def canonical(self, key: str) -> str: ...


FORMATS: Mapping[str, Format] = {"state_spaces": state_spaces, "hugging_face": hugging_face, "mistral": mistral}


def find_format(folder: str | Path, name: str = AUTO) -> str:
    """The name of the format that `folder` is in: `name`, or by what it holds.

    A folder that holds a checkpoint twice, in two formats, is taken in the one that it has the weights of.
    Raises ModelError where it is no checkpoint.
    """
    folder = Path(folder)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise ModelError(f"{folder}: expected the folder of a checkpoint, found {found}. Check model.path.")
    if name != AUTO and name not in FORMATS:
        raise ModelError(f"format: expected one of {', '.join((AUTO, *FORMATS))}, found {name!r}")
    candidates = [known for known, reader in FORMATS.items() if (folder / reader.CONFIG).exists() and name in (AUTO, known)]
    if "state_spaces" in candidates and "hugging_face" in candidates:
        candidates.remove("hugging_face" if state_spaces.is_original(folder) else "state_spaces")
    if not candidates:
        wanted = FORMATS[name].CONFIG if name != AUTO else "config.json or params.json of a Mamba-2"
        entries = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "an empty folder"
        raise ModelError(f"{folder}: expected {wanted}, found {entries}. Check model.path.")
    return next((known for known in candidates if _has_weights(folder, FORMATS[known])), candidates[0])


def read_geometry(folder: str | Path, *, format: str = AUTO) -> Mamba2Geometry:
    """The geometry of the checkpoint in `folder`.

    Raises ModelError where it is no checkpoint, one of another architecture, or one with features that longscan does not compute.
    """
    return FORMATS[find_format(folder, format)].read_geometry(Path(folder))


def _has_weights(folder: Path, reader: Format) -> bool:
    try:
        return bool(reader.weight_files(folder))
    except ModelError:
        return False

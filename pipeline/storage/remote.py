"""File systems elsewhere, by fsspec: one put of a whole object makes a file visible; nothing relies on renames or locks.

Raises whatever the file system does: each has exceptions of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "oci", "hf"})
"""Protocols of file systems without folders."""


def exists(fs: Any, path: str) -> bool:
    fs.invalidate_cache()
    return bool(fs.exists(path))


def children(fs: Any, folder: str) -> list[str]:
    """Names in a folder, sorted; none where it is not there."""
    try:
        listed = fs.ls(folder, detail=False, refresh=True)
    except FileNotFoundError:
        return []
    return sorted({name.rstrip("/").rpartition("/")[2] for name in listed} - {""})


def read_bytes(fs: Any, path: str) -> bytes | None:
    """What a file holds; None where it is not there."""
    try:
        data: bytes = fs.cat_file(path)
    except FileNotFoundError:
        return None
    return data


def remove(fs: Any, path: str) -> None:
    """Remove one file; one that is not there is fine."""
    with suppress(FileNotFoundError):
        fs.rm_file(path)


def remove_all(fs: Any, paths: Sequence[str]) -> None:
    """Remove files; those that are not there are fine."""
    with suppress(FileNotFoundError):
        fs.rm(list(paths))


def remove_tree(fs: Any, path: str) -> None:
    """Remove a file, or a folder with all that is in it; what is not there is fine."""
    with suppress(FileNotFoundError):
        fs.rm(path, recursive=True)


def write(fs: Any, path: str, data: bytes) -> None:
    """A whole file, in the place of one that is there."""
    _put(fs, path, lambda: fs.pipe_file(path, data))


def create(fs: Any, path: str, data: bytes) -> bool:
    """A whole file where none is, by a conditional put; False where one is."""
    try:
        _put(fs, path, lambda: fs.pipe_file(path, data, mode="create"))
    except FileExistsError:
        return False
    return True


def move(finished: str, fs: Any, path: str) -> None:
    """A finished local file becomes `path`, in the place of one that is there."""
    _put(fs, path, lambda: fs.put_file(finished, path))
    os.unlink(finished)


def _put(fs: Any, path: str, put: Callable[[], object]) -> None:
    """Folders are made where they are missing; on an object store, there are none, and what is missing is a bucket: a typo, to be told."""
    try:
        put()
    except FileNotFoundError:
        if OBJECT_STORES.intersection([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol):
            raise
        fs.makedirs(path.rstrip("/").rpartition("/")[0] or "/", exist_ok=True)
        put()

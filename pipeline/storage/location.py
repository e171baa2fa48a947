"""File systems and paths: what a user types -> where it is, and the few operations that the pipeline needs there.

Each is `disk`'s on the local disk and `remote`'s elsewhere; what it meets becomes an OutputError that says what to do.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from longscan.pipeline.errors import InputError, LongscanError, OutputError, again
from longscan.pipeline.storage import disk, remote
from longscan.pipeline.storage.redaction import redact, remember_secrets

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::[A-Za-z][A-Za-z0-9+.-]+)*://")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def is_uri(path: str) -> bool:
    return _URI.match(path) is not None


@dataclass(frozen=True)
class Location:
    """A file or folder, there or not. As a string it is what a user may see."""

    fs: Any
    """The fsspec file system that it lies on."""
    path: str
    """Its path on `fs`: absolute, if `fs` is the local disk."""
    uri: str
    """What opens it from anywhere: an absolute path or a URI. May hold secrets."""

    def __truediv__(self, name: str) -> Location:
        base = self.uri if self.uri.endswith("://") else self.uri.rstrip("/") + "/"
        return Location(self.fs, f"{self.path.rstrip('/')}/{name}", base + name)

    def __str__(self) -> str:
        return redact(self.uri)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    @property
    def parent(self) -> Location:
        if not self.name:
            return self
        uri = self.uri.rstrip("/")
        above = uri[: len(uri) - len(self.name)]
        above = above if above.endswith("://") else above.rstrip("/") or "/"
        return Location(self.fs, self.path.rstrip("/").rpartition("/")[0] or "/", above)


def locate(path: str, error: type[LongscanError] = InputError) -> Location:
    """Where a user's path or URI points. A path without a scheme is local, whatever characters it holds.

    Raises `error` where no file system is known for the scheme, or a package for it is missing.
    """
    if path.startswith("file://"):
        path = path.removeprefix("file://")
    if not path:
        raise error("expected a path or a URI, got an empty one")
    if not is_uri(path):
        path = os.path.abspath(path if os.path.lexists(path) else os.path.expanduser(path))
        return Location(LocalFileSystem(), path, path)
    remember_secrets(path)
    try:
        fs, found = url_to_fs(path)
    except ImportError as cause:
        raise error(f"{redact(path)}: its file system needs a package that is not installed: {cause}") from cause
    except Exception as cause:  # each file system has exceptions of its own
        raise error(f"{redact(path)}: expected a path or a URI that fsspec opens, got this: {redact(str(cause))}") from cause
    return Location(fs, found, path)


def exists(place: Location) -> bool:
    return disk.exists(place.path) if place.is_local else remote.exists(place.fs, place.path)


def children(folder: Location) -> list[str]:
    """Names in a folder, sorted; none where it is not there."""
    return disk.children(folder.path) if folder.is_local else remote.children(folder.fs, folder.path)


def read_bytes(place: Location) -> bytes | None:
    """What a file holds; None where it is not there."""
    return disk.read_bytes(place.path) if place.is_local else remote.read_bytes(place.fs, place.path)


def remove(place: Location) -> None:
    """Remove one file; one that is not there is fine."""
    with writing(place):
        if place.is_local:
            disk.remove(place.path)
        else:
            remote.remove(place.fs, place.path)


def remove_all(folder: Location, names: Sequence[str]) -> None:
    """Remove files of one folder; those that are not there are fine."""
    if folder.is_local:
        for name in names:
            remove(folder / name)
    elif names:
        with writing(folder):
            remote.remove_all(folder.fs, [(folder / name).path for name in names])


def remove_tree(place: Location) -> None:
    """Remove a file, or a folder with all that is in it; what is not there is fine."""
    with writing(place):
        if place.is_local:
            disk.remove_tree(place.path)
        else:
            remote.remove_tree(place.fs, place.path)


def atomic_write(place: Location, data: bytes) -> None:
    """Write a whole file, replacing one that is there: a reader sees the old one or the new one, never a part."""
    with writing(place):
        if place.is_local:
            disk.write(place.path, data)
        else:
            remote.write(place.fs, place.path, data)


def overwrite(place: Location, data: bytes) -> None:
    """Write over a local file that is there, in its place: what is left to do on a disk that has no room. A crash may tear it."""
    with writing(place):
        disk.overwrite(place.path, data)


def create_exclusive(place: Location, data: bytes) -> bool:
    """Write a whole file only where none is there. False where one is: of several at once, one gets True."""
    with writing(place):
        return disk.create(place.path, data) if place.is_local else remote.create(place.fs, place.path, data)


def commit_file(finished: str, place: Location) -> None:
    """Make the finished local file visible as `place`, replacing what is there: a rename on the same disk, else one put."""
    with writing(place):
        if place.is_local:
            disk.move(finished, place.path)
        else:
            remote.move(finished, place.fs, place.path)


@contextmanager
def writing(place: Location) -> Iterator[None]:
    """Turns what a file system says against writing into an OutputError that says where, and what to do."""
    try:
        yield
    except LongscanError:
        raise
    except Exception as error:
        if place.is_local and not isinstance(error, OSError):
            raise
        raise OutputError(f"{place}: cannot be written: {redact(str(error))}. {_advice(error)}") from error


def _advice(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number in _FULL:
        return f"Free some space or raise the quota, then {again(overwrite=True)} to go on: what is committed is kept"
    if number in _FORBIDDEN or isinstance(error, PermissionError):
        return "Set output.path to a place that this user may write to, or change its permissions"
    if number in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return "Set output.path to a folder: a part of this path is a file, or the file a folder"
    return "Set output.path to a place that can be written"

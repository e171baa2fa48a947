"""File systems and paths: what a user types -> where it is, and the few operations that the pipeline needs there.

On a local disk a file becomes visible whole: a temporary file beside it, fsync, rename, fsync of the folder. Elsewhere
one put of the whole object does the same; nothing here relies on renames or locks of an object store.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from longscan.pipeline.errors import InputError, LongscanError, OutputError, again

TEMPORARY = ".longscan-"
"""How the name of a temporary file begins, wherever one is made beside its target."""

OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "oci", "hf"})
"""Protocols of file systems without folders."""

SHORTEST_SECRET, LONG_NAME = 6, 16
"""Characters. A user without a password is a token where it is long; else it is a name, as of a container."""

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::[A-Za-z][A-Za-z0-9+.-]+)*://")
_USER = re.compile(r"(?<=://)[^/\s'\"]*@")
_QUERY = re.compile(r"(?<=://)([^\s'\"?]*)\?[^\s'\"]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


_secrets: set[str] = set()
"""Of the URIs that this process has met: libraries quote parts of a URI alone."""


def remember_secrets(text: str) -> None:
    """Mask the secrets of the URIs in `text` from now on, wherever they come up."""
    users = [found[0][:-1] for found in _USER.finditer(text)]
    words = [user.partition(":")[2] for user in users] + [user for user in users if len(user) >= LONG_NAME]
    for found in _QUERY.finditer(text):
        pairs = [pair.partition("=") for pair in found[0].partition("?")[2].split("&")]
        words += [value for name, _, value in pairs if "/" not in name]  # else it is a glob: `s3://bucket/part?/a=1/x.parquet`
    # A shorter one is a version or the like, and would mask half of what is said.
    _secrets.update(each for word in words for each in (word, unquote(word)) if len(each) >= SHORTEST_SECRET)


def redact(text: str) -> str:
    """`text` with every secret of the URIs in it masked: user and password, and the query. Local paths stay as they are."""
    text = _QUERY.sub(r"\1?***", _USER.sub("***@", text))
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def printable(text: str) -> str:
    """The same with every control character but line feeds and tabs written as an escape: a terminal obeys them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), redact(text))


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
    if place.is_local:
        return os.path.lexists(place.path)
    place.fs.invalidate_cache()
    return bool(place.fs.exists(place.path))


def children(folder: Location) -> list[str]:
    """Names in a folder, sorted; none where it is not there."""
    if folder.is_local:
        try:
            return sorted(os.listdir(folder.path))
        except FileNotFoundError:
            return []
    try:
        listed = folder.fs.ls(folder.path, detail=False, refresh=True)
    except FileNotFoundError:
        return []
    return sorted({name.rstrip("/").rpartition("/")[2] for name in listed} - {""})


def read_bytes(place: Location) -> bytes | None:
    """What a file holds; None where it is not there."""
    try:
        if place.is_local:
            with open(place.path, "rb") as file:
                return file.read()
        data: bytes = place.fs.cat_file(place.path)
    except FileNotFoundError:
        return None
    return data


def remove(place: Location) -> None:
    """Remove one file; one that is not there is fine."""
    with writing(place), suppress(FileNotFoundError):
        if place.is_local:
            os.unlink(place.path)
        else:
            place.fs.rm_file(place.path)


def remove_all(folder: Location, names: Sequence[str]) -> None:
    """Remove files of one folder; those that are not there are fine."""
    if folder.is_local:
        for name in names:
            remove(folder / name)
    elif names:
        with writing(folder), suppress(FileNotFoundError):
            folder.fs.rm([(folder / name).path for name in names])


def remove_tree(place: Location) -> None:
    """Remove a file, or a folder with all that is in it; what is not there is fine."""
    with writing(place), suppress(FileNotFoundError):
        if not place.is_local:
            place.fs.rm(place.path, recursive=True)
        elif os.path.isdir(place.path) and not os.path.islink(place.path):
            shutil.rmtree(place.path)
        else:
            os.unlink(place.path)


def atomic_write(place: Location, data: bytes) -> None:
    """Write a whole file, replacing one that is there: a reader sees the old one or the new one, never a part."""
    with writing(place):
        if not place.is_local:
            _put(place, lambda: place.fs.pipe_file(place.path, data))
            return
        temporary = _temporary_beside(place, data)
        try:
            os.replace(temporary, place.path)
        except BaseException:
            os.unlink(temporary)
            raise
        sync_folder(os.path.dirname(place.path))


def overwrite(place: Location, data: bytes) -> None:
    """Write over a local file that is there, in its place: what is left to do on a disk that has no room. A crash may tear it."""
    with writing(place), open(place.path, "r+b") as file:
        file.write(data)
        file.truncate()


def create_exclusive(place: Location, data: bytes) -> bool:
    """Write a whole file only where none is there. False where one is: of several at once, one gets True."""
    with writing(place):
        if not place.is_local:
            try:
                _put(place, lambda: place.fs.pipe_file(place.path, data, mode="create"))
            except FileExistsError:
                return False
            return True
        temporary = _temporary_beside(place, data)
        try:
            _link(temporary, place.path)
        except FileExistsError:
            return False
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
        sync_folder(os.path.dirname(place.path))
        return True


def commit_file(finished: str, place: Location) -> None:
    """Make the finished local file visible as `place`, replacing what is there: a rename on the same disk, else one put."""
    with writing(place):
        if not place.is_local:
            _put(place, lambda: place.fs.put_file(finished, place.path))
            os.unlink(finished)
            return
        _sync_file(finished)
        _make_folder(os.path.dirname(place.path))
        os.replace(finished, place.path)
        sync_folder(os.path.dirname(place.path))


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


def sync_folder(folder: str) -> None:
    """Make the names in a local folder outlive a loss of power. Some file systems cannot, and say EINVAL."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _advice(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number in _FULL:
        return f"Free some space or raise the quota, then {again(overwrite=True)} to go on: what is committed is kept"
    if number in _FORBIDDEN or isinstance(error, PermissionError):
        return "Set output.path to a place that this user may write to, or change its permissions"
    if number in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return "Set output.path to a folder: a part of this path is a file, or the file a folder"
    return "Set output.path to a place that can be written"


def _put(place: Location, put: Callable[[], object]) -> None:
    """Folders are made where they are missing; on an object store, there are none, and what is missing is a bucket: a typo, to be told."""
    try:
        put()
    except FileNotFoundError:
        protocol = place.fs.protocol
        if OBJECT_STORES.intersection([protocol] if isinstance(protocol, str) else protocol):
            raise
        place.fs.makedirs(place.parent.path, exist_ok=True)
        put()


def _make_folder(folder: str) -> None:
    """Make a folder and those above it, so that their names outlive a loss of power as their files do."""
    if not os.path.isdir(folder):
        above = os.path.dirname(folder)
        _make_folder(above)
        os.makedirs(folder, exist_ok=True)
        sync_folder(above)


def _temporary_beside(place: Location, data: bytes) -> str:
    folder, name = os.path.split(place.path)
    _make_folder(folder)
    temporary = os.path.join(folder, f"{TEMPORARY}{name}-{secrets.token_hex(6)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(temporary)
        raise
    return temporary


def _link(temporary: str, path: str) -> None:
    """Give a file its name where nobody has it. Without hard links (exFAT, some network disks) the name comes first, empty."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        os.replace(temporary, path)


def _sync_file(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""The local disk, where a file becomes visible whole and stays: a temporary file beside it, fsync, rename, fsync of the folder.

Raises what the system does.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress

TEMPORARY = ".longscan-"
"""How the name of a temporary file begins, wherever one is made beside its target."""


def exists(path: str) -> bool:
    return os.path.lexists(path)


def children(folder: str) -> list[str]:
    """Names in a folder, sorted; none where it is not there."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def read_bytes(path: str) -> bytes | None:
    """What a file holds; None where it is not there."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def remove(path: str) -> None:
    """Remove one file; one that is not there is fine."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: str) -> None:
    """Remove a file, or a folder with all that is in it; what is not there is fine."""
    with suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def write(path: str, data: bytes) -> None:
    """A whole file, in the place of one that is there."""
    temporary = _temporary_beside(path, data)
    try:
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_folder(os.path.dirname(path))


def create(path: str, data: bytes) -> bool:
    """A whole file where none is; False where one is."""
    temporary = _temporary_beside(path, data)
    try:
        _link(temporary, path)
    except FileExistsError:
        return False
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    sync_folder(os.path.dirname(path))
    return True


def overwrite(path: str, data: bytes) -> None:
    """Write over a file that is there, in its place: a crash may tear it."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


def move(finished: str, path: str) -> None:
    """A finished file of the same disk becomes `path`, in the place of one that is there."""
    _sync_file(finished)
    _make_folder(os.path.dirname(path))
    os.replace(finished, path)
    sync_folder(os.path.dirname(path))


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


def _make_folder(folder: str) -> None:
    """Make a folder and those above it, so that their names outlive a loss of power as their files do."""
    if not os.path.isdir(folder):
        above = os.path.dirname(folder)
        _make_folder(above)
        os.makedirs(folder, exist_ok=True)
        sync_folder(above)


def _temporary_beside(path: str, data: bytes) -> str:
    folder, name = os.path.split(path)
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

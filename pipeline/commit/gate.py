"""A gate that commits pass and newer attempts shut: no commit can fall between a newer attempt's beginning and its end.

On a local disk it is a lock of the system's on `_run/gate`, which ends with its holder's process, so that it needs no
cleaning up. Object stores have no such lock, nor have some network disks: there the gate stands open, and what is left of the
window is told in the README.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from longscan.pipeline.storage.location import Location

PATIENCE_S = 60.0
"""For a commit that stands still, as in a process that was stopped: a commit is a few renames."""
POLL_S = 0.02

_UNKNOWN = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

log = logging.getLogger(__name__)


@contextmanager
def gate(output: Location, *, shut: bool, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """While it lasts, nobody holds the gate of `output` shut; with `shut`, nobody is passing it either.

    Who waits longer than `patience_s` goes on with a line in the log.
    """
    if not output.is_local:
        yield
        return
    path = (output / "_run" / "gate").path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not _locked(handle, fcntl.LOCK_EX if shut else fcntl.LOCK_SH, patience_s):
            log.warning("%s: another process has been at its commit for %.0f s; going on without waiting for it", output, patience_s)
        yield
    finally:
        os.close(handle)


def _locked(handle: int, kind: int, patience_s: float) -> bool:
    """False where it took too long. Where the disk knows no locks there is nothing to wait for."""
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _UNKNOWN:
                return True
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)

"""What the system says of other processes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def status(pid: int | str) -> list[str]:
    """What /proc/<pid>/stat holds behind the name: the process's state first, then its parent. Empty where it is gone.

    One that ends between the opening of that file and its reading is not missed there, but no such process.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    return []

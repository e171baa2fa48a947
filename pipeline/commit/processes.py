"""How a process is told from all others, those of its number on other machines, in other containers and before it among them."""

from __future__ import annotations

import os
from pathlib import Path


def identity(pid: int) -> str:
    """`<boot>/<pid namespace>/<start>` of a process that lives; `<boot>/<pid namespace>/` of one that does not. Linux; else coarser."""
    try:
        machine = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"//{pid}" if _lives(pid) else "//"
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return f"{machine}/"
    state, started = fields[0], fields[19]
    return f"{machine}/" if state in "ZX" else f"{machine}/{started}"


def machine_of(process: str) -> str:
    """Of an identity, what all processes that can see each other share."""
    return process.rpartition("/")[0]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

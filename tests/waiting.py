"""Waiting for what another thread or process does. The deadline only ends a hang: no test may count on how soon something comes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

HANG_S = 300.0


def until(happened: Callable[[], object], process: subprocess.Popen[bytes] | subprocess.Popen[str] | None = None) -> None:
    """Return once `happened()` is true. process: whose work it is; without it there is nothing to wait for."""
    end = time.monotonic() + HANG_S
    while not happened():
        assert process is None or process.poll() is None or happened(), "the process has ended"
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)

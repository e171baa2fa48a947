"""Servers of the tests' own. They end with the process that started them, however that ends: SIGKILL runs no `finally`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from waiting import HANG_S

GRACE_S = 5

SCRIPT = f"""
exec 3<&0 </dev/null
(
  trap '' TERM
  read -r _ <&3
  kill -TERM $$
  sleep {GRACE_S}
  kill -KILL 0
) &
exec "$@" 3<&-
"""
"""Becomes the command. What waits beside it, in the same group of processes, reads a pipe of which the caller alone has the other
end, so that it ends with the caller. Then the command is told to end, and what is left of the group after a while is killed."""


@contextmanager
def guarded(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The process of `command`, in a session of its own. log: for what it says. environment: beside this process's."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            ["sh", "-c", SCRIPT, "guarded", *command],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            env=os.environ | dict(environment or {}),
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(HANG_S)

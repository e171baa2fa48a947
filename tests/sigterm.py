"""SIGTERM from outside ends the tests, also while one of them runs the command in this process.

The command takes SIGTERM for its own and makes an exit code of it. So a limit on the whole test run (`timeout 300 pytest`) that came
to its end in such a test was seen as a failure of that test, or not at all, and the tests went on.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

import pytest
from longscan.jobs import run as command


class _Heard:
    own = 0
    """Signals of this process to itself that have not come yet."""
    outside = False


def send() -> None:
    """SIGTERM from a test, to the command that runs in this process."""
    _Heard.own += 1
    os.kill(os.getpid(), signal.SIGTERM)


def listen() -> None:
    """From now on the command's handler also takes note of who has sent the signal."""
    interrupt = command._interrupt

    def heard(number: int, frame: FrameType | None) -> None:
        if _Heard.own:
            _Heard.own -= 1
        else:
            _Heard.outside = True
        interrupt(number, frame)

    command._interrupt = heard  # type: ignore[assignment]


def obey(test: str) -> None:
    """End the tests where another process has asked for it during this one, as Ctrl-C does: with what is known of those before."""
    if _Heard.outside:
        pytest.exit(f"SIGTERM from another process during {test}, such as a time limit's: what became of that test says nothing")

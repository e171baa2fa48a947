"""Runs that are stopped by a signal when so many tokens have gone through the model, and what they said of going on."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from longscan.jobs.run import main
from longscan.pipeline.progress import Progress
from longscan.pipeline.worker import Worker


class Stop:
    """Ends the run by SIGTERM once so many tokens have gone through the model."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int) -> None:
        self.seen = 0
        self.sent = False
        lock = threading.Lock()
        add, put = Progress.add_tokens, Progress.set_tokens

        def count(seen: Callable[[], int]) -> None:
            with lock:
                self.seen = seen()
                due = self.seen >= at and not self.sent
                self.sent |= due
            if due:
                os.kill(os.getpid(), signal.SIGTERM)

        def added(progress: Progress, tokens: int) -> None:
            add(progress, tokens)
            count(lambda: self.seen + tokens)

        def told(progress: Progress, tokens: int) -> None:
            put(progress, tokens)
            count(lambda: tokens)

        patch.setattr(Progress, "add_tokens", added)
        patch.setattr(Progress, "set_tokens", told)


def stopped(command: list[str], at: int, *, crash: bool = False) -> int:
    """Tokens that went through before the stop; a crash flushes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        stop = Stop(patch, at)
        if crash:
            patch.setattr(Worker, "flush", lambda _: None)
        code = main(command)
        assert code == (75 if stop.sent else 0)
        return stop.seen if stop.sent else -1


def carries(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "_run" / "metrics.json").read_text())["carries"]
    return found

"""Runs that are stopped by a signal when so many tokens have gone through the model, and what they said of going on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sigterm
from longscan.jobs.run import main
from longscan.pipeline.engine.engine import Engine
from longscan.pipeline.progress import Progress
from longscan.pipeline.worker.worker import Worker
from waiting import HANG_S


class Stop:
    """Ends the run by SIGTERM once so many tokens have gone through the model. An engine in this process goes on when it has been told."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int) -> None:
        self.seen = 0
        self.sent = False
        lock, told = threading.Lock(), threading.Event()
        add, put, stop, close = Progress.add_tokens, Progress.set_tokens, Engine.stop, Engine.close

        def count(seen: Callable[[], int]) -> bool:
            with lock:
                self.seen = seen()
                due = self.seen >= at and not self.sent
                self.sent |= due
            if due:
                sigterm.send()
            return due

        def added(progress: Progress, tokens: int, estimated: int) -> None:
            add(progress, tokens, estimated)
            if count(lambda: self.seen + tokens):
                assert told.wait(HANG_S), "the signal has not come"

        def counted(progress: Progress, tokens: int, estimated: int) -> None:
            put(progress, tokens, estimated)
            count(lambda: tokens)

        def stopped(engine: Engine, timeout_s: float) -> bool:
            told.set()
            return stop(engine, timeout_s)

        def closed(engine: Engine) -> None:
            told.set()
            close(engine)

        patch.setattr(Progress, "add_tokens", added)
        patch.setattr(Progress, "set_tokens", counted)
        patch.setattr(Engine, "stop", stopped)
        patch.setattr(Engine, "close", closed)


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

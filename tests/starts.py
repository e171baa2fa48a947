"""The command started again and again, each time in a process of its own that may die in earnest, at a place that the test chooses.

One process imports everything and forks for every start, so that a start takes no longer than its work. What is to happen in a
start is a piece of Python that is run before the command: it puts its own functions in the place of longscan's. It can import what
tests can.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

SERVER = """
import json, os, signal, sys, traceback
from longscan.jobs.run import main
import hydra, longscan.pipeline.run
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # a start imports them late
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if not pid:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = 70
        try:
            exec(order["first"], {"__name__": "first"})
            code = main(order["words"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    if not order["wait"]:
        print(pid, flush=True)
        line = sys.stdin.readline()
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""

DIE = "import os, signal\ndef die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
"""Defines `die`, for pieces of Python that come behind it."""


class Ended(NamedTuple):
    code: int
    """Exit code; of a process that was killed, minus the signal's number."""
    said: str
    """Standard error and output."""


class Starts:
    """As a context: the process that forks ends with it."""

    def __init__(self, folder: Path) -> None:
        """folder: for the output of each start."""
        self._log = folder / "said"
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        command, pipe = [sys.executable, "-c", SERVER], subprocess.PIPE
        self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | {"PYTHONPATH": paths})

    def __enter__(self) -> Starts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.kill()
        self._server.communicate()

    def start(self, words: Sequence[str], first: str = "") -> Ended:
        """Run the command to its end, whatever that is. first: Python to run before it."""
        self._order(words, first, wait=True)
        return self._ended()

    def begin(self, words: Sequence[str], first: str = "") -> int:
        """Start the command and return its process id; `end` waits for it."""
        self._order(words, first, wait=False)
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def end(self) -> Ended:
        assert self._server.stdin is not None
        self._server.stdin.write("\n")
        self._server.stdin.flush()
        return self._ended()

    def _order(self, words: Sequence[str], first: str, *, wait: bool) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({"words": list(words), "first": first, "log": str(self._log), "wait": wait}) + "\n")
        self._server.stdin.flush()

    def _ended(self) -> Ended:
        assert self._server.stdout is not None
        return Ended(int(self._server.stdout.readline()), self._log.read_text())

"""No server of a test's stays behind, not even of a test run that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from guarded import guarded
from processes import status
from waiting import until

SERVER = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if child := os.fork():
    print(os.getpid(), child, flush=True)
time.sleep(1000)
"""
"""Two processes of one group, as of a server that starts others; neither ends because it is asked to. One of them tells of both."""


def pids(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    return status(pid)[:1] in ([], ["Z"])


def test_a_server_ends_with_who_started_it(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; from guarded import guarded\n"
        "with guarded([sys.executable, '-c', sys.argv[1]], pathlib.Path(sys.argv[2])): time.sleep(1000)"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    owners = {}
    with ExitStack() as stack:
        for by in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            log, words = tmp_path / by.name, tmp_path / f"{by.name}.owner"
            said = stack.enter_context(words.open("wb"))
            command = [sys.executable, "-c", code, DEAF, str(log)]
            owner = stack.enter_context(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stdout=said, stderr=said))
            stack.callback(owner.kill)
            until(lambda log=log: len(pids(log)) == 2, owner, log, words)
            owner.send_signal(by)
            owners[log] = owner
        for log, owner in owners.items():
            owner.wait()
            until(lambda log=log: all(gone(pid) for pid in pids(log)), None, log)


def test_a_server_ends_with_its_block(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with guarded([sys.executable, "-c", SERVER], log) as server:
        until(lambda: pids(log), server)
        assert pids(log) == [server.pid], "the command itself, so that its end is seen"
    assert server.returncode == -signal.SIGTERM


def test_a_server_that_ends_by_itself_is_seen(tmp_path: Path) -> None:
    with guarded([sys.executable, "-c", "raise SystemExit(7)"], tmp_path / "log") as server:
        assert server.wait() == 7

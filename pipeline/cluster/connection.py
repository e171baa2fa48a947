"""Ray started or joined, and left again by whom it was started; and what it raises, in a line."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import ConfigError, LongscanError, Stopped

QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
CALL_S = 10.0
"""How long an address may take to answer."""


@contextmanager
def joined(config: JobConfig) -> Iterator[None]:
    """While it lasts, this process is part of the cluster that cluster=ray names. Does nothing for other clusters.

    Raises ConfigError where there is none at cluster.address.
    """
    if config.cluster.mode != "ray":
        yield
        return
    try:
        _call(str(config.cluster.address))
        started = connect(address=config.cluster.address)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"cluster.address: expected the address of a running Ray cluster, none answers at {config.cluster.address!r}: {reason}. "
            "If it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH in the environment"
        ) from error
    with until_left(started):
        yield


def _call(address: str) -> None:
    """Raise OSError where nobody listens at `host:port`: Ray would go on asking for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_S).close()


def connect(**settings: Any) -> bool:
    """Start Ray, or join it, unless this process is part of a cluster already. Whether it was this call that did."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its C++ part writes straight to the terminal
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a thread of Ray Data that comes late starts no cluster of its own
    # A local Ray starts a process a core for tasks that may come. Here none do, and the few actors wait for these to be started first.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    import ray

    if ray.is_initialized():
        return False
    # Ray takes SIGTERM for itself, and ends the process where the command's own handler would end the run.
    before = signal.getsignal(signal.SIGTERM)
    ray.init(**settings, **QUIET)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
    return True


@contextmanager
def until_left(started: bool) -> Iterator[None]:
    import ray

    try:
        yield
    finally:
        if started:
            ray.shutdown()


@contextmanager
def told() -> Iterator[None]:
    """What Ray raises, as one line: a worker's own error as it is, anything else as Stopped."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, LongscanError):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if isinstance(cause, LongscanError):
            raise type(cause)(*cause.args) from error
        raise Stopped(f"Ray stopped the run: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The last line of what Ray says: it quotes whole traces, whose end names the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

"""One run at a time on one output: a lock that outlives neither its owner's death nor a loss of its machine.

`_run/lock/<n>` holds who has the lock; the highest n counts. Taking it is making n + 1 where nobody has made it, which
one of several succeeds in, so a lock is never removed under a new owner. The owner writes a new beat every now and then. Somebody
else's lock is free if it was released, if its process is dead (on the same machine), or if its beat stands still.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType

from longscan.pipeline.commit.gate import gate
from longscan.pipeline.commit.ledger import RUN
from longscan.pipeline.commit.processes import identity, machine_of
from longscan.pipeline.errors import OutputError
from longscan.pipeline.storage.location import Location, atomic_write, children, create_exclusive, overwrite, read_bytes, remove

BEAT_S = 15.0
STALE_S = 90.0
"""A beat older than this by the clock is watched for two more beats: clocks of two machines may differ."""

_held: set[str] = set()
"""Tokens of the locks that this process has and has not released."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """Who holds a lock."""

    token: str
    host: str
    pid: int
    process: str
    """Tells processes of one number apart: machine's boot, pid namespace, start of the process. Empty where unknown."""
    beat: int = 0
    time: float = 0.0
    released: bool = False


class RunLock:
    """The lock of an output, held from the start until `release`."""

    def __init__(
        self,
        output: Location,
        *,
        beat_s: float = BEAT_S,
        stale_s: float = STALE_S,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take the lock, over a stale one with a line in the log. Raises OutputError where somebody else holds it."""
        self._output = output
        self._folder = output / RUN / "lock"
        self._beat_s, self._stale_s, self._clock, self._sleep = beat_s, stale_s, clock, sleep
        self._owner = Owner(secrets.token_hex(8), socket.gethostname(), os.getpid(), identity(os.getpid()))
        self._lost = threading.Event()
        self._done = threading.Event()
        _held.add(self._owner.token)  # before anybody can see it
        try:
            self._number = self._take()
            with gate(output, shut=True):
                pass  # a commit of the start before, whose workers may outlive it, ends first; later ones find this start and give way
        except BaseException:
            _held.discard(self._owner.token)
            raise
        self._thread = threading.Thread(target=self._beat, name="longscan-lock", daemon=True)
        self._thread.start()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    @property
    def number(self) -> int:
        """Counts the starts of this output's runs, from 1."""
        return self._number

    def check(self, *, now: bool = False) -> None:
        """Raise OutputError where somebody else has taken the lock over: this run was taken for dead. now: not as of the last beat."""
        if now and self._newest()[0] > self._number:
            self._lost.set()
        if self._lost.is_set():
            raise OutputError(f"{self._output}: another run has taken this output over, since this one did not move; it goes on there")

    def release(self) -> None:
        """Give the lock back. A second call does nothing.

        What keeps it from being written, such as a disk that is read-only by now, is told of and no more: what became of the run
        is worth more than this, and the next start finds a process that is gone.
        """
        if self._done.is_set():
            return
        self._done.set()
        self._thread.join()
        _held.discard(self._owner.token)
        if not self._lost.is_set():
            self._write_last(replace(self._owner, released=True))

    def _take(self) -> int:
        while True:
            number, owner = self._newest()
            if owner is not None and not self._is_free(number, owner):
                raise OutputError(
                    f"{self._output}: another run is at work on this output: process {owner.pid} on {owner.host}. Wait for it, "
                    "stop it, or set another output.path"
                )
            self._owner = replace(self._owner, time=self._clock())
            if create_exclusive(self._place(number + 1), _spelled(self._owner)):
                self._remove_older(number + 1)
                return number + 1

    def _newest(self) -> tuple[int, Owner | None]:
        number = max((int(name) for name in children(self._folder) if name.isdigit()), default=0)
        data = read_bytes(self._place(number)) if number else None
        try:
            return number, None if data is None else Owner(**json.loads(data))
        except (ValueError, TypeError):  # torn by a crash on a disk that makes names before content
            return number, None

    def _is_free(self, number: int, owner: Owner) -> bool:
        if owner.released:
            return True
        here = owner.host == self._owner.host and machine_of(owner.process) == machine_of(self._owner.process)
        if here:
            process = identity(owner.pid)
            given_up = process == self._owner.process and owner.token not in _held  # by this process, on a disk that kept it from saying so
            dead = process != owner.process or given_up
        else:
            dead = self._clock() - owner.time > self._stale_s and self._stands_still(number, owner)
        if dead:
            log.warning("%s: taking over from a run that is gone: process %d on %s", self._output, owner.pid, owner.host)
        return dead

    def _stands_still(self, number: int, owner: Owner) -> bool:
        log.warning("%s: a run on %s has not been heard of lately; waiting to see if it moves", self._output, owner.host)
        self._sleep(2 * self._beat_s)
        return self._newest() == (number, owner)

    def _beat(self) -> None:
        while not self._done.wait(self._beat_s):
            try:
                if self._newest()[0] > self._number:
                    self._lost.set()
                    log.error("%s: another run has taken this output over", self._output)
                    return
                self._owner = replace(self._owner, beat=self._owner.beat + 1, time=self._clock())
                self._write(self._owner)
            except Exception as error:  # a disk that is full or away for a while does not end the run here
                log.warning("%s: the lock cannot be refreshed: %s", self._output, error)

    def _write_last(self, owner: Owner) -> None:
        try:
            try:
                self._write(owner)
            except OutputError:
                if not self._output.is_local:
                    raise
                overwrite(self._place(self._number), _spelled(owner))
        except OutputError as error:
            log.warning("%s: the lock cannot be given back; the next start takes it over: %s", self._output, error)

    def _write(self, owner: Owner) -> None:
        atomic_write(self._place(self._number), _spelled(owner))

    def _place(self, number: int) -> Location:
        return self._folder / f"{number:06d}"

    def _remove_older(self, number: int) -> None:
        for name in children(self._folder):
            if name.isdigit() and int(name) < number:
                remove(self._folder / name)


def _spelled(owner: Owner) -> bytes:
    return json.dumps(vars(owner)).encode()

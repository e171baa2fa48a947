"""The actors: one around each worker, and one that counts what they all do and tells them to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from longscan.pipeline.console import NAME, speak
from longscan.pipeline.errors import LongscanError, Stopped
from longscan.pipeline.shards import SHARDS_AT_ONCE
from longscan.pipeline.worker.job import Chain, Job, Result
from longscan.pipeline.worker.suspects import Unfit
from longscan.pipeline.worker.worker import Worker

POLL_S = 0.5
"""How often a worker asks whether it is to stop."""
SILENT_S = 10.0
"""Who has not asked for so long is gone: nobody waits for it."""

log = logging.getLogger(__name__)


class Tally:
    """The actor that adds up the tokens that workers report, and tells them to stop."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._estimated: Counter[str] = Counter()
        self._begun = 0
        self._seen: dict[str, float] = {}
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    def stopping(self, worker: str) -> bool:
        """Whether the worker that asks is to stop; it says `stopped` then."""
        self._seen[worker] = time.monotonic()
        return self._stopping

    def stopped(self, worker: str) -> None:
        self._seen.pop(worker, None)

    def waiting(self) -> int:
        """Workers that are there and have not stopped."""
        return sum(time.monotonic() - seen < SILENT_S for seen in self._seen.values())

    def begin(self) -> int:
        """A worker begins to build its tools. How many have begun since one had them ready, this one counted."""
        self._begun += 1
        return self._begun

    def ready(self) -> None:
        self._begun = 0

    def add(self, worker: str, tokens: int, estimated: int) -> None:
        """estimated: what the plan takes these tokens for."""
        self._tokens[worker] += tokens
        self._estimated[worker] += estimated

    def total(self) -> tuple[int, int]:
        """The tokens of all workers, and what the plan takes these for."""
        return self._tokens.total(), self._estimated.total()


class RayWorker:
    """The actor around a worker."""

    def __init__(self, job: Job, cores: int, tally: Any, most_starts: int) -> None:
        """tally: handle of the `Tally`. most_starts: of workers that die before they are ready, until the run is given up."""
        import ray

        torch.set_num_threads(cores)
        if not logging.getLogger(NAME).handlers:
            speak()  # to the worker's log of Ray's, which is a file
        self._tally = tally
        self._name = f"{os.uname().nodename}:{os.getpid()}"
        self._threads = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard")
        self._failure: LongscanError | None = None
        # Kept for the answer: what a constructor raises, Ray wraps in several traces.
        begun = ray.get(tally.begin.remote())
        if begun > most_starts:
            self._failure = Stopped(f"workers died before they were ready, {begun - 1} times; does the memory hold the model?")
            return
        try:
            self._worker = Worker(job, cores=cores, on_tokens=self._count)
            tally.ready.remote()
            threading.Thread(target=self._await_stop, name="longscan-stop", daemon=True).start()
        except LongscanError as error:
            self._failure = error
        except Exception as error:
            self._failure = Stopped(f"a worker on {os.uname().nodename} cannot start: {type(error).__name__}: {error}")

    def _await_stop(self) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            while not ray.get(self._tally.stopping.remote(self._name)):
                time.sleep(POLL_S)
            flushing = threading.Thread(target=self._worker.flush, daemon=True)
            flushing.start()
            while flushing.is_alive():
                flushing.join(POLL_S)
                ray.get(self._tally.stopping.remote(self._name))
            self._tally.stopped.remote(self._name)

    def _count(self, tokens: int, estimated: int) -> None:
        self._tally.add.remote(self._name, tokens, estimated)

    def _run(self, chain: Chain) -> list[Result] | LongscanError:
        """Results of a chain. Where the engine failed this process ends, for Ray to start it anew and to try the chain elsewhere.

        An engine that fails whatever it is given ends the run instead.
        """
        try:
            return self._worker.run_chain(chain)
        except Unfit as error:
            return Stopped(str(error))
        except Stopped as error:
            log.error("a worker on %s ends and is started anew: %s", os.uname().nodename, error)
            os._exit(1)

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Chains in, as the driver pickled them; a pickled list of results out for each, or the error that ends the run."""
        for chain in batch["chain"]:
            loop = asyncio.get_running_loop()
            answer: object = self._failure
            if answer is None:
                answer = await loop.run_in_executor(self._threads, self._run, pickle.loads(chain))
            yield {"results": np.array([pickle.dumps(answer)], dtype=object)}

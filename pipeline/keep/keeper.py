"""What a worker keeps of its unfinished shards, so that a stop costs little: rows in journals, carries in files.

    caller's thread    ShardKeeper.resume: documents -> those that are left to do, each with its newest carry
                       ShardKeeper.keep: rows into the journal; a carry goes to the backlog once the rows before it are there
    backlog's thread   carries, those with the most tokens at risk first; the one before is removed when the newer is whole

    _run/carries/<shard>/     see `carry` and `journal`; removed once the shard is committed

Nothing here ends a shard: what cannot be kept is told of once, and would be done again.
"""

from __future__ import annotations

import threading
import time

from longscan.pipeline.commit.ledger import RUN
from longscan.pipeline.keep.backlog import Backlog
from longscan.pipeline.keep.carry import Layout
from longscan.pipeline.keep.shardkeeper import Keeping, ShardKeeper
from longscan.pipeline.keep.states import KeptStates
from longscan.pipeline.shards import Shard
from longscan.pipeline.storage.location import Location


class Keeper:
    """Keeps the shards of one worker. `close` it after the engine; what waits to be written is written first."""

    def __init__(
        self,
        output: Location,
        fingerprint: str,
        layout: Layout,
        *,
        checkpoint_tokens: int,
        binding: str = "",
        states: KeptStates | None = None,
    ) -> None:
        """layout: of the engine's carries. checkpoint_tokens: of a document, that a stop may cost.

        binding: what states that this run keeps are bound to (`fingerprint.binding`). states: those of an earlier run, to go on from.
        """
        folder = output / RUN / "carries"
        self._backlog = Backlog(folder)
        self._keeping = Keeping(folder, fingerprint, layout, checkpoint_tokens, binding, states, self._backlog)
        self._open: set[ShardKeeper] = set()
        self._news = threading.Condition()

    def open(self, shard: Shard, attempt: int) -> ShardKeeper:
        """Begin an attempt at a shard, with what those before have left."""
        opened = ShardKeeper(self._keeping, shard.index, attempt, self._ended)
        with self._news:
            self._open.add(opened)
        return opened

    def flush(self, timeout_s: float) -> bool:
        """Wait until every shard has ended, for the engine was stopped, and its carries are written.

        What is not written after `timeout_s` is given up. Returns whether all came in time.
        """
        end = time.monotonic() + timeout_s
        with self._news:
            ended = self._news.wait_for(lambda: not self._open, timeout_s)
        done = ended and self._backlog.wait(max(end - time.monotonic(), 0.0))
        if not done:
            self._backlog.give_up()
        return done

    def close(self) -> None:
        """End the backlog's thread, once what waits is written."""
        self._backlog.close()

    def _ended(self, shard: ShardKeeper) -> None:
        with self._news:
            self._open.discard(shard)
            self._news.notify_all()

"""The journal of an unfinished shard: the rows of its documents as they come, and what is found there after a stop.

    _run/carries/<shard>/<attempt>-<n>.rows     frames (see `frames`): who wrote it, then rows, marks and resumptions

On a local disk an attempt has one file, to which frames are appended at once: what was written outlives the process.
Elsewhere frames are put in whole objects, every few seconds and before each carry. Several attempts may have written a
row: they wrote the same one, and the first counts. Rows count as far as none is missing between them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import IO, Any

from longscan.pipeline.keep.frames import Frame, pack, read_frame, read_frames
from longscan.pipeline.keep.rowcodec import ENDS, NONE, Counts, after_row, unpack_rows
from longscan.pipeline.records import Document, Outcome
from longscan.pipeline.shards import Carried
from longscan.pipeline.storage.location import Location, atomic_write, writing

SUFFIX = ".rows"
PUT_S = 5.0
PUT_BYTES = 8 << 20
"""Elsewhere than on a local disk: how old, and how large, what is not put yet may grow."""

log = logging.getLogger(__name__)


class JournalWriter:
    """What one attempt at a shard adds to the journal. Nothing is made before the first frame."""

    def __init__(self, folder: Location, attempt: int, head: dict[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        """head: whose journal it is; the first frame of every file."""
        self._folder, self._attempt, self._head, self._clock = folder, attempt, pack({"journal": head}), clock
        self._handle: int | None = None
        self._closing = threading.Lock()  # one thread writes and closes, another syncs
        self._waiting: list[bytes] = []
        self._since = 0.0
        self._files = 0

    def write(self, frames: Sequence[bytes]) -> None:
        """Raises OutputError where they cannot be written; what is there stays readable, but must not be added to."""
        if not frames:
            return
        if self._folder.is_local:
            with writing(self._folder):
                self._append(frames)
            return
        self._since = self._since if self._waiting else self._clock()
        self._waiting += frames
        if self._clock() - self._since >= PUT_S or sum(map(len, self._waiting)) >= PUT_BYTES:
            self.put()

    def put(self) -> None:
        """What was written outlives this process from here on."""
        if self._waiting:
            atomic_write(self._next_file(), b"".join([self._head, *self._waiting]))
            self._waiting = []

    def sync(self) -> None:
        """What was put outlives a loss of power from here on."""
        with self._closing:
            if self._handle is not None:
                os.fsync(self._handle)

    def close(self, *, wanted: bool = True) -> None:
        """wanted: the shard is not committed, so what was written must last. Raises OutputError where what waits cannot be put."""
        if wanted:
            self.put()
            self.sync()
        with self._closing:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None

    def _append(self, frames: Sequence[bytes]) -> None:
        """One after the other, and not joined: a frame may hold a state, of some hundred megabytes."""
        if self._handle is None:
            os.makedirs(self._folder.path, exist_ok=True)
            self._handle = os.open(self._next_file().path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            frames = [self._head, *frames]
        for frame in frames:
            view = memoryview(frame)
            while view:
                view = view[os.write(self._handle, view) :]

    def _next_file(self) -> Location:
        self._files += 1
        return self._folder / f"{self._attempt:06d}-{self._files:06d}{SUFFIX}"


@dataclass(slots=True)
class Trail:
    """What the journal holds of one document."""

    digest: str
    frames: list[tuple[Location, int, int]] = field(default_factory=list)
    """Where its rows lie: a file, a frame's start in it, and which of its `docs`."""
    counts: Counts = NONE
    """What its rows count up to, as far as none is missing."""
    finished: bool = False
    """All its rows are there."""
    base: Counts = NONE
    """What they count from: a document that goes on from an earlier run's state has no rows before that."""

    def follow(self, before: Sequence[int], after: Sequence[int], ends: bool) -> None:
        """Its next rows, as `rowcodec` describes them: attempts may overlap, but rows behind a gap are of no use."""
        if all(first <= there for first, there in zip(before, self.counts, strict=True)):
            windows, tokens, positions, states = (max(there, last) for there, last in zip(self.counts, after, strict=True))
            self.counts = windows, tokens, positions, states
            self.finished |= ends


class _Back:
    """Frames that are read back, the last one and its file kept at hand: documents in order share frames."""

    def __init__(self) -> None:
        self._file: tuple[Location, IO[bytes]] | None = None
        self._frame: Frame | None = None

    def frame(self, file: Location, start: int) -> Frame:
        if self._file is None or self._file[0] != file:
            self.close()
            self._file = file, open_binary(file)
        if self._frame is None or self._frame.start != start:
            self._frame = read_frame(self._file[1], start)
        if self._frame is None:
            raise OSError(f"{file}: was whole a moment ago, and is no longer")
        return self._frame

    def close(self) -> None:
        if self._file is not None:
            self._file[1].close()
        self._file = self._frame = None


@dataclass(slots=True)
class Journal:
    """What the attempts before have left of a shard."""

    trails: dict[int, Trail] = field(default_factory=dict)
    """Ordinal -> its trail."""
    reached: dict[int, int] = field(default_factory=dict)
    """Ordinal -> how far it had come when it was last seen."""
    carried: Carried = field(default_factory=Carried)
    """What those attempts had to do again."""
    _back: _Back = field(default_factory=_Back, repr=False)

    def base_of(self, ordinal: int, digest: str) -> Counts:
        """What the rows of a document with this content count from, as far as the journal says."""
        trail = self.trails.get(ordinal)
        return trail.base if trail is not None and trail.digest == digest else NONE

    def add(self, frame: Frame, file: Location) -> None:
        header = frame.header
        if "docs" in header:
            for index, run in enumerate(header["docs"]):
                trail = self.trails.get(run["doc"])
                if trail is None or trail.digest != run["digest"]:
                    trail = self.trails[run["doc"]] = Trail(run["digest"])
                trail.frames.append((file, frame.start, index))
                trail.follow(run["before"], run["after"], run["ends"])
        elif "begins" in header:
            ordinal, digest, (windows, tokens, positions, states) = header["begins"]
            base = windows, tokens, positions, states
            if self.base_of(ordinal, digest) != base:
                self.trails[ordinal] = Trail(digest, counts=base, base=base)
        elif "at" in header:
            self.reached.update(header["at"])
        elif "resumed" in header:
            self.carried = self.carried.plus(Carried(**header["resumed"]))

    def replay(self, trail: Trail, document: Document, limit: Counts | None = None) -> Iterator[Outcome]:
        """The rows of a document, each once, up to `limit`; without one, all those of a finished one."""
        seen = trail.base
        for file, start, index in trail.frames:
            frame = self._back.frame(file, start)
            run = frame.header["docs"][index]
            for row in unpack_rows(run, frame.body, document):
                after = after_row(seen, row)
                if after is None or (limit is not None and not _within(after, limit)):
                    continue
                ends = isinstance(row, ENDS)
                if not ends or (limit is None and seen == tuple(run["after"])):
                    yield row
                if ends and limit is None:
                    return
                seen = after

    def close(self) -> None:
        """Close what was opened to replay."""
        self._back.close()


def read_journal(folder: Location, names: Sequence[str], head: dict[str, Any]) -> Journal:
    """What `names`, files in `folder`, hold together. Files of another head and ends that are torn are told of and left out."""
    journal = Journal()
    for name in sorted(name for name in names if name.endswith(SUFFIX)):
        file = folder / name
        with closing(open_binary(file)) as stream:
            frames = read_frames(stream)
            first = next(frames, None)
            if first is None or first.header.get("journal") != head:
                log.warning("%s: rows of another run, or of none; they are left out", file)
                continue
            stop = first.stop
            for frame in frames:
                journal.add(frame, file)
                stop = frame.stop
            torn = stream.seek(0, os.SEEK_END) - stop
        if torn:
            log.warning("%s: its last %d bytes are torn; they are left out", file, torn)
    return journal


def _within(counts: Counts, limit: Counts) -> bool:
    return all(count <= most for count, most in zip(counts, limit, strict=True))


def open_binary(file: Location) -> IO[bytes]:
    if file.is_local:
        return open(file.path, "rb")
    stream: IO[bytes] = file.fs.open(file.path, "rb")
    return stream

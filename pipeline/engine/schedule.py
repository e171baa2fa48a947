"""Who goes into the next step. Pure: it sees numbers, knows no token, no device, no thread.

A document takes part as a `Candidate`. `plan_step` shares the step's tiles out in rounds of one segment each, to the
least recently served document first, so that whoever was left out leads the next step: one giant cannot starve many
short documents, many short ones cannot starve a giant, and a giant alone still fills the step. Before them come, in the
same order, those under way that would fill more than a step by themselves: with no more than its turn among many, a giant
would be left alone when the others are done, and a device is slower with one. They are so many as take half of a step's
segments, so that whoever is no longer long is not left waiting with its lane until none is. A document that would need a
lane where none is free is passed over, so later ones that end within the step go ahead of it; the next lane that falls
free is its own.

The cut of a document depends on its own positions alone: an entry is a whole number of segments, or reaches the
document's end. So the tokens of a segment are the same whatever else is in the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from longscan.kernels.segments import NO_LANE, TILE
from longscan.pipeline.errors import ConfigError

KEY_BITS = 48
"""Of a candidate's key, at most."""
LONG_SHARE = 2
"""Long documents come first in one of so many parts of a step's segments: in the rest nobody waits for them to end."""

_number = itemgetter(0)


@dataclass(slots=True)
class Candidate:
    """What the schedule knows of a document that is not finished."""

    key: int
    """Grows with arrival."""
    last_served: int
    """Step in which it last had an entry; for a new document the step at its arrival."""
    position: int = 0
    """Tokens that earlier steps took, also of an earlier engine: a document that goes on needs a lane for what it brings."""
    ready: int = 0
    """Tokens that can go into a step now: whole segments, or all that is left where `complete`."""
    complete: bool = False
    """`ready` reaches the document's end."""
    lane: int = NO_LANE
    long: bool = False
    """By estimate it will take more than a whole step by itself."""

    @property
    def ready_rows(self) -> int:
        """Rows, in whole tiles, that `ready` tokens take in one entry."""
        return -(-self.ready // TILE) * TILE


@dataclass(slots=True)
class Assignment:
    """A document's entry in the step that is planned."""

    key: int
    first_tile: int
    num_tokens: int
    position: int
    lane: int
    """Held before or taken now. NO_LANE for a document that begins, at its start, and ends in this step, unless all keep lanes."""
    ends: bool

    @property
    def num_tiles(self) -> int:
        return -(-self.num_tokens // TILE)


@dataclass(frozen=True, slots=True)
class StepPlan:
    assignments: tuple[Assignment, ...]
    num_tiles: int
    """Tiles of the step: those in use, or the full step where its shape is constant."""

    @property
    def num_tokens(self) -> int:
        return sum(assignment.num_tokens for assignment in self.assignments)

    @property
    def used_tiles(self) -> int:
        return sum(assignment.num_tiles for assignment in self.assignments)

    @property
    def waste(self) -> float:
        """Share of the step's rows that hold no token: ends of documents short of a tile, and empty tiles."""
        return 1.0 - self.num_tokens / (self.num_tiles * TILE) if self.num_tiles else 0.0


def check_sizes(*, lanes: int, step_tokens: int, segment_tokens: int) -> None:
    """Raise ConfigError unless steps of these sizes can hold every document."""
    for key, value in (("engine.step_tokens", step_tokens), ("engine.segment_tokens", segment_tokens)):
        if value < TILE or value % TILE:
            raise ConfigError(f"{key}: expected a positive multiple of {TILE}, got {value}")
    if segment_tokens > step_tokens:
        raise ConfigError(
            f"engine.segment_tokens: expected at most engine.step_tokens ({step_tokens}), got {segment_tokens}; "
            "a step must hold at least one segment: raise step_tokens or lower segment_tokens"
        )
    if lanes < 1:
        raise ConfigError(f"engine.lanes: expected at least 1, got {lanes}")


def ready_tokens(held: int, complete: bool, segment_tokens: int) -> int:
    """Tokens that may be scheduled when `held` are at hand.

    One token beyond a segment must be known before it can go: it tells that the document does not end there, and its
    score comes from the segment's last row.
    """
    return held if complete else max(held - 1, 0) // segment_tokens * segment_tokens


def plan_step(
    candidates: Iterable[Candidate],
    free_lanes: Sequence[int],
    *,
    step_tokens: int,
    segment_tokens: int,
    constant_shape: bool = False,
    reset_tokens: int | None = None,
    keep_lanes: bool = False,
) -> StepPlan:
    """Choose the entries of the next step.

    free_lanes: in the order in which they are to be taken. The lanes of documents that end in this step are free for
    the next one. constant_shape: the step has step_tokens rows however few are in use, unless it is empty.
    reset_tokens: an entry that begins between two multiples of it ends at the second: so none both reads a lane and starts afresh.
    keep_lanes: a document has a lane to its end, also one that begins and ends in one step.
    """
    order = _in_order(candidates, step_tokens // segment_tokens // LONG_SHARE)
    shares = _Shares(step_tokens // TILE, len(free_lanes), segment_tokens, reset_tokens, keep_lanes)
    left = order
    while left and shares.serve_round(left) and shares.tiles_left:
        left = [c for c in left if shares.granted.get(c.key, 0) < c.ready]
    assignments = _lay_out(order[: shares.reached], shares, free_lanes)
    used = sum(assignment.num_tiles for assignment in assignments)
    return StepPlan(assignments, step_tokens // TILE if constant_shape and used else used)


def _in_order(candidates: Iterable[Candidate], long_first: int) -> list[Candidate]:
    """Those that are ready, by the step in which they were last served, then those that hold a lane first, then by arrival; before them
    all, in the same order, `long_first` of the long ones that hold a lane.

    As one number each, made in place: steps choose among thousands of short documents, most of which come in this order already.
    """
    numbered = [((2 * c.last_served + (c.lane == NO_LANE) << KEY_BITS) + c.key, c) for c in candidates if c.ready]
    numbered.sort(key=_number)
    order = [c for _, c in numbered]
    first = [c for c in order if c.long and c.lane != NO_LANE][:long_first]
    if not first:
        return order
    keys = {c.key for c in first}
    return [*first, *(c for c in order if c.key not in keys)]


class _Shares:
    """The tiles and lanes of one step while they are shared out."""

    def __init__(self, tiles: int, lanes: int, segment_tokens: int, reset_tokens: int | None, keep_lanes: bool) -> None:
        self.tiles_left = tiles
        self.lanes = lanes
        self.segment_tokens = segment_tokens
        self.reset_tokens = reset_tokens
        self.keep_lanes = keep_lanes
        self.granted: dict[int, int] = {}
        self.reserved: set[int] = set()
        """Documents that begin to need a lane, as far as granted yet: each will take a free one."""
        self.reached = 0
        """Candidates of the first round that were looked at; none behind them was granted anything."""

    def serve_round(self, candidates: Sequence[Candidate]) -> bool:
        """Serve each once, in order, until no tile is left. Whether any was granted something."""
        any_served = False
        looked_at = 0
        for c in candidates:
            if not self.tiles_left:
                break
            looked_at += 1
            any_served |= self.serve(c)
        self.reached = max(self.reached, looked_at)
        return any_served

    def serve(self, c: Candidate) -> bool:
        """Grant `c` one more segment, or what is left of it, if tiles and lanes allow. Says whether it was."""
        granted = self.granted.get(c.key, 0)
        rest = c.ready - granted
        tokens = min(self.segment_tokens, rest)
        if self.reset_tokens and c.position % self.reset_tokens and granted + c.position % self.reset_tokens == self.reset_tokens:
            return False
        if c.lane == NO_LANE and c.key not in self.reserved and len(self.reserved) >= self.lanes:
            # With no lane to go on in, it goes only if all of it fits into this step.
            if not c.complete or c.position or self.keep_lanes:
                return False
            tokens = rest
        tiles = -(-tokens // TILE)
        if tiles > self.tiles_left:
            return False
        self.tiles_left -= tiles
        self.granted[c.key] = granted + tokens
        if c.lane == NO_LANE and not c.position and c.complete and tokens == rest and not self.keep_lanes:
            self.reserved.discard(c.key)
        elif c.lane == NO_LANE:
            self.reserved.add(c.key)
        return True


def _lay_out(order: Sequence[Candidate], shares: _Shares, free_lanes: Sequence[int]) -> tuple[Assignment, ...]:
    """End to end in the order of service, with lanes for those that need one."""
    lanes = iter(free_lanes)
    assignments = []
    first_tile = 0
    for c in order:
        tokens = shares.granted.get(c.key, 0)
        if tokens:
            lane = next(lanes) if c.key in shares.reserved else c.lane
            entry = Assignment(c.key, first_tile, tokens, c.position, lane, c.complete and tokens == c.ready)
            assignments.append(entry)
            first_tile += entry.num_tiles
    return tuple(assignments)

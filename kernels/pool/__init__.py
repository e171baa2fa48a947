"""pool: vectors of documents and of their windows, from hidden states that pass by a step at a time.

    mean           sum h_i / n
    last           h_n
    max            the largest of each dimension
    weighted_mean  sum i h_i / sum i        i counts from 1 at the start of the document, or of the window

Sums are float64. A tile's 64 rows are summed first, in one fixed order, then the tiles one after the other in the order
of their positions: so a vector's bits depend neither on where its document was cut nor on what else was in the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from longscan.kernels.checks import Backend, check_backend, check_float, check_lanes, check_like, check_rank, check_shape
from longscan.kernels.segments import TILE, Segments

POOLINGS = ("mean", "last", "max", "weighted_mean")


@dataclass(frozen=True, slots=True)
class PoolState:
    """What pooling carries from step to step: tables with the slot first, so that a lane is `table[lane]` of each.

    tables: name -> [S, D]. `mean` and `weighted_mean` float64 sums since the document's start, `max` fp32, and the same
        under `window_mean`, `window_weighted_mean`, `window_max` since the start of the window that is open. Only what the
        poolings need: `last` needs nothing, and without windows there are no `window_` tables.
    """

    tables: dict[str, torch.Tensor]

    @classmethod
    def new(
        cls, slots: int, width: int, poolings: Sequence[str], window_tokens: int | None, device: torch.device | str = "cpu"
    ) -> PoolState:
        """Tables of the empty state: sums 0, maxima -inf."""
        names = _table_names(poolings, window_tokens)
        return cls({name: empty_table(name, slots, width, device) for name in names})

    def lane(self, lane: int) -> dict[str, torch.Tensor]:
        """Views of a lane's own part of each table."""
        return {name: table[lane] for name, table in self.tables.items()}


@dataclass(frozen=True, slots=True)
class PoolOutput:
    """Vectors that a step finished, fp32, not normalised."""

    documents: dict[str, torch.Tensor]
    """pooling -> [documents that end in the step, D], in the order of their entries."""
    windows: dict[str, torch.Tensor]
    """pooling -> [W, D], windows that close in the step, in the order of `closed_windows`; no poolings without windows."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tiles of one entry that belong to one window."""

    entry: int
    window: int
    """Index of the window in its document."""
    first_tile: int
    """Tile of the step."""
    offset: int
    """Tokens of the window before this run."""
    num_tokens: int
    closes: bool
    """The window is full, or its document ends: its vector is due."""

    @property
    def num_tiles(self) -> int:
        return -(-self.num_tokens // TILE)


def window_runs(segments: Segments, window_tokens: int) -> Iterator[Run]:
    """Cut every entry at the borders of its document's windows, in the order (entry, window)."""
    for e, entry in enumerate(segments.entries):
        done = 0
        while done < entry.num_tokens:
            window, offset = divmod(entry.position + done, window_tokens)
            taken = min(window_tokens - offset, entry.num_tokens - done)
            last = done + taken == entry.num_tokens
            closes = offset + taken == window_tokens or (last and entry.ends)
            yield Run(e, window, entry.first_tile + done // TILE, offset, taken, closes)
            done += taken


def closed_windows(segments: Segments, window_tokens: int) -> list[Run]:
    """The windows that close in this step, in the order in which `PoolOutput.windows` has their vectors."""
    return [run for run in window_runs(segments, window_tokens) if run.closes]


def pool(
    hidden_TD: torch.Tensor,
    *,
    state: PoolState,
    poolings: Sequence[str],
    segments: Segments,
    window_tokens: int | None = None,
    backend: Backend,
) -> tuple[PoolOutput, PoolState]:
    """Add a step's hidden states to the running vectors, and give those that are finished.

    hidden_TD: [T, D]: hidden states; rows of padding are never used.
    state: tables of `PoolState.new` for the same poolings and windows; updated in place at each entry's lane_out. An entry
        at position 0 starts from the empty state whatever its lane_in says, since a shared prefix is in no vector.
    poolings: some of mean, last, max, weighted_mean.
    window_tokens: size of the windows, a multiple of 64, counted from the document's start; the last may be short.

    Returns the vectors, and the state that came in. Raises ValueError on shapes, names and sizes that do not fit.
    """
    _check(hidden_TD, state, poolings, segments, window_tokens)
    check_backend(backend, hidden_TD)
    if backend == "cutile":
        from longscan.kernels.pool import cutile

        return cutile.pool(hidden_TD, state=state, poolings=poolings, segments=segments, window_tokens=window_tokens)
    from longscan.kernels.pool import reference

    return reference.pool(hidden_TD, state=state, poolings=poolings, segments=segments, window_tokens=window_tokens)


def empty_table(name: str, rows: int, width: int, device: torch.device | str) -> torch.Tensor:
    """[rows, width] of a table's empty state."""
    if name.endswith("max"):
        return torch.full((rows, width), -torch.inf, dtype=torch.float32, device=device)
    return torch.zeros((rows, width), dtype=torch.float64, device=device)


def _table_names(poolings: Sequence[str], window_tokens: int | None) -> list[str]:
    if not poolings or set(poolings) - set(POOLINGS) or len(set(poolings)) != len(poolings):
        raise ValueError(f"poolings: expected some of {', '.join(POOLINGS)}, each once, got {list(poolings)}")
    if window_tokens is not None and (window_tokens < TILE or window_tokens % TILE):
        raise ValueError(f"window_tokens: expected a multiple of {TILE} or None, got {window_tokens}")
    carried = [pooling for pooling in poolings if pooling != "last"]
    return carried + ([f"window_{pooling}" for pooling in carried] if window_tokens else [])


def _check(hidden_TD: torch.Tensor, state: PoolState, poolings: Sequence[str], segments: Segments, window_tokens: int | None) -> None:
    check_rank("hidden_TD", hidden_TD, "TD")
    check_float("hidden_TD", hidden_TD)
    width = hidden_TD.shape[1]
    check_shape("hidden_TD", hidden_TD, (segments.num_rows, width))
    names = _table_names(poolings, window_tokens)
    if set(state.tables) != set(names):
        raise ValueError(f"state: expected the tables {sorted(names)} for these poolings and windows, got {sorted(state.tables)}")
    for name, table in state.tables.items():
        check_shape(f"state.tables[{name!r}]", table, (table.shape[0], width))
        check_like(f"state.tables[{name!r}]", table, hidden_TD, torch.float32 if name.endswith("max") else torch.float64)
        check_lanes(f"state.tables[{name!r}]", table, segments)

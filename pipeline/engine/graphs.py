"""A model's step as CUDA graphs: recorded once, then one launch instead of hundreds, which a small model's step would wait for.

A graph runs the same kernels on the same memory, so what differs from step to step is written there first: token ids and the
layout of the entries. How many blocks a launch has is recorded as well, so there is a graph for each of a few numbers of entries,
and a step takes the next larger one: blocks of no entry end at once. Results are those of the model, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.kernels.ssd.spans import Spans, cut
from longscan.pipeline.engine.memory import in_a_line, is_out_of_memory
from longscan.pipeline.model import Mamba2, ModelState

log = logging.getLogger(__name__)

FEWEST_CHAINS = 8
CORNER = 16
"""Rows and columns of a product that is made for its own sake."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One graph, and the layout of entries that it reads."""

    graph: torch.cuda.CUDAGraph
    segments: Segments


class GraphedModel:
    """A model on a GPU whose steps have one shape and one table of states. What is no step goes to the model itself."""

    def __init__(self, model: Mamba2) -> None:
        self._model = model
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._ids_T = self._hidden_TD = torch.empty(0)
        self._tables: Tables | None = None
        self._stream = torch.cuda.Stream(model.device)
        self._memory = torch.cuda.graph_pool_handle()
        self._corner = torch.zeros((CORNER, CORNER), dtype=model.dtype, device=model.device)
        self._failed = self._given_up = False

    @property
    def width(self) -> int:
        """`Mamba2.width`"""
        return self._model.width

    def new_state(self, slots: int) -> ModelState:
        """`Mamba2.new_state`"""
        return self._model.new_state(slots)

    def lane(self, state: ModelState, lane: int) -> Mapping[str, torch.Tensor]:
        """`Mamba2.lane`"""
        return self._model.lane(state, lane)

    def logprobs(self, hidden_TD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        """`Mamba2.logprobs`"""
        return self._model.logprobs(hidden_TD, targets_T)

    def state_norms(self, state: ModelState, lane: int) -> torch.Tensor:
        """`Mamba2.state_norms`"""
        return self._model.state_norms(state, lane)

    def step(self, ids_T: torch.Tensor, segments: Segments, state: ModelState) -> tuple[torch.Tensor, ModelState]:
        """`Mamba2.step`, but that the hidden states are in the memory of the step before: they are to be used before the next.

        Where no graph can be recorded, the model runs launch by launch from then on, and the log says why. Memory that is short is no
        such reason: what torch raises of it is raised.
        """
        spans = None if segments.span_tiles is None else cut(segments)
        recorded = self._graph_for(ids_T, segments, spans, state)
        if recorded is None:
            return self._model.step(ids_T, segments, state)
        self._ids_T.copy_(ids_T)
        recorded.segments.buffer.copy_(segments.buffer)
        if spans is not None:
            cut(recorded.segments).buffer.copy_(spans.buffer)
        recorded.graph.replay()
        return self._hidden_TD, state

    def _begin(self, ids_T: torch.Tensor, segments: Segments, state: ModelState) -> None:
        """Run a step that reads and writes no lane, so that all that is made once is made: nothing may be while a graph is recorded."""
        self._recorded.clear()
        self._tables, self._memory = None, torch.cuda.graph_pool_handle()  # that of graphs which are gone cannot be taken again
        idle = Segments.pack(
            [Entry(0, TILE)], segments.num_tiles, self._model.device, slots=segments.num_tokens.numel(), span_tiles=segments.span_tiles
        )
        hidden_TD, _ = self._model.step(ids_T, idle, state)
        self._ids_T, self._hidden_TD, self._tables = ids_T.clone(), torch.empty_like(hidden_TD), _tables(state)
        del hidden_TD
        torch.cuda.empty_cache()  # graphs have memory of their own for what a step makes in between
        if segments.span_tiles is None:
            # Now: later the threads that read and tokenize want Python's lock as well, and recording takes ten times as long.
            for chains in all_chains(segments.num_tokens.numel(), state.ssm.shape[1]):
                self._recorded[chains, 0] = self._record(idle, None, chains, state)

    def _graph_for(self, ids_T: torch.Tensor, segments: Segments, spans: Spans | None, state: ModelState) -> _Recorded | None:
        """The graph of a step, recorded where there is none yet; once more with everything made anew where that fails, and then None."""
        key = (chains_for(segments), 0 if spans is None else spans.slot.numel())
        while not self._given_up:
            try:
                if _tables(state) != self._tables or len(ids_T) != len(self._ids_T):
                    self._begin(ids_T, segments, state)
                if key not in self._recorded:
                    self._recorded[key] = self._record(segments, spans, key[0], state)
                return self._recorded[key]
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                self._fail(error)
        return None

    def _record(self, segments: Segments, spans: Spans | None, chains: int, state: ModelState) -> _Recorded:
        graph, layout = torch.cuda.CUDAGraph(), segments.recorded(chains)
        if spans is not None:
            layout.derived[Spans] = spans.recorded()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # cuBLAS makes a handle for each thread at its first product, which may not be while a graph is recorded.
            torch.mm(self._corner, self._corner)
            # Other threads go on meanwhile, and may use the device.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                hidden_TD, _ = self._model.step(self._ids_T, layout, state)
                self._hidden_TD.copy_(hidden_TD)
            except BaseException:
                with suppress(RuntimeError):  # which would only say that something went wrong before
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return _Recorded(graph, layout)

    def _fail(self, error: RuntimeError) -> None:
        """Begin anew at the next try, or give up where this was the second."""
        self._given_up, self._failed, self._tables = self._failed, True, None
        self._recorded.clear()
        if self._given_up:
            reason = in_a_line(error)
            log.warning("steps cannot be recorded as CUDA graphs here (%s): they are launched kernel by kernel, which is slower", reason)
        else:
            log.info("a step could not be recorded as a CUDA graph (%s): once more", in_a_line(error))


Tables = tuple[tuple[int, torch.Size], ...]
"""Where the tables of states are, and their sides: graphs are for these. The tables themselves are not held on to."""


def _tables(state: ModelState) -> Tables:
    return tuple((table.data_ptr(), table.shape) for table in (state.tail, state.ssm))


def chains_for(segments: Segments) -> int:
    """Entries that the graph for a step has blocks for: a power of two, or one and a half times one, as far as there are slots."""
    slots = segments.num_tokens.numel()
    return next(chains for chains in _numbers(slots) if chains >= min(len(segments.entries), slots))


def all_chains(slots: int, lanes: int) -> list[int]:
    """What `chains_for` comes to in steps of `slots` with at most `lanes` entries."""
    numbers = list(_numbers(slots))
    return [chains for before, chains in zip([0, *numbers], numbers, strict=False) if before < lanes]


def _numbers(slots: int) -> Iterator[int]:
    chains = FEWEST_CHAINS
    while chains < slots:
        yield chains
        chains = chains * 3 // 2 if chains & (chains - 1) == 0 else chains // 3 * 4
    yield slots


def with_graphs(model: Any) -> Any:
    """`model`, its steps as graphs where it can have them: a Mamba-2 on the CUDA Tile kernels, which never wait for the host."""
    return GraphedModel(model) if isinstance(model, Mamba2) and model.backend == "cutile" and model.device.type == "cuda" else model

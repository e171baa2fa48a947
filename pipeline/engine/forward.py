"""One step on the device: tokens in, hidden states through the model, and only what rows are made of back.

`launch` queues a step and returns at once on a GPU; `collect` waits for what comes back (`results`). So the next step can be
launched before the results of this one are read, and the device never waits for the host. What comes back a step is a number a
token where scores are asked for, and the vectors that are finished: never a hidden state.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from longscan.kernels.logprob import UNWANTED
from longscan.kernels.pool import PoolOutput, PoolState, pool
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.pipeline.engine.memory import drop_caches
from longscan.pipeline.engine.opened import NO_TOKEN
from longscan.pipeline.engine.places import Picks, pick
from longscan.pipeline.engine.results import EntryResult, Launched, cut
from longscan.pipeline.engine.score import scores_first_token
from longscan.pipeline.engine.settings import EngineSettings
from longscan.pipeline.engine.slots import Slots
from longscan.pipeline.engine.stepmodel import Mark, StepModel
from longscan.pipeline.engine.steps import Step, StepEntry, starts_afresh
from longscan.pipeline.errors import ConfigError
from longscan.pipeline.meter import BEFORE_FIRST, BETWEEN, DEVICE, Meter

PAD_ID = 0
"""What padding rows hold: any token will do, nothing of theirs is used."""


class Forward:
    """The model and all state tables of one worker. Not thread-safe: one thread launches and collects."""

    def __init__(self, model: StepModel, settings: EngineSettings, meter: Meter | None = None) -> None:
        """The states that documents begin from are made here, once."""
        self.model, self.task = model, settings.task
        self.device = torch.device(settings.device)
        self.meter = meter or Meter()
        self.slots, self.tiles, self.reset_tokens = settings.slots, settings.tiles, settings.reset_tokens
        self.pool_windows = self.task.embedding.window_tokens if self.task.pools else None
        self._settings = settings
        self.model_state, self.pool_state = self._new_tables()
        hidden = [self._prefill(ids, slot) for ids, slot in zip(settings.contexts, self.slots.of_contexts, strict=True)]
        self._context_hidden = hidden[0][-1:].repeat(TILE, 1) if self.slots.has_context else None
        self._pooled_contexts = [part.double().cpu().numpy() for part in hidden] if self.task.embedding.include_prompt is True else []
        self._scores_first = scores_first_token(self.task, settings.context_id)
        self.step_seconds = 0.0
        """How long a full step keeps the device busy, by the newest of them; 0 where that is not known, or steps have no constant shape."""
        self._free_since = time.perf_counter()
        """When the device had nothing to do any more, where it is done when a call returns, and before the first step."""
        self._begun_any = False
        self._last: Mark | None = None
        """Behind the newest step that has been waited for."""

    def _new_tables(self) -> tuple[Any, PoolState | None]:
        slots, poolings = self.slots.total, self.task.embedding.poolings
        pooled = PoolState.new(slots, self.model.width, poolings, self.pool_windows, self.device) if self.task.pools else None
        return self.model.new_state(slots), pooled

    def resize(self, slots: Slots, moved: Mapping[int, int]) -> None:
        """Other tables, divided so; what slots held is in others then, as `moved` says. Nothing runs."""
        kept = {new: self.read_lane(old) for old, new in moved.items()}
        self.model_state = self.pool_state = None  # first, so that there is room
        drop_caches()
        self.slots = slots
        self.model_state, self.pool_state = self._new_tables()
        with torch.inference_mode():
            for slot, tensors in kept.items():
                self._put_back(slot, tensors)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """A full step of nobody's: memory that is not there is missed now, and not behind hours of work; and what is compiled, loaded or
        made once is there before the first document's tokens are. On a GPU it tells how long a step takes, too.
        """
        self._step_of_nobody()
        if self.device.type == "cuda":
            # Again: now nothing is compiled, loaded or recorded in between, for which the device waits or is waited for.
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            self._step_of_nobody()
            torch.cuda.synchronize(self.device)
            self.step_seconds = time.perf_counter() - began
        self._free_since = time.perf_counter()

    def _step_of_nobody(self) -> None:
        """Queue a full step that reads no lane and leaves nothing behind."""
        assert self.tiles is not None
        ids_T = self._to_device(np.full(self.tiles * TILE, PAD_ID, dtype=np.int64))
        segments = self._pack([Entry(0, self.tiles * TILE, ends=True)], self.tiles)
        hidden_TD, self.model_state = self.model.step(ids_T, segments, self.model_state)
        if self.pool_state is not None:
            self._pool(hidden_TD, segments, self.pool_state)
        if self.task.scores:
            self.model.logprobs(hidden_TD, ids_T)

    @property
    def steps_behind(self) -> int:
        """Steps that are launched before the results of an earlier one are waited for."""
        return 1 if self.device.type == "cuda" else 0

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Queue a step; tables are updated in the order of launches."""
        with self.meter("pack"):
            segments = afresh = self._pack([e.entry for e in step.entries], step.num_tiles)
            if self.reset_tokens is not None:
                entries = [part for e in step.entries for part in starts_afresh(e.entry, self.reset_tokens, self.slots.before())]
                afresh = self._pack(entries, step.num_tiles)
        with self.meter("copy"):
            ids_T, targets_T = self._upload(step)
        with self.meter("launch"):
            return self._queue(step, segments, afresh, ids_T, targets_T)

    def _queue(self, step: Step, segments: Segments, afresh: Segments, ids_T: torch.Tensor, targets_T: torch.Tensor) -> Launched:
        """Carries into their lanes, the network, and behind it all that is read of the step, in this order.

        afresh: the segments as the model takes them, which begin anew at every reset.
        """
        begun, began = self._mark(), time.perf_counter()
        if begun is None or not self._begun_any:
            self.meter.add(BETWEEN if self._begun_any else BEFORE_FIRST, wall=began - self._free_since)
        self._begun_any, self._free_since = True, began  # a step that finds no memory is queued again, and has waited once
        for e in step.entries:
            if e.load is not None:
                self._put_back(e.entry.lane_in, e.load)
        before = {i: self.copy_lane(e.entry.lane_in) for i, e in enumerate(step.entries) if e.kept is not None}
        hidden_TD, self.model_state = self.model.step(ids_T, afresh, self.model_state)
        pooled = PoolOutput({}, {}) if self.pool_state is None else self._pool(hidden_TD, segments, self.pool_state)
        documents = {pooling: self._to_host(vectors) for pooling, vectors in pooled.documents.items()}
        windows = {pooling: self._to_host(vectors) for pooling, vectors in pooled.windows.items()}
        logprobs_T = self._to_host(self.model.logprobs(hidden_TD, targets_T)) if self.task.scores else None
        firsts = [self._firsts(e) for e in step.entries]
        first_logprobs = self._first_logprobs(step, firsts)
        ended = [e.entry.lane_out for e in step.entries if e.entry.ends] if self.task.state_norm else []
        norms = [self._to_host(self.model.state_norms(self.model_state, lane)) for lane in ended]
        after = {i: self.copy_lane(e.entry.lane_out) for i, e in enumerate(step.entries) if e.at_risk}
        picks, picked = self._pick(step, hidden_TD)
        done = self._mark()  # behind all that is read when it has passed
        if done is None:
            self._free_since = time.perf_counter()
            self._took(self._free_since - began)
        return Launched(
            segments=segments,
            logprobs_T=logprobs_T,
            firsts=firsts,
            first_logprobs=first_logprobs,
            picks=picks,
            picked=picked,
            norms=norms,
            documents=documents,
            replaced=[e.document.carry.replaced for e in step.entries if e.entry.ends],
            windows=windows,
            before=before,
            after=after,
            begun=begun,
            done=done,
        )

    def _pool(self, hidden_TD: torch.Tensor, segments: Segments, state: PoolState) -> PoolOutput:
        output, self.pool_state = pool(
            hidden_TD,
            state=state,
            poolings=self.task.embedding.poolings,
            segments=segments,
            window_tokens=self.pool_windows,
            backend=self._settings.backend,
        )
        return output

    def _mark(self) -> Mark | None:
        """A mark behind all that is queued; None on a device that is done when a call returns."""
        if self.device.type != "cuda":
            return None
        # Who waits leaves the core to tokenization; torch.Event takes `blocking` and does not do it.
        mark = torch.cuda.Event(enable_timing=True, blocking=True)
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def finished(self, launched: Launched) -> bool:
        """Whether `collect` would not wait."""
        return launched.done is None or launched.done.query()

    def collect(self, launched: Launched) -> list[EntryResult]:
        """Wait for a step and cut its results into those of its entries, in order."""
        if launched.done is not None and launched.begun is not None:
            with self.meter("wait"):
                launched.done.synchronize()
            self._took(launched.begun.elapsed_time(launched.done) / 1e3)
            if self._last is not None:
                self.meter.add(BETWEEN, wall=self._last.elapsed_time(launched.begun) / 1e3)
            self._last = launched.done
        with self.meter("rows"):
            return cut(launched, self.task, self._pooled_contexts)

    def _took(self, seconds: float) -> None:
        """A step has kept the device busy for so long."""
        self.meter.add(DEVICE, wall=seconds)
        if self.tiles is not None:
            self.step_seconds = seconds

    def lane(self, lane: int) -> dict[str, torch.Tensor]:
        """Views of all that the tables hold for one lane, by name: the device's part of its document's carry."""
        pooled = {} if self.pool_state is None else self.pool_state.lane(lane)
        return {f"model.{name}": view for name, view in self.model.lane(self.model_state, lane).items()} | {
            f"pool.{name}": view for name, view in pooled.items()
        }

    @torch.inference_mode()
    def copy_lane(self, lane: int) -> dict[str, torch.Tensor]:
        """The same, copied to the host; on a GPU queued behind what is queued already, and there once that is done."""
        return {name: self._to_host(view) if view.is_cuda else view.clone() for name, view in self.lane(lane).items()}

    def read_lane(self, lane: int) -> dict[str, torch.Tensor]:
        """The same, waited for: while nothing runs, from any thread."""
        tensors = self.copy_lane(lane)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return tensors

    def _put_back(self, lane: int, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, view in self.lane(lane).items():
            view.copy_(tensors[name].pin_memory() if view.is_cuda else tensors[name], non_blocking=True)

    def _pack(self, entries: Sequence[Entry], num_tiles: int) -> Segments:
        return Segments.pack(entries, num_tiles, self.device, slots=self.tiles, span_tiles=self._settings.span_tiles)

    def _upload(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and targets, [T] int64 each: a row's target is the token that follows it, -1 where none does, or none is scored."""
        rows = np.empty((2, step.num_tiles * TILE), dtype=np.int64)
        ids, targets = rows
        ids[:], targets[:] = PAD_ID, UNWANTED
        for e in step.entries:
            ids[e.entry.rows] = e.taken.ids
        if self.task.scores:
            for e in step.entries:
                wanted = targets[e.entry.rows]
                wanted[:-1], wanted[-1] = e.taken.ids[1:], e.taken.next_id
                if self.reset_tokens is not None:
                    wanted[self.reset_tokens - 1 - e.entry.position % self.reset_tokens :: self.reset_tokens] = UNWANTED
        on_device = self._to_device(rows)
        return on_device[0], on_device[1]

    def _pick(self, step: Step, hidden_TD: torch.Tensor) -> tuple[list[Picks], torch.Tensor | None]:
        """Where the documents' positions are in this step, and the hidden states there."""
        if self.task.classifies != "positions":
            return [], None
        none = np.empty(0, np.int64)
        picks = []
        for e in step.entries:
            places = e.document.document.positions
            picks.append(pick(none if places is None else places, e.taken, e.entry.position, ends=e.entry.ends))
        rows = [e.entry.rows.start + found.rows[found.rows >= 0] for e, found in zip(step.entries, picks, strict=True)]
        chosen = hidden_TD[self._to_device(np.concatenate(rows) if rows else none)]
        return picks, self._to_host(chosen.float())

    def _firsts(self, e: StepEntry) -> list[int]:
        """Rows of an entry as `Launched.firsts` has them."""
        rows = [-1] if e.entry.position == 0 else []
        if self.reset_tokens is not None:
            last = len(e.taken.ids) - (e.taken.next_id == NO_TOKEN)
            rows += range(self.reset_tokens - 1 - e.entry.position % self.reset_tokens, last, self.reset_tokens)
        return rows

    def _first_logprobs(self, step: Step, rows: list[list[int]]) -> torch.Tensor | None:
        """Scores of the tokens behind these rows, given the context alone: by the same operator, in blocks of one constant size."""
        if self._context_hidden is None or not self._scores_first:
            return None
        firsts = [
            e.taken.next_id if row + 1 == len(e.taken.ids) else int(e.taken.ids[row + 1])
            for e, of_entry in zip(step.entries, rows, strict=True)
            for row in of_entry
        ]
        if not firsts:
            return None
        targets = np.full((-(-len(firsts) // TILE), TILE), UNWANTED, dtype=np.int64)
        targets.reshape(-1)[: len(firsts)] = firsts
        blocks = [self.model.logprobs(self._context_hidden, block) for block in self._to_device(targets)]
        return self._to_host(torch.cat(blocks))

    @torch.inference_mode()
    def _prefill(self, context: list[int], slot: int) -> torch.Tensor:
        """Run what comes before documents into its slot. Returns its hidden states, [tokens, D]."""
        if not context:
            return torch.zeros((0, self.model.width), device=self.device)
        num_tiles = self.tiles or -(-len(context) // TILE)
        if len(context) > num_tiles * TILE:
            raise ConfigError(f"task.embedding.prompt: expected at most engine.step_tokens ({num_tiles * TILE}) tokens, got {len(context)}")
        ids = np.full(num_tiles * TILE, PAD_ID, dtype=np.int64)
        ids[: len(context)] = context
        entries = [Entry(first_tile=0, num_tokens=len(context), lane_out=slot)]
        hidden_TD, self.model_state = self.model.step(self._to_device(ids), self._pack(entries, num_tiles), self.model_state)
        return hidden_TD[: len(context)].clone()

    def _to_device(self, array: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """On a GPU a copy into pinned memory that is queued, not waited for."""
        return tensor.to("cpu", non_blocking=True)

"""What a run would be: shards, tokens, memory and time, the last from a few steps of the model where workers run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.pipeline.fetch import fetch_model
from longscan.pipeline.model import Mamba2, Mamba2Geometry, load_model
from longscan.pipeline.plan import Plan
from longscan.pipeline.resolve import Choice, Sizes
from longscan.pipeline.slots import spare_slots
from longscan.pipeline.tail import Tail, foresee, longest_first
from longscan.pipeline.wording import clock_time, count, num_bytes, plural

PROBE_S = 3.0
PROBE_TOKENS = {"cpu": 2048}


@dataclass(frozen=True, slots=True)
class Estimate:
    """All but `rows` and `shards` are estimates."""

    shards: int
    rows: int
    tokens: int
    weights_bytes: int
    state_bytes: int
    """Of all lanes, the spare slots, and behind the context."""
    step_bytes: int
    """Activations of a step, at their largest: a layer's projection and what is made of it."""
    tokens_per_second: float
    workers: int
    tail: Tail
    kept_states: int | None = None
    """Documents whose state is kept, at most: those with more than a segment; and the bytes of one."""
    kept_bytes: int = 0

    def __str__(self) -> str:
        memory = self.weights_bytes + self.state_bytes + self.step_bytes
        kept = []
        if self.kept_states is not None:
            most = num_bytes(self.kept_states * self.kept_bytes)
            kept = [f"states      at most {self.kept_states} kept, of {num_bytes(self.kept_bytes)} each: {most} of the output"]
        return "\n".join(
            (
                f"shards      {self.shards}",
                f"documents   {plural(self.rows, 'row')}",
                f"tokens      about {count(self.tokens)}, by the size of the column",
                f"memory      about {num_bytes(memory)} a worker: weights {num_bytes(self.weights_bytes)}, "
                f"states {num_bytes(self.state_bytes)}, a step {num_bytes(self.step_bytes)}",
                f"time        about {clock_time(self.tail.whole_seconds)} with {plural(self.workers, 'worker')} "
                f"at {count(self.tokens_per_second)} tokens/s each, as a few steps went",
                self._end(),
                *kept,
                "nothing was written",
            )
        )

    def _end(self) -> str:
        tail = self.tail
        longest = (
            f"a document of about {count(tail.longest_tokens)} tokens, the longest known, takes {clock_time(tail.longest_seconds)} alone"
        )
        if self.workers == 1:
            return f"end         one worker is busy to the end; {longest}"
        return f"end         {clock_time(tail.seconds)} with workers idle, which costs {clock_time(tail.lost_seconds)}; {longest}"


def estimate(
    geometry: Mamba2Geometry,
    choice: Choice,
    sizes: Sizes,
    plan: Plan,
    workers: int,
    speeds: tuple[float, float],
    *,
    segment_tokens: int,
    keep_state: bool = False,
) -> Estimate:
    """Add up what is known. speeds: tokens a second of one worker, as `measure_speeds` gives them."""
    chains, (speed, alone) = longest_first(plan.chains()), speeds
    workers = min(workers, len(chains))
    slots = sizes.lanes + choice.context_slots + spare_slots(sizes.step_tokens, segment_tokens)
    itemsize = torch.finfo(getattr(torch, choice.dtype)).bits // 8
    step = sizes.step_tokens * (itemsize * (2 * geometry.projected + 2 * geometry.inner + geometry.channels) + 4 * geometry.d_model)
    return Estimate(
        shards=len(plan.shards),
        rows=plan.num_rows,
        tokens=plan.estimated_tokens,
        weights_bytes=geometry.num_parameters * itemsize,
        state_bytes=slots * geometry.state_bytes(itemsize),
        step_bytes=step,
        tokens_per_second=speed,
        workers=workers,
        tail=foresee(chains, workers, speed, alone),
        kept_states=min(plan.num_rows, plan.estimated_tokens // segment_tokens) if keep_state else None,
        kept_bytes=geometry.state_bytes(itemsize),
    )


def measure_speed(
    path: str, revision: str | None, choice: Choice, step_tokens: int, segment_tokens: int, cores: int, scores: bool
) -> float:
    """Tokens a second of the model alone, in full steps, with `cores` cores of this machine; with log-probabilities if `scores`.

    path, revision: of the model, which may have to be fetched there.
    """
    return _speeds(path, revision, choice, step_tokens, [segment_tokens], cores, scores)[0]


def measure_speeds(
    path: str, revision: str | None, choice: Choice, step_tokens: int, segment_tokens: int, cores: int, scores: bool
) -> tuple[float, float]:
    """The same, and that of a single document that fills the steps: lower on a GPU, where it is scanned from tile to tile."""
    sizes = [segment_tokens] if choice.device == "cpu" else [segment_tokens, step_tokens]
    speeds = _speeds(path, revision, choice, step_tokens, sizes, cores, scores)
    return speeds[0], speeds[-1]


def _speeds(
    path: str, revision: str | None, choice: Choice, step_tokens: int, segments: Sequence[int], cores: int, scores: bool
) -> list[float]:
    tokens = min(step_tokens, PROBE_TOKENS.get(choice.device, step_tokens)) // TILE * TILE
    dtype = getattr(torch, choice.dtype)
    model = load_model(fetch_model(path, revision).folder, dtype=dtype, device=choice.device, backend=choice.backend, format=choice.format)
    threads = torch.get_num_threads()
    torch.set_num_threads(min(cores, threads))
    try:
        return [tokens / _seconds_a_step(model, choice, tokens, segment_tokens, scores) for segment_tokens in segments]
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _seconds_a_step(model: Mamba2, choice: Choice, tokens: int, segment_tokens: int, scores: bool) -> float:
    """The median of steps with as many documents as their segments leave room for, as in the middle of a run."""
    ids_T = torch.arange(tokens, device=choice.device) % choice.vocab_size
    starts = range(0, tokens, min(segment_tokens, tokens))
    entries = [Entry(at // TILE, min(segment_tokens, tokens - at), lane_out=lane) for lane, at in enumerate(starts)]
    segments = Segments.pack(entries, tokens // TILE, choice.device, span_tiles=choice.span_tiles)
    state = model.new_state(len(entries))

    def step() -> float:
        began = time.perf_counter()
        hidden_TD, _ = model.step(ids_T, segments, state)
        if scores:
            model.logprobs(hidden_TD, ids_T)
        if choice.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    step()
    seconds: list[float] = []
    while sum(seconds) < PROBE_S:
        seconds.append(step())
    return statistics.median(seconds)

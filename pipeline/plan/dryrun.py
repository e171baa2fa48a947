"""What a run would be: shards, tokens, memory and time, the last from a few steps of the model where workers run."""

from __future__ import annotations

import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.pipeline.engine.slots import spare_slots
from longscan.pipeline.keep.leftover import Done
from longscan.pipeline.model import Mamba2, Mamba2Geometry, load_model
from longscan.pipeline.plan.fetch import fetch_model
from longscan.pipeline.plan.nodes import Workers
from longscan.pipeline.plan.planner import Plan
from longscan.pipeline.plan.resolve import Choice
from longscan.pipeline.plan.sizes import Sizes
from longscan.pipeline.plan.tail import Chain, Pace, Tail, foresee, longest_first
from longscan.pipeline.read.sample import Sample
from longscan.pipeline.records import BYTES_PER_TOKEN
from longscan.pipeline.wording import clock_time, count, num_bytes, plural

PROBE_S = 3.0
PROBE_TOKENS = {"cpu": 2048}
PROBE_QUEUED = 8
"""Steps that are queued on a GPU before they are waited for."""
DOCUMENT_S = 125e-6
"""CPU seconds of the host for a document, but for its tokenizing: as documents of 500 tokens went, see the README's measurements."""


class Speeds(NamedTuple):
    """Of one worker, where workers run."""

    full: float
    """Tokens a second of the model alone, in full steps of many documents."""
    alone: float
    """Of a single document that fills the steps: lower on a GPU, where it is scanned from tile to tile."""
    program_bytes: int
    """What the process holds without a model."""
    step_bytes: int = 0
    """That a full step took at its peak, on a CPU; 0 where it is not known."""


@dataclass(frozen=True, slots=True)
class Complete:
    """Nothing is left to do."""

    place: str

    def __str__(self) -> str:
        return f"{self.place}: the run is complete already, nothing to do\nnothing was written"


@dataclass(frozen=True, slots=True)
class Estimate:
    """All but `rows` and `shards` are estimates."""

    shards: int
    rows: int
    tokens: int
    done: Done
    left_tokens: int
    """Of `tokens`, those that this run has yet to compute, but for what an earlier run's states stand for; what time is estimated of."""
    device: str
    program_bytes: int
    weights_bytes: int
    state_bytes: int
    """Of all lanes, the spare slots, and behind the context; on a CPU, which takes memory as it is used, of no more than rows."""
    step_bytes: int
    """Activations of a step, at their largest: a layer's projection and what is made of it."""
    pace: Pace
    workers: int
    tail: Tail
    sample: Sample
    bytes_per_token: float
    kept_states: int | None = None
    """Documents whose state is kept, at most: those with more than a segment; and the bytes of one."""
    kept_bytes: int = 0

    def __str__(self) -> str:
        kept = []
        if self.kept_states is not None:
            most = num_bytes(self.kept_states * self.kept_bytes)
            kept = [f"states      at most {self.kept_states} kept, of {num_bytes(self.kept_bytes)} each: {most} of the output"]
        known = "as some texts have" if self.sample.bytes_per_token else "as is usual"
        return "\n".join(
            (
                f"shards      {self.shards}",
                f"documents   {plural(self.rows, 'row')}",
                f"tokens      about {count(self.tokens)}, by the size of the column and {self.bytes_per_token:.1f} bytes a token, {known}",
                *self._done(),
                self._memory(),
                f"time        about {clock_time(self.tail.whole_seconds)} with {plural(self.workers, 'worker')} once at work, "
                f"at {count(self.pace.speed)} tokens/s each in the model, as a few steps went",
                *self._continued(),
                *self._longest(),
                self._end(),
                *kept,
                "nothing was written",
            )
        )

    def _done(self) -> list[str]:
        """Of a run that goes on."""
        tokens, kept = sum(report.num_tokens for report in self.done.shards.values()), sum(self.done.kept.values())
        parts = [f"{len(self.done.shards)} of {plural(self.shards, 'shard')}, {count(tokens)} tokens"] if self.done.shards else []
        if kept:
            parts.append(f"{count(kept)} tokens of shards that are under way")
        return [f"done        {', and '.join(parts)}; about {count(self.left_tokens)} are left, and the time is theirs"] if parts else []

    def _continued(self) -> list[str]:
        """Of an earlier run's states. Which of its documents are among these is found when they are read."""
        if not self.done.states:
            return []
        most = sum(self.done.states)
        least_s = self.tail.whole_seconds * max(0.0, 1 - most / self.left_tokens) if self.left_tokens else 0.0
        return [
            f"continued   up to {count(most)} tokens of {plural(len(self.done.states), 'document')} lie before states of input.state_path "
            f"and need not be computed, though the time counts them: it may be down to {clock_time(least_s)}"
        ]

    def _memory(self) -> str:
        parts = {"weights": self.weights_bytes, "states": self.state_bytes, "a step": self.step_bytes}
        if self.device == "cpu":
            parts["the program itself"] = self.program_bytes
        said = ", ".join(f"{what} {num_bytes(size)}" for what, size in parts.items())
        beside = "" if self.device == "cpu" else f"; on the host {num_bytes(self.program_bytes)}, and what it reads"
        return f"memory      at least about {num_bytes(sum(parts.values()))} a worker: {said}{beside}"

    def _longest(self) -> list[str]:
        if not self.sample.rows:
            return []
        tokens = self.sample.longest / self.bytes_per_token
        alone = f"about {count(tokens)} tokens, {clock_time(tokens / self.pace.alone)} alone"
        if not self.sample.beyond:
            return [f"longest     {alone}"]
        most = count(self.sample.beyond / self.bytes_per_token)
        return [f"longest     {alone}, of {plural(self.sample.rows, 'row')} that were looked at; another may have up to {most}"]

    def _end(self) -> str:
        if self.workers == 1:
            return "end         one worker is busy to the end"
        return f"end         {clock_time(self.tail.seconds)} with workers idle, which costs {clock_time(self.tail.lost_seconds)}"


def estimate(
    geometry: Mamba2Geometry,
    choice: Choice,
    sizes: Sizes,
    plan: Plan,
    workers: Workers,
    speeds: Speeds,
    sample: Sample,
    done: Done,
    *,
    segment_tokens: int,
    keep_state: bool = False,
) -> Estimate:
    """Add up what is known. done: of this plan."""
    bytes_per_token = sample.bytes_per_token or BYTES_PER_TOKEN
    pace = _pace(speeds, sample, workers.cores, beside=choice.device != "cpu", scale=BYTES_PER_TOKEN / bytes_per_token)
    chains = _left(longest_first(plan.chains()), done, pace.scale)
    at_work = max(1, min(workers.most, len(chains)))
    in_use = sizes.lanes if choice.device != "cpu" else min(sizes.lanes, plan.num_rows)
    slots = in_use + choice.context_slots + spare_slots(sizes.step_tokens, segment_tokens)
    itemsize = choice.itemsize
    tokens = round(plan.estimated_tokens * pace.scale)
    return Estimate(
        shards=len(plan.shards),
        rows=plan.num_rows,
        tokens=tokens,
        done=done,
        left_tokens=round(sum(shard.estimated_tokens for chain in chains for shard in chain) * pace.scale),
        device=choice.device,
        program_bytes=speeds.program_bytes,
        weights_bytes=geometry.num_parameters * itemsize,
        state_bytes=slots * geometry.state_bytes(itemsize),
        step_bytes=max(geometry.step_bytes(sizes.step_tokens, itemsize), speeds.step_bytes),
        pace=pace,
        workers=at_work,
        tail=foresee(chains, at_work, pace),
        sample=sample,
        bytes_per_token=bytes_per_token,
        kept_states=min(plan.num_rows, tokens // segment_tokens) if keep_state else None,
        kept_bytes=geometry.state_bytes(itemsize),
    )


def _left(chains: Sequence[Chain], done: Done, scale: float) -> list[Chain]:
    """The chains without what is done. scale: tokens there are for each that the plan estimates."""
    left = []
    for chain in chains:
        shards = [shard for shard in chain if shard.index not in done.shards]
        kept = [round(done.kept.get(shard.index, 0) / scale) for shard in shards]
        left.append(
            tuple(
                replace(shard, estimated_tokens=max(0, shard.estimated_tokens - tokens)) for shard, tokens in zip(shards, kept, strict=True)
            )
        )
    return [chain for chain in left if chain]


def _pace(speeds: Speeds, sample: Sample, cores: int, *, beside: bool, scale: float) -> Pace:
    """beside: the device computes while the host's cores tokenize and write."""
    token_s, document_s = sample.tokenize_s / cores, DOCUMENT_S if beside else DOCUMENT_S / cores  # one thread's, but for the tokenizing
    return Pace(speeds.full, speeds.alone, scale, TILE / 2 / speeds.full, token_s, document_s, beside)


def measure_speed(
    path: str,
    revision: str | None,
    choice: Choice,
    step_tokens: int,
    segment_tokens: int,
    cores: int,
    scores: bool,
    probe_s: float | None = None,
) -> float:
    """Tokens a second of the model alone, in full steps, with `cores` cores of this machine; with log-probabilities if `scores`.

    path, revision: of the model, which may have to be fetched there. probe_s: it computes for so long, PROBE_S by default, and the second
    half counts: a GPU that has been at work for a while is some hundredths slower than one that begins.
    """
    return _speeds(path, revision, choice, step_tokens, [segment_tokens], cores, scores, probe_s)[0][0]


def measure_speeds(
    path: str, revision: str | None, choice: Choice, step_tokens: int, segment_tokens: int, cores: int, scores: bool
) -> Speeds:
    """The same, and that of a single document."""
    program = _resident_bytes()
    sizes = [segment_tokens] if choice.device == "cpu" else [segment_tokens, step_tokens]
    speeds, step_bytes = _speeds(path, revision, choice, step_tokens, sizes, cores, scores)
    return Speeds(speeds[0], speeds[-1], program, step_bytes)


def _resident_bytes() -> int:
    """Of this process; where the system does not say, the most that it has ever had."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _speeds(
    path: str,
    revision: str | None,
    choice: Choice,
    step_tokens: int,
    segments: Sequence[int],
    cores: int,
    scores: bool,
    probe_s: float | None = None,
) -> tuple[list[float], int]:
    """Of steps with each of these segments; and the bytes that a full step takes on a CPU."""
    tokens = min(step_tokens, PROBE_TOKENS.get(choice.device, step_tokens)) // TILE * TILE
    dtype = getattr(torch, choice.dtype)
    model = load_model(fetch_model(path, revision).folder, dtype=dtype, device=choice.device, backend=choice.backend, format=choice.format)

    def measure() -> tuple[list[float], int]:
        torch.set_num_threads(min(cores, torch.get_num_threads()))
        found = [_of_a_step(model, choice, tokens, segment_tokens, scores, probe_s or PROBE_S) for segment_tokens in segments]
        return [tokens / seconds for seconds, _ in found], max(peak for _, peak in found) * step_tokens // tokens

    # On a thread beside another that has computed, as a worker's engine is: OpenMP's threads spin while they wait for each other,
    # but for where they are more than there are cores. Where these are shared with other work that is many times as slow.
    torch.ones(1 << 20).sum()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(measure).result()


@torch.inference_mode()
def _of_a_step(model: Mamba2, choice: Choice, tokens: int, segment_tokens: int, scores: bool, probe_s: float) -> tuple[float, int]:
    """Of steps with as many documents as their segments leave room for, as in the middle of a run: the median of their seconds, and
    on a CPU the bytes that one takes at its peak, else 0.
    """
    ids_T = torch.arange(tokens, device=choice.device) % choice.vocab_size
    starts = range(0, tokens, min(segment_tokens, tokens))
    entries = [Entry(at // TILE, min(segment_tokens, tokens - at), lane_out=lane) for lane, at in enumerate(starts)]
    segments = Segments.pack(entries, tokens // TILE, choice.device, span_tiles=choice.span_tiles)
    state = model.new_state(len(entries))

    queued = PROBE_QUEUED if choice.device == "cuda" else 1

    def step() -> float:
        began = time.perf_counter()
        for _ in range(queued):
            hidden_TD, _ = model.step(ids_T, segments, state)
            if scores:
                model.logprobs(hidden_TD, ids_T)
        if choice.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / queued

    step()
    peak = _peak_bytes(step) if choice.device == "cpu" else 0
    seconds: list[float] = []
    while sum(seconds) * queued < probe_s:
        seconds.append(step())
    return statistics.median(seconds[len(seconds) // 2 :]), peak


def _peak_bytes(work: Callable[[], object], about: str = "/proc/self") -> int:
    """By which this process grows while it does `work`; 0 where the system does not tell."""
    with suppress(OSError):
        with open(f"{about}/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the peak begins anew
        before = _resident_bytes()
        work()
        with open(f"{about}/status", encoding="ascii", errors="replace") as file:
            found = re.search(r"^VmHWM:\s*(\d+) kB$", file.read(), re.MULTILINE)
        return max(0, int(found[1]) * 1024 - before) if found else 0
    return 0

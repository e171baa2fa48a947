"""A benchmark's case: the same work done by longscan and its peers. Checked first; what is wrong has no time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from longscan.kernels.bench.limits import Work
from longscan.kernels.bench.measure import Timer, in_turns

Parts = Callable[[str, Callable[[], object]], Mapping[str, float]]
"""Operator and call -> milliseconds of each kernel that it launches."""
Errors = Mapping[str, float]
"""By result: a relative error, or an absolute one where the name says so."""
PEER_TOLERANCE = 2e-2
"""Relative error that a peer may have to be compared with at all: ten times bf16's own, for peers that round in more places."""
NOT_INSTALLED = "not installed"
AT_ONCE = 1 << 26
"""Numbers that are compared at a time, unless a row has more."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to do a case's work."""

    name: str
    call: Callable[[], object]
    check: Callable[[], Errors]
    """Run once and compare with the reference."""
    tolerance: float = PEER_TOLERANCE


@dataclass(frozen=True, slots=True)
class Peer:
    """Another implementation, of which the fastest candidate counts."""

    name: str
    candidates: Callable[[], Sequence[Candidate]]
    """Raises ImportError where it is not installed."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed."""

    operator: str
    shape: str
    load: str
    work: Work
    ours: Candidate
    peers: Sequence[Peer] = ()
    token_heads: int | None = None
    """Tokens times heads, where that is what a time is told by."""
    memory: Callable[[Callable[[], object]], int] | None = None
    """Measures bytes beyond the inputs, where that counts."""
    in_turns: bool = False
    """Its time is that of the GPU's clock, which its power bounds: it and its peers, each one candidate, are timed in turns when warm."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What became of a candidate: `milliseconds` is None where it was not timed, and `note` says why."""

    name: str
    milliseconds: float | None
    errors: Errors = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A case's result."""

    operator: str
    shape: str
    load: str
    limit_milliseconds: float
    bound: str
    ours: Timing
    peers: Sequence[Timing]
    token_heads: int | None = None
    peak_bytes: int | None = None
    launches: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of each of our kernels."""

    @property
    def ns_per_token_head(self) -> float | None:
        if self.ours.milliseconds is None or self.token_heads is None:
            return None
        return self.ours.milliseconds * 1e6 / self.token_heads

    @property
    def ratio_to_limit(self) -> float | None:
        return None if self.ours.milliseconds is None else self.ours.milliseconds / self.limit_milliseconds

    def ratio_to(self, peer: Timing) -> float | None:
        """How many times longer the peer takes."""
        if self.ours.milliseconds is None or peer.milliseconds is None:
            return None
        return peer.milliseconds / self.ours.milliseconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        limit = {"milliseconds": self.limit_milliseconds, "bound": self.bound}
        ours = _timing(self.ours) | {"ratio_to_limit": self.ratio_to_limit}
        if self.token_heads is not None:
            ours["ns_per_token_head"] = self.ns_per_token_head
        if self.peak_bytes is not None:
            ours["peak_bytes"] = self.peak_bytes
        if self.launches:
            ours["launches"] = dict(self.launches)
        peers = [_timing(peer) | {"times_ours": self.ratio_to(peer)} for peer in self.peers]
        return {"operator": self.operator, "shape": self.shape, "load": self.load, "limit": limit, "longscan": ours, "peers": peers}


def _timing(timing: Timing) -> dict[str, Any]:
    errors = {name: error if error < float("inf") else None for name, error in timing.errors.items()}
    return {"name": timing.name, "milliseconds": timing.milliseconds, "errors": errors, "note": timing.note}


def run_case(case: Case, timer: Timer, *, peers: bool = True, parts: Parts | None = None, warm: Timer | None = None) -> Row:
    """Check and time a case. A peer that fails in any way is told of in its place; ours raises.

    parts: measures what each of our launches takes, where that is wanted. warm: times what is timed in turns.
    """
    ours = time_candidate(case.ours, timer)
    timed, call = ours.milliseconds is not None, case.ours.call
    peak = case.memory(call) if timed and case.memory is not None else None
    launches = parts(case.operator, call) if timed and parts is not None else {}
    others = [time_peer(peer, timer) for peer in case.peers] if peers else []
    if case.in_turns and all(timing.milliseconds is not None for timing in (ours, *others)):
        calls = [call, *(peer.candidates()[0].call for peer, _ in zip(case.peers, others, strict=False))]
        ours, *others = [
            replace(timing, milliseconds=seconds * 1e3)
            for timing, seconds in zip((ours, *others), in_turns(calls, warm or timer), strict=True)
        ]
    work = case.work
    return Row(case.operator, case.shape, case.load, work.seconds * 1e3, work.bound, ours, others, case.token_heads, peak, launches)


def time_candidate(candidate: Candidate, timer: Timer) -> Timing:
    """Check, then time."""
    errors = candidate.check()
    if not all(error <= candidate.tolerance for error in errors.values()):
        return Timing(candidate.name, None, errors, f"wrong: more than {candidate.tolerance:g}")
    return Timing(candidate.name, timer(candidate.call) * 1e3, errors)


def time_peer(peer: Peer, timer: Timer) -> Timing:
    """The peer's fastest candidate that is right."""
    try:
        tried = [time_candidate(candidate, timer) for candidate in peer.candidates()]
    except ImportError as error:
        return Timing(peer.name, None, note=NOT_INSTALLED if isinstance(error, ModuleNotFoundError) else f"not usable: {error}")
    except Exception as error:  # another project's code on this machine's compiler: the row says so, ours stands beside it
        torch.cuda.empty_cache()
        return Timing(peer.name, None, note=f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:160]}")
    timed = [timing for timing in tried if timing.milliseconds is not None]
    if not timed:
        return replace(tried[0], name=f"{peer.name} {tried[0].name}".strip())
    best = min(timed, key=lambda timing: timing.milliseconds or 0.0)
    note = ", ".join(f"{timing.name}: {timing.milliseconds:.3f} ms" for timing in timed) if len(timed) > 1 else ""
    return Timing(f"{peer.name} {best.name}".strip(), best.milliseconds, best.errors, note)


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Of the norms; infinite where a number is not finite, or shapes differ."""
    if got.shape != truth.shape:
        return float("inf")
    # Part by part: a layer's products are so large that in float64 they have no room beside each other on most GPUs.
    got, truth = torch.atleast_1d(got), torch.atleast_1d(truth)
    rows = max(1, AT_ONCE * len(truth) // max(1, truth.numel()))
    pairs = zip(got.split(rows), truth.split(rows), strict=True)
    norms = torch.stack([torch.stack([(part.double() - true.double()).norm(), true.double().norm()]) for part, true in pairs])
    distance, length = norms.norm(dim=0).tolist()
    error = distance / length if distance else 0.0
    return error if error == error else float("inf")

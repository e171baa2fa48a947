"""Find the fastest hints and sizes of each kernel on this GPU, and keep those that are clearly faster in the tuning tables.

A candidate is tried in the operator as it is launched, so what is compared is what runs; one that is wrong, or that the compiler
refuses, is passed over. The kernel as it is written is a candidate as well.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longscan.kernels import tuning
from longscan.kernels.bench import conv1d, logprob, norm, ssd
from longscan.kernels.bench.case import Case, time_candidate
from longscan.kernels.bench.measure import Timer
from longscan.kernels.conv1d.cases import MODELS as CONV1D
from longscan.kernels.logprob.cases import BENCHMARKS as LOGPROB
from longscan.kernels.norm.cases import GATED, RESIDUAL
from longscan.kernels.ssd.cases import MODELS as SSD
from longscan.kernels.tuning import Setting

WORTH = 0.99
"""A candidate is kept where it takes less than this of the time of the kernel as it is written."""


@dataclass(frozen=True, slots=True)
class Search:
    """One kernel, for one shape."""

    name: str
    """`operator.kernel`"""
    where: Mapping[str, int]
    """The shape, by the names that its launch asks with."""
    candidates: Sequence[Setting]
    case: Callable[[], Case]


@dataclass(frozen=True, slots=True)
class Found:
    """The best setting of a search. Milliseconds are of the whole operator."""

    name: str
    where: Mapping[str, int]
    setting: Setting
    milliseconds: float
    as_written: float
    tried: Mapping[str, str]
    """Each candidate and what became of it."""

    def line(self) -> str:
        chosen = _label(self.setting)
        shape = ", ".join(f"{key} {value}" for key, value in self.where.items())
        return f"{self.name} ({shape}): {chosen}, {self.milliseconds:.4f} ms; as written {self.as_written:.4f} ms; {len(self.tried)} tried"


class NotTunable(Exception):
    """A kernel is launched without asking for its setting, so that candidates would all be the same."""


def grid(hints: Mapping[str, Sequence[int]], sizes: Mapping[str, Sequence[int]] | None = None) -> list[Setting]:
    """Every combination."""
    sizes = sizes or {}
    return [
        Setting(dict(zip(hints, chosen[: len(hints)], strict=True)), dict(zip(sizes, chosen[len(hints) :], strict=True)))
        for chosen in itertools.product(*hints.values(), *sizes.values())
    ]


def searches(operators: Sequence[str]) -> Iterator[Search]:
    """What is worth a search at the shapes of the models."""
    occupancies = grid({"occupancy": (1, 2, 3, 4, 5, 6, 8)})
    rows = grid({"occupancy": (2, 4, 8, 12)}, {"ROWS": (1, 2, 4)})
    for operator in operators:
        if operator == "conv1d":
            for shape in CONV1D:
                where = {"C": shape.C, "K": shape.K}
                yield Search("conv1d.convolve", where, occupancies, lambda s=shape: next(conv1d.cases([s])))  # type: ignore[misc]
        elif operator == "norm":
            for plain in RESIDUAL:
                where = {"D": plain.width}
                yield Search("norm.add_and_norm", where, rows, lambda s=plain: next(norm.cases([s], [])))  # type: ignore[misc]
            for gated in GATED:
                where = {"J": gated.width // gated.groups}
                yield Search("norm.gate_and_norm", where, rows, lambda s=gated: next(norm.cases([], [s])))  # type: ignore[misc]
        elif operator == "logprob":
            for scored in LOGPROB:
                where = {"D": scored.width}
                hints = grid({"num_worker_warps": (4, 8), "occupancy": (1, 2)})
                yield Search("logprob.score_rows", where, hints, lambda s=scored: next(logprob.cases([s])))  # type: ignore[misc]
        elif operator == "ssd":
            yield from _ssd_searches()


def _ssd_searches() -> Iterator[Search]:
    for shape in SSD:
        where = {"H": shape.H, "P": shape.P, "N": shape.N}
        for kernel, load, occupancies in (("time_steps", 0, (4, 8, 16)), ("products", 0, (1, 2, 4)), ("span_ends", 1, (1, 2, 3, 4))):

            def case(shape: Any = shape, load: int = load) -> Case:
                return next(ssd.cases([shape], loads=lambda s: [ssd.loads(s)[load]]))

            yield Search(f"ssd.{kernel}", where, grid({"occupancy": occupancies}), case)


def tune(search: Search, timer: Timer) -> Found:
    """Try every candidate. Raises NotTunable where the kernel is launched as it is written whatever its setting says."""
    ours = search.case().ours
    tuning.asked.discard(search.name)
    with tuning.trying(search.name, Setting()):
        written = time_candidate(ours, timer)
    if search.name not in tuning.asked:
        raise NotTunable(f"{search.name}: expected its launch to ask `longscan.kernels.tuning` for a setting, it does not")
    if written.milliseconds is None:
        raise NotTunable(f"{search.name}: {written.note}, as it is written: {dict(written.errors)}")
    times: dict[str, tuple[float, Setting]] = {}
    tried: dict[str, str] = {}
    for candidate in search.candidates:
        with tuning.trying(search.name, candidate):
            try:
                timing = time_candidate(ours, timer)
            except Exception as error:  # of the compiler or of the launch: this candidate is none
                tried[_label(candidate)] = f"failed: {type(error).__name__}"
                continue
        tried[_label(candidate)] = timing.note or f"{timing.milliseconds:.4f} ms"
        if timing.milliseconds is not None:
            times[_label(candidate)] = (timing.milliseconds, candidate)
    best, setting = min(times.values(), key=lambda found: found[0], default=(float("inf"), Setting()))
    if best >= WORTH * written.milliseconds:
        best, setting = written.milliseconds, Setting()
    return Found(search.name, search.where, setting, best, written.milliseconds, tried)


def keep(found: Found, arch: str, folder: Path, made: Mapping[str, Any]) -> None:
    """Write what was found for `arch` to `folder`/<operator>/tuning.json, in place of what was there for the same shape.

    made: where and when; the tables that the package has are the start where the folder holds none.
    """
    operator, _, kernel = found.name.partition(".")
    path = folder / operator / tuning.FILE
    table = json.loads(path.read_text("utf-8")) if path.exists() else json.loads(json.dumps(tuning.table(operator)))
    entries = table.setdefault("kernels", {}).setdefault(kernel, {}).setdefault(arch, [])
    others = [entry for entry in entries if entry["where"] != dict(found.where)]
    if found.setting != Setting():
        chosen = {"where": dict(found.where), "hints": dict(found.setting.hints), "sizes": dict(found.setting.sizes)}
        others.append({**chosen, "milliseconds": round(found.milliseconds, 5), "as_written": round(found.as_written, 5)})
    table["kernels"][kernel][arch] = others
    table.setdefault("made", {})[arch] = dict(made)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", "utf-8")


def _label(setting: Setting) -> str:
    return ", ".join(f"{key}={value}" for key, value in (*setting.hints.items(), *setting.sizes.items())) or "as written"

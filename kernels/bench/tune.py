"""Find the fastest hints and sizes of each kernel on this GPU, and keep those that are clearly faster in the tuning tables.

A candidate is tried in the operator as it is launched, so what is compared is what runs; one that is wrong, or that the compiler
refuses, is passed over. The kernel as it is written is a candidate as well.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longscan.kernels import tuning
from longscan.kernels.bench import conv1d, logprob, norm, product, ssd
from longscan.kernels.bench.case import Case, time_candidate
from longscan.kernels.bench.measure import Timer, in_turns
from longscan.kernels.bench.suite import MODELS
from longscan.kernels.conv1d.cases import MODELS as CONV1D
from longscan.kernels.logprob.cases import BENCHMARKS as LOGPROB
from longscan.kernels.norm.cases import GATED, RESIDUAL
from longscan.kernels.product.cases import MODELS as PRODUCTS
from longscan.kernels.ssd.cases import MODELS as SSD
from longscan.kernels.tuning import Setting

JOINED_HEADS = 32
"""Heads of a group whose time steps `prepare` takes at once at most: of more it spills."""
TILES = (20, 23, 24, 29, 31, 32, 186, 195, 197, 201, 209, 227, 236, 240, 244, 248)
"""Of cuBLAS (cublasLtMatmulTile_t), which it was seen to propose on sm_90 for a layer's products; 20 is 128 x 128, 29 is 128 x 160."""
FINALISTS = 3
"""Of a search's candidates, the fastest at a first look, which are held against the kernel as it is written in turns."""
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
    model: str = ""
    """Whose shape it is, as the cases name it."""
    beside: Mapping[str, Setting] = field(default_factory=dict)
    """Settings of other kernels meanwhile, without which this one might not be launched at all."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best setting of a search. Milliseconds are of the whole operator."""

    name: str
    where: Mapping[str, int]
    setting: Setting
    milliseconds: float
    as_written: float
    tried: Mapping[str, str]
    """Each candidate and what became of it: its time at the first look, and in turns where it came so far."""

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
    """What is worth a search at the shapes of the models that people run: some 110 candidates, each compiled once (1 to 3 s) and timed."""
    latest = _Latest()
    if "conv1d" in operators:
        candidates = [Setting({"occupancy": 3}), *grid({"occupancy": (3, 4)}, {"SELECT": (1,)})]
        for shape in _of_models(CONV1D):
            make = latest.of("conv1d", shape, lambda s=shape: conv1d.cases([s]))  # type: ignore[misc]
            yield Search("conv1d.convolve", {"C": shape.C, "K": shape.K}, candidates, make, shape.name)
    if "norm" in operators:
        for plain in _of_models(RESIDUAL):
            # The second case is the network's: the stream alone, to which a product has added.
            make = latest.of("norm", plain, lambda s=plain: itertools.islice(norm.cases([s], []), 1, None))  # type: ignore[misc]
            yield Search("norm.add_and_norm", {"D": plain.width}, _rows(plain.width), make, plain.name)
        for gated in _of_models(GATED):
            width = gated.width // gated.groups
            make = latest.of("gated norm", gated, lambda s=gated: norm.cases([], [s]))  # type: ignore[misc]
            yield Search("norm.gate_and_norm", {"J": width}, _rows(width), make, gated.name)
    if "logprob" in operators:
        candidates = [Setting({"num_worker_warps": 8}), Setting({"num_worker_warps": 8, "num_ctas": 2}, {"ROWS": 256})]
        for scored in LOGPROB:
            make = latest.of("logprob", scored, lambda s=scored: logprob.cases([s]))  # type: ignore[misc]
            yield Search("logprob.score_rows", {"D": scored.width}, candidates, make, MODELS[scored.name])
    if "product" in operators:
        for made in _of_models(PRODUCTS):
            make = latest.of("product", made, lambda s=made: product.cases([s], proposed=True))  # type: ignore[misc]
            name, where = f"product.{'add' if made.add else 'project'}", {"N": made.columns, "K": made.inner}
            yield Search(name, where, grid({}, {"TILE": TILES}), make, made.name)
    if "ssd" in operators:
        yield from _ssd_searches(latest)


def _ssd_searches(latest: _Latest) -> Iterator[Search]:
    """What comes before the scan with documents that fill the GPU, `span_ends` and `span_starts` with one alone, in spans."""
    ends = [Setting({}, {"LATENCY": 1}), Setting({}, {"LATENCY": 4}), Setting({"occupancy": 1}, {"HEADS": 2})]
    starts = [Setting({}, {"SPANS": 2}), *(Setting({"occupancy": 4}, sizes) for sizes in ({"SPANS": 8}, {"ROWS": 32}))]
    kernels = (
        ("prepare", 0, grid({"occupancy": (3, 4)}, {"JOINED": (1,)})),
        ("time_steps", 0, [*grid({"occupancy": (4,)}), *grid({}, {"BLOCKS": (3,)})]),
        ("products", 0, grid({"occupancy": (1, 4)})),
        ("span_ends", 1, ends),
        ("span_starts", 1, starts),
    )
    for shape in _of_models(SSD):
        where = {"H": shape.H, "G": shape.G, "P": shape.P, "N": shape.N}
        for kernel, load, candidates in kernels:
            if kernel == "prepare" and shape.H // shape.G > JOINED_HEADS:
                continue
            make = latest.of(
                "ssd",
                (shape, load),
                lambda s=shape, load=load: ssd.cases([s], loads=lambda s: [ssd.loads(s)[load]]),  # type: ignore[misc]
            )
            # Both in one launch, neither would be launched by itself.
            beside = {"ssd.prepare": Setting()} if kernel in ("time_steps", "products") else {}
            yield Search(f"ssd.{kernel}", where, candidates, make, shape.name, beside)


def _rows(width: int) -> list[Setting]:
    """Of the norms: what keeps a row, or two, in registers."""
    if width > 4096:
        return grid({"occupancy": (2, 6)}, {"ROWS": (1,)})
    return [
        *grid({"occupancy": (4, 8, 12)}, {"ROWS": (1,)}),
        *grid({"occupancy": (4, 8)} if width <= 2048 else {"occupancy": ()}, {"ROWS": (2,)}),
    ]


class _Latest:
    """The case that was made last, with its inputs and its reference: searches that follow one another may share it."""

    def __init__(self) -> None:
        self._key: object = None
        self._case: Case | None = None

    def of(self, operator: str, shape: object, cases: Callable[[], Iterator[Case]]) -> Callable[[], Case]:
        """Makes the first of `cases`, unless it is there."""

        def make() -> Case:
            if self._case is None or self._key != (operator, shape):
                self._case = None
                self._key, self._case = (operator, shape), next(cases())
            return self._case

        return make


def _of_models(shapes: Sequence[Any]) -> list[Any]:
    return [shape for shape in shapes if shape.name in MODELS.values()]


def tune(search: Search, timer: Timer, final: Timer | None = None) -> Found:
    """Try every candidate, and what the table has now; the fastest again in turns, by the timer `final`.

    Raises NotTunable where the kernel is launched as it is written whatever its setting says, or is not launched.
    """
    with ExitStack() as meanwhile:
        for name, setting in search.beside.items():
            meanwhile.enter_context(tuning.trying(name, setting))
        return _tune(search, timer, final or timer)


def _tune(search: Search, timer: Timer, final: Timer) -> Found:
    ours = search.case().ours
    current = tuning.setting(search.name, **search.where)
    candidates = [*search.candidates, *([] if current in (Setting(), *search.candidates) else [current])]
    tuning.asked.discard(search.name)
    with tuning.trying(search.name, Setting()):
        written = time_candidate(ours, timer)
    if search.name not in tuning.asked:
        raise NotTunable(f"{search.name}: expected its launch to ask `longscan.kernels.tuning` for a setting, it does not")
    if written.milliseconds is None:
        raise NotTunable(f"{search.name}: {written.note}, as it is written: {dict(written.errors)}")
    times: dict[str, tuple[float, Setting]] = {}
    tried: dict[str, str] = {}
    for candidate in candidates:
        with tuning.trying(search.name, candidate):
            try:
                timing = time_candidate(ours, timer)
            except Exception as error:  # of the compiler or of the launch: this candidate is none
                tried[_label(candidate)] = f"failed: {type(error).__name__}"
                continue
        tried[_label(candidate)] = timing.note or f"{timing.milliseconds:.4f} ms"
        if timing.milliseconds is not None:
            times[_label(candidate)] = (timing.milliseconds, candidate)
    as_written, best, setting = written.milliseconds, written.milliseconds, Setting()
    finalists = [candidate for _, candidate in sorted(times.values(), key=lambda found: found[0])[:FINALISTS]]
    if finalists:
        as_written, *milliseconds = _in_turns(search.name, ours.call, [Setting(), *finalists], final)
        best, setting = min(zip(milliseconds, finalists, strict=True), key=lambda found: found[0])
        for candidate, took in zip(finalists, milliseconds, strict=True):
            tried[_label(candidate)] += f", in turns {took:.4f} ms"
    if best >= WORTH * as_written:
        best, setting = as_written, Setting()
    return Found(search.name, search.where, setting, best, as_written, tried)


def _in_turns(name: str, call: Callable[[], object], settings: Sequence[Setting], timer: Timer) -> list[float]:
    """Milliseconds with each: the best of many looks better than it is, and the GPU was not as warm for all."""

    def of(candidate: Setting) -> Callable[[], object]:
        def run() -> object:
            with tuning.trying(name, candidate):
                return call()

        return run

    return [seconds * 1e3 for seconds in in_turns([of(candidate) for candidate in settings], timer)]


def keep(found: Found, arch: str, folder: Path, made: Mapping[str, Any]) -> None:
    """Write what was found for `arch` to `folder`/<operator>/tuning.json, in place of what was there for the same shape.

    made: where and when; the tables that the package has are the start where the folder holds none.
    """
    operator, _, kernel = found.name.partition(".")
    path = folder / operator / tuning.FILE
    table = json.loads(path.read_text("utf-8")) if path.exists() else json.loads(json.dumps(tuning.table(operator)))
    entries = table.setdefault("kernels", {}).setdefault(kernel, {}).setdefault(arch, [])
    others = [entry for entry in entries if entry["where"] != dict(found.where)]
    # Where an entry for more shapes would count, it is also said that the kernel is best as it is written.
    wider: Mapping[str, Any] = next((entry for entry in others if entry["where"].items() <= found.where.items()), {})
    if found.setting != Setting(wider.get("hints", {}), wider.get("sizes", {})):
        chosen = {"where": dict(found.where), "hints": dict(found.setting.hints), "sizes": dict(found.setting.sizes)}
        others.append({**chosen, "milliseconds": round(found.milliseconds, 5), "as_written": round(found.as_written, 5)})
    # The first that fits counts: those for the fewest shapes come first.
    table["kernels"][kernel][arch] = sorted(others, key=lambda entry: -len(entry["where"]))
    table.setdefault("made", {})[arch] = dict(made)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", "utf-8")


def _label(setting: Setting) -> str:
    return ", ".join(f"{key}={value}" for key, value in (*setting.hints.items(), *setting.sizes.items())) or "as written"

"""The tuning tables: `tuning.json` beside each operator's kernels, with what `longscan-bench tune` found best on a GPU.

    {"kernels": {"convolve": {"sm_90": [{"where": {"C": 1792}, "hints": {"occupancy": 5}, "sizes": {}}]}},
     "spill_allowed": {"sm_80": {"convolve": 216}}, "spill_allowed_all": {...},
     "made": {...}}

An entry holds for launches whose shape has all that its `where` names; the first that fits counts, and where none does a
kernel is launched as it is written. `hints` are the compiler's (occupancy, num_worker_warps, num_ctas), `sizes` the launch's
own numbers (rows of a block). Both can change a result's last bits, so `version` is part of what a run's results depend on.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

FOLDER = Path(__file__).resolve().parent
FILE = "tuning.json"


Kernel = TypeVar("Kernel")


@dataclass(frozen=True, slots=True)
class Setting:
    """How to launch a kernel; empty: as it is written."""

    hints: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


_tried: ContextVar[Mapping[str, Setting] | None] = ContextVar("_tried", default=None)
_architecture: ContextVar[str | None] = ContextVar("_architecture", default=None)
asked: set[str] = set()
"""Kernels whose launches have looked for a setting, as `operator.kernel`."""


def setting(name: str, **shape: int) -> Setting:
    """The setting of the kernel `name`, as `operator.kernel`, for a launch of `shape` on this GPU."""
    asked.add(name)
    tried = _tried.get()
    if tried is not None and name in tried:
        return tried[name]
    arch = architecture()
    return Setting() if arch is None else _find(name, arch, tuple(sorted(shape.items())))


def tuned(kernel: Kernel, name: str, **shape: int) -> Kernel:
    """`kernel` with the hints of its setting."""
    found: Kernel = _with_hints(kernel, tuple(sorted(setting(name, **shape).hints.items())))
    return found


@functools.cache
def _with_hints(kernel: Any, hints: tuple[tuple[str, int], ...]) -> Any:
    """One object for one set of hints: each has compiled code of its own."""
    return kernel.replace_hints(**dict(hints)) if hints else kernel


@functools.cache
def _find(name: str, arch: str, shape: tuple[tuple[str, int], ...]) -> Setting:
    operator, _, kernel = name.partition(".")
    for entry in table(operator).get("kernels", {}).get(kernel, {}).get(arch, []):
        if entry["where"].items() <= dict(shape).items():
            return Setting(entry.get("hints", {}), entry.get("sizes", {}))
    return Setting()


@functools.cache
def table(operator: str) -> dict[str, Any]:
    """The operator's table; empty where it has none."""
    path = FOLDER / operator / FILE
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def spill_allowed(name: str, arch: str, *, full: bool = False) -> int:
    """Bytes of stack that the kernel `name` may use when it is compiled for `arch`: none unless the table says so.

    full: for any shape that the kernel takes, and not only for the models' shapes.
    """
    operator, _, kernel = name.partition(".")
    keys = ("spill_allowed", "spill_allowed_all") if full else ("spill_allowed",)
    return max(int(table(operator).get(key, {}).get(arch, {}).get(kernel, 0)) for key in keys)


def allow_spills(spills: Mapping[tuple[str, str], int], *, full: bool = False) -> None:
    """Write to the tables that kernels may spill what they do: (`operator.kernel`, architecture) -> bytes, the most of any shape.

    full: as `spill_allowed` takes it.
    """
    for operator in sorted({name.partition(".")[0] for name, _ in spills}):
        path = FOLDER / operator / FILE
        content = json.loads(json.dumps(table(operator)))
        allowed = content.setdefault("spill_allowed_all" if full else "spill_allowed", {})
        for (name, arch), spilled in sorted(spills.items()):
            if name.startswith(f"{operator}."):
                by_kernel = allowed.setdefault(arch, {})
                by_kernel.pop(name.partition(".")[2], None)
                if spilled:
                    by_kernel[name.partition(".")[2]] = spilled
                if not by_kernel:
                    del allowed[arch]
        content.setdefault("kernels", {})
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")
    table.cache_clear()


def version() -> str:
    """A name for all settings of all tables together: it changes when, and only when, one of them does. `none`: there are none."""
    kept: dict[str, Any] = {}
    for path in sorted(FOLDER.glob(f"*/{FILE}")):
        for kernel, by_arch in table(path.parent.name).get("kernels", {}).items():
            for arch, entries in by_arch.items():
                settings = [[entry["where"], entry.get("hints", {}), entry.get("sizes", {})] for entry in entries]
                if settings:
                    kept[f"{path.parent.name}.{kernel} {arch}"] = settings
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12] if kept else "none"


def architecture() -> str | None:
    """sm_90 and the like: what is compiled for, or this process's GPU; None where there is none."""
    return _architecture.get() or _of_device()


@functools.cache
def _of_device() -> str | None:
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """Inside, settings are those of `arch`, whatever GPU is there."""
    token = _architecture.set(arch)
    try:
        yield
    finally:
        _architecture.reset(token)


@contextmanager
def trying(name: str, candidate: Setting) -> Iterator[None]:
    """Inside, the kernel `name` has the setting `candidate` for every shape."""
    token = _tried.set({**(_tried.get() or {}), name: candidate})
    try:
        yield
    finally:
        _tried.reset(token)

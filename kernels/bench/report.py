"""What a benchmark found, for people (lines of text) and for later (a JSON file that is whole after each row)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from longscan.kernels.bench.case import Row, Timing


def lines(row: Row) -> Iterator[str]:
    """A row in words, its peers below it."""
    head = f"{row.operator:<8} {row.shape}; {row.load}"
    ours = row.ours
    if ours.milliseconds is None:
        yield f"{head}: {ours.note}{_errors(ours)}"
    else:
        speed = "" if row.ns_per_token_head is None else f"  {row.ns_per_token_head:.4f} ns/token-head"
        memory = "" if row.peak_bytes is None else f"  {row.peak_bytes / 1e6:.1f} MB beyond its inputs"
        limit = f"{row.ratio_to_limit:.2f} x the limit of {row.limit_milliseconds:.4f} ms ({row.bound})"
        yield f"{head}: {ours.milliseconds:.4f} ms{speed}  {limit}{memory}{_errors(ours)}"
    if row.launches:
        yield f"{'':<8}   of it: {', '.join(_part(row, name, milliseconds) for name, milliseconds in row.launches.items())}"
    for peer in row.peers:
        if peer.milliseconds is None:
            yield f"{'':<8}   {peer.name}: {peer.note}{_errors(peer)}"
            continue
        ratio = row.ratio_to(peer)
        times = "" if ratio is None else f"  {ratio:.2f} x ours"
        yield f"{'':<8}   {peer.name}: {peer.milliseconds:.4f} ms{times}{_errors(peer)}{f'  ({peer.note})' if peer.note else ''}"


def _part(row: Row, name: str, milliseconds: float) -> str:
    each = "" if row.token_heads is None else f" ({milliseconds * 1e6 / row.token_heads:.4f} ns/token-head)"
    return f"{name} {milliseconds:.4f} ms{each}"


def _errors(timing: Timing) -> str:
    found = ", ".join(f"{name} {error:.1e}" for name, error in timing.errors.items())
    return f"  [{found}]" if found else ""


def chip_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Where it was measured."""
    chip = facts["chip"]
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in facts["versions"].items())
    yield f"{facts['gpu']}, driver {facts['driver']}, CUDA {facts['cuda']}; {versions}; commit {facts['commit']}; {facts['date']}"
    copy, product = chip["copy_bytes_a_second"] / 1e12, chip["product_flops_a_second"] / 1e12
    yield f"this GPU copies {copy:.2f} TB/s and multiplies {product:.0f} TFLOP/s in bf16; limits are by 4.3 and 790"
    yield facts["timing"]


class Results:
    """A file of results in the making."""

    def __init__(self, path: Path | None, kind: str, facts: Mapping[str, Any]) -> None:
        """path: None where none is wanted. kind: `kernels`, `model` or `job`."""
        self._path = path
        self._content: dict[str, Any] = {"kind": kind, "facts": dict(facts), "rows": []}

    def add(self, row: Mapping[str, Any]) -> None:
        """Write the file anew: a run that is cut off leaves what it had."""
        self._content["rows"].append(dict(row))
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._content, indent=1, allow_nan=False) + "\n", "utf-8")


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Files of results, oldest first."""
    found = [json.loads(path.read_text("utf-8")) for path in sorted(paths)]
    return sorted(found, key=lambda content: str(content["facts"]["date"]))

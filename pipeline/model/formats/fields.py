"""A checkpoint's JSON, read key by key: what is wrong is noted and reading goes on, so that one error tells everything."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from longscan.pipeline.errors import ModelError
from longscan.pipeline.model.config import Mamba2Geometry


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or ModelError."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected a JSON object, but it cannot be read: {error}. Download the checkpoint again.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(values).__name__}. Download the checkpoint again.")
    return values


def read_list(path: Path) -> list[dict[str, Any]]:
    """A JSON list of objects, or ModelError."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected a JSON list, but it cannot be read: {error}. Download the checkpoint again.") from error
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ModelError(f"{path}: expected a JSON list of objects, found another {type(values).__name__}. Download the checkpoint again.")
    return values


def same(value: Any, other: Any) -> bool:
    """Equal as JSON has it, where true is no number."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


_REQUIRED: Any = object()


class Fields:
    """Typed reads of a config that note what is wrong and go on, so that one error tells everything."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        section: str = "",
        names: Mapping[str, str] | None = None,
        problems: list[str] | None = None,
    ) -> None:
        """section: where in the file `config` is. names: key -> what this file calls it. problems: a list to note them in."""
        self.config = config
        self.names = names or {}
        self.prefix = f"{section}." if section else ""
        self.problems: list[str] = [] if problems is None else problems

    def section(self, key: str) -> Fields:
        """The object under `key`, an empty one where there is none; its problems are noted with these."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            self.note(key, f"expected an object, found {value!r}")
            value = {}
        return Fields(value, section=key, problems=self.problems)

    def note(self, key: str, problem: str) -> None:
        """`key` cannot be used as it is."""
        self.problems.append(f"{self.prefix}{self.names.get(key, key)}: {problem}")

    def get(self, key: str) -> Any:
        """The value as it is, None where there is none."""
        return self.config.get(self.names.get(key, key))

    def supported(self, table: Mapping[str, tuple[Any, ...]]) -> None:
        """Note every key of `table` that is there with a value that longscan does not compute. table: key -> values that it does."""
        for key, values in table.items():
            if key in self.config and not any(same(self.config[key], value) for value in values):
                self.note(key, f"longscan computes {' or '.join(map(repr, values))} only, found {self.config[key]!r}")

    def finish(
        self, path: Path, make: Callable[[], Mamba2Geometry], check: Callable[[Mamba2Geometry], None] | None = None
    ) -> Mamba2Geometry:
        """What `make` reads; `check` notes what does not fit together. Raises one ModelError with all that was noted."""
        before = len(self.problems)
        geometry = make()
        if check is not None and len(self.problems) == before:
            check(geometry)
        if self.problems:
            raise ModelError(
                f"{path}: expected the config of a Mamba-2 that longscan can run, found\n  "
                + "\n  ".join(self.problems)
                + "\nCorrect the file if it is wrong, or choose another checkpoint."
            )
        return geometry

    def _get(self, key: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        value = self.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if value is None or not fits(value):
            found = "nothing" if value is None else repr(value)
            self.note(key, f"expected {expected}, found {found}")
            return 1
        return value

    def integer(self, key: str, default: int | None = _REQUIRED) -> Any:
        return self._get(key, default, "a positive integer", lambda v: isinstance(v, int) and not isinstance(v, bool) and v > 0)

    def positive(self, key: str, default: float) -> float:
        value = self._get(key, default, "a positive number", lambda v: _number(v) is not None and 0 < v < math.inf)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, default, "true or false", lambda v: isinstance(v, bool)))

    def items(self, key: str) -> list[Any]:
        """The list under `key`, an empty one where there is none."""
        value = self.get(key)
        if value is None or isinstance(value, list):
            return value or []
        self.note(key, f"expected a list, found {value!r}")
        return []

    def token(self, key: str) -> int | None:
        """A token id; the first one of a list."""
        value = self.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def bounds(self, key: str) -> tuple[float, float]:
        """Two numbers, low <= high, in any of the ways that checkpoints spell infinity; null stands for no bound."""
        value = self.get(key)
        if isinstance(value, str):
            value = value.strip("()[] ").split(",")
        if value is None:
            return 0.0, math.inf
        if isinstance(value, list | tuple) and len(value) == 2:
            low = 0.0 if value[0] is None else _number(value[0])
            high = math.inf if value[1] is None else _number(value[1])
            if low is not None and high is not None and 0 <= low <= high:
                return low, high
        self.note(key, f"expected two numbers 0 <= low <= high, found {self.get(key)!r}")
        return 0.0, math.inf


def _number(value: Any) -> float | None:
    """A number, also as a string ("inf", "Infinity") or as transformers 5 writes infinity; None for anything else."""
    if isinstance(value, dict):
        value = value.get("__float__")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None

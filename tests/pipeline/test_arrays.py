"""Arrays by their buffers are those that Arrow makes of the same values, and pandas is not imported for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from longscan.jobs.command import DEMO_MODEL
from longscan.pipeline.arrays import binaries, flags, numbers, of_numpy, strings, to_numpy

WHOLE = st.integers(-(2**63), 2**63 - 1)


def check(made: pa.Array, wanted: pa.Array) -> None:
    """Equal in type, nulls and bits, NaN included."""
    made.validate(full=True)
    assert made.type == wanted.type
    assert made.null_count == wanted.null_count
    assert repr(made.to_pylist()) == repr(wanted.to_pylist())


@settings(deadline=None)
@given(st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]))))
def test_strings(values: list[str | None]) -> None:
    check(strings(values), pa.array(values, pa.string()))


@settings(deadline=None)
@given(st.lists(st.binary()))
def test_binaries(values: list[bytes]) -> None:
    check(binaries(values), pa.array(values, pa.large_binary()))
    check(binaries([memoryview(value) for value in values]), pa.array(values, pa.large_binary()))


@settings(deadline=None)
@given(st.lists(st.none() | WHOLE), st.lists(st.none() | st.floats()))
def test_numbers(whole: list[int | None], real: list[float | None]) -> None:
    check(numbers(whole, pa.int64()), pa.array(whole, pa.int64()))
    check(numbers(real, pa.float64()), pa.array(real, pa.float64()))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(width=32), st.booleans())))
def test_numpys_numbers_and_flags(pairs: list[tuple[float, bool]]) -> None:
    values, there = np.array([value for value, _ in pairs], np.float32), np.array([flag for _, flag in pairs], bool)
    check(of_numpy(values, pa.float32(), there), pa.array(values, pa.float32(), mask=~there))
    check(flags(there), pa.array(there, pa.bool_()))
    check(of_numpy(values[::2], pa.float32()), pa.array(values[::2], pa.float32()))


@settings(deadline=None)
@given(st.lists(WHOLE), st.integers(0, 5), st.integers(0, 5))
def test_back_to_numpy(values: list[int], start: int, length: int) -> None:
    """Of a part of an array, too."""
    part = pa.array(values, pa.int64()).slice(min(start, len(values)), length)
    found = to_numpy(part)
    assert found.dtype == np.int64
    assert found.tolist() == part.to_pylist()


def test_strings_beyond_what_an_array_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        max = 5

    monkeypatch.setattr(np, "iinfo", lambda _: Small)
    with pytest.raises(ValueError, match="expected at most 5 bytes together, got 6"):
        strings(["abc", "def"])


@pytest.mark.parametrize("column", ["text", "ids"])
def test_a_job_does_not_import_pandas(tmp_path: Path, column: str) -> None:
    """Nor ray or datasets, where nobody asks for them: a worker's start is as long as its imports."""
    texts = [f"A text, number {n}." for n in range(4)]
    pq.write_table(pa.table({"text": texts, "ids": [[1, 2, 3]] * 4}), tmp_path / "in.parquet")
    words = [f"model.path={DEMO_MODEL}", f"input.path={tmp_path / 'in.parquet'}", f"output.path={tmp_path / 'out'}", "cluster=inprocess"]
    words += ["task=embed_score", "task.score.per_token=true", "task.embedding.window_tokens=64"]
    words += ["input.tokens_column=ids"] if column == "ids" else []
    script = "import sys; from longscan.jobs.run import main; code = main(sys.argv[1:]); "
    script += "print('found', sorted({'pandas', 'ray', 'datasets'} & set(sys.modules))); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "found []"

"""What the small commands have in common: their errors in a line, their exit codes, and quiet libraries."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from longscan.pipeline.console import shown
from longscan.pipeline.errors import LongscanError, Stopped

DEMO_MODEL = Path(__file__).parent / "demo" / "model"
"""What `demo` stands for, where a model is asked for."""


def finish(name: str, work: Callable[[], None]) -> int:
    """Do `work` for the command `name`. Returns its exit code: 0 done, else the error's, which is told on standard error."""
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")  # nothing that a user of these commands could act on
            work()
    except KeyboardInterrupt:
        return _fail(name, Stopped("stopped, and nothing was written"))
    except LongscanError as error:
        return _fail(name, error)
    return 0


def _fail(name: str, error: LongscanError) -> int:
    print(shown(f"{name}: error: {error}"), file=sys.stderr)
    return error.exit_code

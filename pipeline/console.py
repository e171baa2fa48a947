"""What is said to a person: no control characters of a file's name or of data in it, no secrets, and no line that data could forge."""

from __future__ import annotations

import logging
import sys

from longscan.pipeline.storage.redaction import printable

NAME = "longscan"
"""Of the logger above all of the project's."""


def shown(text: str) -> str:
    """`text` as a terminal takes it as it is meant; lines behind the first are set in, so that none looks like one of its own."""
    return printable(text).replace("\n", "\n  ")


class Printable(logging.Formatter):
    """Formats log lines like that."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def speak() -> logging.Handler:
    """Have longscan's log lines on standard error from now on; the handler, for whoever takes it away again."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Printable())
    logging.getLogger(NAME).addHandler(handler)
    return handler

"""What longscan raises when the world is not as expected.

    LongscanError
    ├── ConfigError          a key, a value, a combination of them: exit code 2
    ├── ModelError           a checkpoint or tokenizer that cannot be used as asked: exit code 2
    ├── InputError           input files that cannot be found or read, a column that is not there: exit code 2
    ├── OutputError          an output folder that cannot be used: not a run, another run's, locked, unwritable: exit code 2
    ├── DocumentError        one row that cannot be processed: becomes a row of errors/, never ends a run
    │   └── WorkerKilled     nor does one that ends the process that works on it
    ├── TooManyErrors        more error rows than max_errors, after everything else is committed: exit code 3
    └── Stopped              stopped before it was complete; what is done is kept, see `again`: exit code 75

Every message says what was expected, what was found and where (file, row, key), and what to do about it.
Shapes handed to an operator are a ValueError with name, expected and got; `assert` is for what cannot happen.
"""

from __future__ import annotations


class LongscanError(Exception):
    """Base of all errors that a user can meet. `exit_code` is the command's."""

    exit_code = 2


class ConfigError(LongscanError):
    """The configuration cannot be carried out."""


class ModelError(LongscanError):
    """The model or its tokenizer cannot be used as asked."""


class InputError(LongscanError):
    """The input cannot be found or read."""


class OutputError(LongscanError):
    """The output cannot be used."""


class DocumentError(LongscanError):
    """One document cannot be processed.

    stage: the verb that failed: "read", "tokenize", "engine" or "write".
    """

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


class WorkerKilled(DocumentError):
    """The worker's process ended again and again while it worked on this document and on no other."""


class TooManyErrors(LongscanError):
    """The run is complete, but more rows failed than max_errors allows."""

    exit_code = 3


class Stopped(LongscanError):
    """The run was asked to stop and can go on later."""

    exit_code = 75


def again(overwrite: bool) -> str:
    """How to go on with a run that was started with or without output.overwrite=true, which would begin it anew."""
    return "run the same command again, without output.overwrite=true," if overwrite else "run the same command again"

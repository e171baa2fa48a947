"""The command `longscan`: words in, a job out, its exit code back. No logic of the job is here.

longscan                                    the demo: six novels, in a few minutes on two cores
longscan task=embed model.path=MODEL input.path=DOCUMENTS output.path=OUT
longscan --help                             every key and its default
longscan --config-dir DIR --config-name NAME    start from your own YAML, see conf/
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from longscan.jobs.compose import all_keys, compose_job, near_keys, spelled_keys
from longscan.pipeline.config import DEMO, JobConfig
from longscan.pipeline.console import shown, speak
from longscan.pipeline.errors import LongscanError, Stopped, again
from longscan.pipeline.wording import plural

log = logging.getLogger("longscan")

DEMO_FOLDER = Path(__file__).parent / "demo"
MULTIRUN = "a command is one run, with an output.path of its own: for several, call it in a loop"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code: 0 done, 2 cannot be done, 3 done with too many errors, 75 stopped and can go on."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    before = signal.signal(signal.SIGTERM, _interrupt)
    overwrite = False
    try:
        with _logging(), _seldom_collected():
            config = compose_job(options.words, config_dir=options.config_dir, config_name=options.config_name)
            overwrite = config.output.overwrite
            return _run(config)
    except LongscanError as error:
        return _fail(error)
    except (KeyboardInterrupt, Exception) as error:
        # Where it comes while Hydra reads its files, Hydra makes an error of its own of it.
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        return _fail(Stopped(f"stopped; what is done is kept, {again(overwrite)} to go on"))
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Garbage is seldom sought: while a program's modules come in there is none, and looking costs a twentieth of its start."""
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _run(config: JobConfig) -> int:
    demo = config.input.path == DEMO
    if config.model.path == DEMO:
        if not demo:
            log.warning("model.path=demo: the small model that ships with longscan, trained on five novels; set model.path to your own")
        config.model.path = str(DEMO_FOLDER / "model")
    if demo:
        log.info("no input.path: the demo, six novels")
        config.input.path = str(DEMO_FOLDER / "austen.parquet")
    # Imported here because it brings torch along: mistakes in the words above are told at once.
    from longscan.pipeline.run import run

    outcome = run(config)
    if not isinstance(outcome, dict):
        print(outcome)
        return 0
    told = (plural(outcome[name], name.removesuffix("s")) for name in ("documents", "errors", "tokens"))
    log.info("done: %s in %s", ", ".join(told), config.output.path)
    if demo:
        from longscan.jobs.demo.table import render

        print(render(config))
    return 0


def _fail(error: LongscanError) -> int:
    print(shown(f"longscan: error: {error}"), file=sys.stderr)
    return error.exit_code


class _Parser(argparse.ArgumentParser):
    """Says of an option that it has not what may have been meant."""

    def error(self, message: str) -> NoReturn:
        found = re.match(r"unrecognized arguments: -+([\w-]+)", message)
        if found is not None:
            key = found[1].replace("-", "_")
            near = [key] if key in all_keys() else near_keys(key)
            hint = {"m": MULTIRUN, "multirun": MULTIRUN}.get(found[1]) or (f"did you mean {near[0]}=…?" if near else "see longscan --help")
            message = f"{message}; keys are written key=value; {hint}"
        super().error(message)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="longscan",
        description="Embeddings and scores of very long documents, from Parquet to Parquet, in one pass. Without words: the demo.",
        epilog="task=embed | score | embed_score | classify    cluster=auto | inprocess | local | ray\n\nkeys and their defaults:\n"
        + spelled_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides, in Hydra's grammar; paths as they are")
    parser.add_argument("--config-dir", metavar="DIR", help="folder of further YAML files")
    parser.add_argument("--config-name", metavar="NAME", help="YAML file to start from, instead of config or demo")
    return parser.parse_intermixed_args(arguments)


@contextmanager
def _logging() -> Iterator[None]:
    """While it lasts, longscan speaks on standard error; other libraries keep their warnings to themselves."""
    handler = speak()
    level = log.level
    log.setLevel(logging.INFO)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")  # nothing that a user of this command could act on
            yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

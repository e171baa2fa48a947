"""The command `longscan-inspect`: what a checkpoint is, what it takes to run it, and why it would be refused. No logic is here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from longscan.jobs.command import DEMO_MODEL, finish
from longscan.pipeline.config import DEMO
from longscan.pipeline.storage.redaction import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code: 0 longscan runs it, 2 it does not, or there is nothing to look at; 75 stopped."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    return finish("longscan-inspect", lambda: _model(options))


def _model(options: argparse.Namespace) -> None:
    # Imported here because they bring torch along: mistakes in the words are told at once.
    from longscan.pipeline.model.describe import describe
    from longscan.pipeline.plan.fetch import fetch_model

    folder = fetch_model(str(DEMO_MODEL) if options.path == DEMO else options.path, options.revision).folder
    found = describe(folder, lanes=options.lanes, format=options.format)
    print(printable("\n".join(found.lines)))
    if found.refusal:
        raise found.refusal


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longscan-inspect", description="Look at what a job would use.", allow_abbrev=False)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    model = kinds.add_parser("model", help="a checkpoint: geometry, parameters, memory, refusals", allow_abbrev=False)
    model.add_argument("path", metavar="PATH", help="folder or hub id of a Mamba-2; demo: the one that ships with longscan")
    model.add_argument("--lanes", type=_lanes, default=64, metavar="N", help="documents in flight to tell the memory for; 64")
    model.add_argument("--format", default="auto", metavar="FORMAT", help="hugging_face, state_spaces or mistral; auto: by content")
    model.add_argument("--revision", metavar="REVISION", help="of a hub id")
    return parser.parse_args(arguments)


def _lanes(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of documents, at least 1, got {word!r}")
    return int(word)


if __name__ == "__main__":
    sys.exit(main())

"""The command `longscan-convert`: a checkpoint of any supported format to a Hugging Face folder. No logic is here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from longscan.jobs.command import DEMO_MODEL, finish
from longscan.pipeline.config import DEMO
from longscan.pipeline.storage.redaction import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code: 0 done, 2 the source or the target cannot be used, 75 stopped."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    return finish("longscan-convert", lambda: _convert(options))


def _convert(options: argparse.Namespace) -> None:
    # Imported here because they bring torch along: mistakes in the words are told at once.
    from longscan.pipeline.model.convert import convert
    from longscan.pipeline.plan.fetch import fetch_model

    folder = fetch_model(str(DEMO_MODEL) if options.source == DEMO else options.source, options.revision).folder
    print(printable(str(convert(folder, options.target, format=options.format))))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="longscan-convert",
        description="Write a Mamba-2 of any supported format as a Hugging Face folder (config.json, model.safetensors, its tokenizer).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="folder or hub id: Hugging Face, state-spaces original, or Mistral consolidated; or demo"
    )
    parser.add_argument("target", metavar="TARGET", help="folder to write, which is not there yet or empty")
    parser.add_argument("--format", default="auto", metavar="FORMAT", help="hugging_face, state_spaces or mistral; auto: by content")
    parser.add_argument("--revision", metavar="REVISION", help="of a hub id")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

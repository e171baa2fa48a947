"""The command `longscan-bench`: kernels compiled ahead, checked and timed beside their peers, and whole jobs. No logic is here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from longscan.jobs.bench_job import add_arguments, report
from longscan.jobs.command import finish

NAME = "longscan-bench"
MODELS = ("130m", "2.7b", "7b")
KERNELS = ("ssd", "conv1d", "norm", "pool", "logprob")
OPERATORS = (*KERNELS, "product")
"""The last is cuBLAS's, of which nothing is compiled ahead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code: 0 done, 1 something is wrong with a kernel, 2 it cannot be done here, 75 stopped."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    wrong: list[str] = []
    code = finish(NAME, lambda: wrong.extend(options.work(options)))
    for line in wrong:
        print(f"{NAME}: wrong: {line}", file=sys.stderr)
    return code or int(bool(wrong))


# What each word of the command does; it returns a line for each thing that is wrong. Imports bring torch along, so they are made here.


def _compile(options: argparse.Namespace) -> list[str]:
    from longscan.jobs.benchmark.ahead import compile_kernels

    return compile_kernels(options.arch, options.operator, full=options.all, allow=options.allow)


def _kernels(options: argparse.Namespace) -> list[str]:
    from longscan.jobs.benchmark.operators import bench_kernels

    return bench_kernels(
        options.operator, options.shape, path=options.json, commit=options.commit, chunks=options.chunks, peers=not options.no_peers
    )


def _model(options: argparse.Namespace) -> list[str]:
    from longscan.jobs.benchmark.layers import bench_model

    return bench_model(
        options.shape, layers=options.layers, load=options.load, path=options.json, commit=options.commit, chunks=options.chunks
    )


def _tune(options: argparse.Namespace) -> list[str]:
    from longscan.jobs.benchmark.settings import tune_kernels

    return tune_kernels(options.operator, folder=options.out, commit=options.commit)


def _widths(options: argparse.Namespace) -> list[str]:
    from longscan.jobs.benchmark.widths import bench_widths

    return bench_widths(options.shape, commit=options.commit)


def _table(options: argparse.Namespace) -> list[str]:
    from longscan.jobs.benchmark.summary import jobs_summary, summary, write_summary

    if options.update is not None:
        write_summary(options.update)
    else:
        print(jobs_summary(), summary(), sep="\n\n")
    return []


def _job(options: argparse.Namespace) -> list[str]:
    report(options)
    return []


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=NAME, description="Compile, check, time and tune the kernels.", allow_abbrev=False)
    words = parser.add_subparsers(required=True, metavar="WHAT")
    one = words.add_parser("compile", help="every kernel for GPUs that need not be here; a JSON line each", allow_abbrev=False)
    one.set_defaults(work=_compile)
    one.add_argument("--arch", nargs="+", default=["sm_80", "sm_90", "sm_100", "sm_120"], metavar="SM", help="sm_90 and the like")
    one.add_argument("--all", action="store_true", help="all widths, state sizes and dtypes that kernels take, not the models'")
    one.add_argument(
        "--allow", action="store_true", help="write the spills that are found to the tuning tables: from now on they are right"
    )
    _operators(one, KERNELS)
    one = words.add_parser("kernels", help="check each operator, then time it beside its peers and its limit", allow_abbrev=False)
    one.set_defaults(work=_kernels)
    _operators(one)
    _measured(one)
    one.add_argument("--no-peers", action="store_true", help="time longscan alone")
    one = words.add_parser("model", help="whole networks of random weights, beside their products and a stack of peers", allow_abbrev=False)
    one.set_defaults(work=_model)
    one.add_argument("--layers", type=int, metavar="N", help="of each model; all that it has")
    one.add_argument("--load", default="", metavar="TEXT", help="only loads with this in their names, such as '11 documents'; all")
    _measured(one)
    one = words.add_parser("tune", help="find the fastest hints and sizes for the GPU that is here", allow_abbrev=False)
    one.set_defaults(work=_tune)
    _operators(one)
    one.add_argument("--out", type=Path, metavar="FOLDER", help="where the tables go; beside the kernels")
    one.add_argument("--commit", metavar="HASH", help="to be named in the tables, where there is no git to ask")
    one = words.add_parser("widths", help="the first product of a layer, its rows rounded up or cut in two", allow_abbrev=False)
    one.set_defaults(work=_widths)
    one.add_argument("--shape", nargs="+", choices=MODELS, default=["130m"], help="of these models; 130m")
    one.add_argument("--commit", metavar="HASH", help="to be named, where there is no git to ask")
    one = words.add_parser("table", help="the README's tables, from the results that are kept", allow_abbrev=False)
    one.set_defaults(work=_table)
    one.add_argument("--update", type=Path, metavar="README", help="write them there, each between its two marks")
    one = words.add_parser("job", help="a whole job against its model alone", allow_abbrev=False)
    one.set_defaults(work=_job)
    add_arguments(one)
    return parser.parse_args(arguments)


def _operators(parser: argparse.ArgumentParser, operators: Sequence[str] = OPERATORS) -> None:
    parser.add_argument("--operator", nargs="+", choices=operators, default=list(operators), help="all")


def _measured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", nargs="+", choices=MODELS, default=list(MODELS), help="of these models; all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well, after each of them")
    parser.add_argument("--commit", metavar="HASH", help="to be named in the results, where there is no git to ask")
    parser.add_argument("--chunks", nargs="+", type=int, default=[64, 128, 256], metavar="N", help="of mamba_ssm, the best is kept")


if __name__ == "__main__":
    sys.exit(main())

"""`longscan-bench job`: a whole job from Parquet to Parquet, against its model alone in the same run, and what each stage took.

longscan-bench job --lengths lognormal:8000 --tokens 4000000 --model MODEL
longscan-bench job --lengths constant:500 --fake-rate 2000000      the host's side alone, with a device that only sleeps

longscan-bench job --shape 130m --peers                            random weights, and the same documents through peers

--keys takes what `longscan` takes: `--keys engine.lanes=64 task.embedding.window_tokens=1024`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longscan.jobs.benchmark.record import SEQUENCE_TOKENS, JobRecord, record_of, write
from longscan.jobs.benchmark.watch import watched
from longscan.jobs.command import DEMO_MODEL
from longscan.pipeline.config import DEMO
from longscan.pipeline.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from longscan.pipeline.tokenize import TextTokenizer

STEP_TOKENS, LANES = 65536, 256
"""Of the sleeping device, as on an H200."""
SHAPES = ("130m", "2.7b", "7b")
GIVE = "give --model a folder that holds both, or leave it out for the demo's model, or give --shape for random weights"
ALONE_S = {"cpu": 3.0, "cuda": 12.0}
"""The model alone computes for so long: until a GPU is as warm, and its clock as low, as in a job."""


def bench_job(options: argparse.Namespace, told: Callable[[JobRecord], None] = lambda _: None) -> JobRecord:
    """Make the corpus, run the job, and say what it took. The corpus and the output are gone afterwards, unless options.keep.

    told: called with the record when the job is done, and again behind each peer.

    Raises ConfigError where there is no such model, and where peers are asked for that cannot be held against such a job.
    """
    from longscan.jobs.bench_corpus import lengths_of, make_corpus
    from longscan.jobs.compose import compose_job
    from longscan.pipeline.prepare import prepare
    from longscan.pipeline.run import run

    kind, _, size = options.lengths.partition(":")
    with _folder(options.keep) as folder:
        model = _model(options, folder)
        corpus = make_corpus(
            folder / "corpus.parquet", lengths_of(kind, int(size or 8000), options.tokens, options.seed), _tokenizer(model)
        )
        words = [f"model.path={model}", f"input.path={corpus.path}", f"output.path={folder / 'out'}", "input.id_column=id"]
        words += [f"task={options.task}", f"cluster={options.cluster}"]
        build = None
        if options.fake_rate:
            from longscan.jobs.bench_fake import sleeping_engine

            build = sleeping_engine(options.fake_rate, options.fake_width)
            words += [f"engine.step_tokens={STEP_TOKENS}", f"engine.lanes={LANES}"]
        config = compose_job([*words, *options.keys])
        if config.dry_run:
            raise ConfigError("--keys: expected a job that runs, got dry_run=true; `longscan dry_run=true` says what a job would take")
        prepared = prepare(config)
        if options.peers:
            _check_comparable(options, prepared)
        # The job begins by writing a few lines for good, and would wait for whatever else is on its way to the disk.
        os.sync()
        with watched() as watch:
            run(config, build=build)
        metrics: dict[str, Any] = json.loads((folder / "out" / "_run" / "metrics.json").read_text())
        record = record_of(options, corpus, metrics, watch, *_model_alone(options, prepared.choice, config, metrics, corpus.documents))
        told(record)
        for row in _peers(options, corpus.path, folder / "out", prepared.choice, record.tokens_per_second):
            record = replace(record, peers=(*record.peers, row))
            told(record)
        return record


def _model(options: argparse.Namespace, folder: Path) -> str:
    if options.shape is None:
        if not Path(options.model).is_dir():
            raise ConfigError(f"--model: expected the folder of a model and its tokenizer, found none at {options.model!r}; {GIVE}")
        return str(options.model)
    from longscan.jobs.bench_shapes import write_model

    return str(write_model(folder / "model", options.shape, options.layers))


def _tokenizer(model: str) -> TextTokenizer:
    """The corpus is made of texts in the tokens of the model's folder, which is the only place that the command takes them from."""
    from longscan.pipeline.tokenize.load import WANTED, load_tokenizer

    try:
        return load_tokenizer(model)
    except ModelError as error:
        raise ConfigError(f"--model: {str(error).replace(WANTED, GIVE)}") from error


def _check_comparable(options: argparse.Namespace, prepared: Any) -> None:
    """Raise ConfigError unless the job writes what the peers compute: the mean of a document's hidden states, and nothing before it."""
    embedding, choice = prepared.config.task.embedding, prepared.choice
    plain = list(embedding.poolings) == ["mean"] and embedding.truncate_dim is None and choice.context_id is None and choice.prompt is None
    if options.fake_rate or options.task != "embed" or not plain:
        raise ConfigError(
            "--peers: expected a real model, --task embed, task.embedding.pooling=mean in full width, and no prompt or BOS token before "
            "documents: that is what the peers compute"
        )


def _peers(options: argparse.Namespace, corpus: Path, out: Path, choice: Any, rate: float) -> Iterator[dict[str, Any]]:
    if not options.peers:
        return
    import torch
    from longscan.jobs.bench_peers import PEER_TOKENS, bench_peers, take_sample

    sample = take_sample(corpus, out, choice.folder, options.peer_tokens or PEER_TOKENS[choice.device], options.seed)
    for row in bench_peers(sample, choice.folder, choice.device, getattr(torch, choice.dtype), rate):
        yield asdict(row) | {"line": row.line()}


def _model_alone(
    options: argparse.Namespace, choice: Any, config: Any, metrics: dict[str, Any], documents: int
) -> tuple[float, float | None]:
    """Tokens a second of the model in full steps, and in steps of one sequence where that says something, on what the job ran on."""
    if options.fake_rate:
        return float(options.fake_rate), None
    from longscan.pipeline.plan.dryrun import measure_speed

    step, cores = metrics["sizes"]["step_tokens"], metrics["workers"]["cores"]

    def speed(step: int, segment: int) -> float:
        return measure_speed(choice.folder, None, choice, step, segment, cores, config.task.scores, ALONE_S[choice.device])

    if documents > 1 or choice.device == "cpu":
        return speed(step, config.engine.segment_tokens), None
    return speed(step, step), speed(SEQUENCE_TOKENS, SEQUENCE_TOKENS)


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        Path(keep).mkdir(parents=True, exist_ok=True)
        yield Path(keep)
        return
    with tempfile.TemporaryDirectory(prefix="longscan-bench-") as folder:
        yield Path(folder)


def report(options: argparse.Namespace) -> None:
    """Run the job of `options`, whose words are those of `add_arguments`, and say what it took."""
    if options.model == DEMO:
        options.model = str(DEMO_MODEL)

    def told(record: JobRecord) -> None:
        print("\n".join([record.peers[-1]["line"]] if record.peers else record.lines()), flush=True)
        if options.json is not None:
            write(options.json, record, options.commit)

    bench_job(options, told)


def _lengths(word: str) -> str:
    from longscan.jobs.bench_corpus import LENGTHS

    kind, _, size = word.partition(":")
    if kind not in LENGTHS or (size and not (size.isdecimal() and int(size))):
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(LENGTHS)}, with a number of tokens behind a colon, got {word!r}")
    return word


def _positive(word: str) -> int:
    if not (word.isdecimal() and int(word)):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {word!r}")
    return int(word)


def _rate(word: str) -> float:
    """Tokens a second; 0 is no sleeping device."""
    with suppress(ValueError):
        if 0 <= float(word) < math.inf:
            return float(word)
    raise argparse.ArgumentTypeError(f"expected tokens a second, got {word!r}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words of `longscan-bench job`."""
    parser.add_argument(
        "--lengths",
        type=_lengths,
        default="lognormal:8000",
        metavar="KIND[:TOKENS]",
        help="constant, lognormal by its median, giant: one document, or mixed: a giant, log-normal ones and many of 500",
    )
    parser.add_argument("--tokens", type=_positive, default=2_000_000, help="of the whole corpus, about")
    parser.add_argument("--model", default=DEMO, help="folder of the model, and of the tokenizer")
    parser.add_argument("--shape", choices=SHAPES, help="instead of a model, random weights of this shape")
    parser.add_argument("--layers", type=_positive, metavar="N", help="of that shape; all that it has")
    parser.add_argument("--peers", action="store_true", help="the same documents through other implementations as well")
    parser.add_argument(
        "--peer-tokens", type=_positive, metavar="N", help="of their sample of the documents; 60,000 on a CPU, 4 million on a GPU"
    )
    parser.add_argument("--task", default="embed", choices=("embed", "score", "embed_score"))
    parser.add_argument("--cluster", default="inprocess", choices=("inprocess", "local"))
    parser.add_argument("--fake-rate", type=_rate, default=0.0, metavar="TOKENS_PER_S", help="a device that only sleeps, of this speed")
    parser.add_argument("--fake-width", type=_positive, default=768, help="of its vectors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", metavar="FOLDER", help="where the corpus and the output stay")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the same numbers for a program, and where they were measured")
    parser.add_argument("--commit", metavar="HASH", help="to be named there, where there is no git to ask")
    parser.add_argument("--keys", nargs="*", default=[], metavar="key=value", help="further keys of the job, as `longscan` takes them")

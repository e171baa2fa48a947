"""`longscan-bench job`: a whole job from Parquet to Parquet, against its model alone in the same run, and what each stage took.

longscan-bench job --lengths lognormal:8000 --tokens 4000000 --model MODEL
longscan-bench job --lengths constant:500 --fake-rate 2000000      the host's side alone, with a device that only sleeps

longscan-bench job --shape 130m --peers                            random weights, and the same documents through peers

--keys takes what `longscan` takes: `--keys engine.lanes=64 task.embedding.window_tokens=1024`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from longscan.jobs.benchmark.watch import Watch, watched
from longscan.jobs.command import DEMO_MODEL
from longscan.pipeline.config import DEMO
from longscan.pipeline.errors import ConfigError
from longscan.pipeline.meter import BEFORE_FIRST, BETWEEN
from longscan.pipeline.wording import plural

STEP_TOKENS, LANES = 65536, 256
"""Of the sleeping device, as on an H200."""
SEQUENCE_TOKENS = 65536
"""Of the one sequence that kernels are measured by; a job of one document is held against it as well."""
SHAPES = ("130m", "2.7b", "7b")
ALONE_S = {"cpu": 3.0, "cuda": 12.0}
"""The model alone computes for so long: until a GPU is as warm, and its clock as low, as in a job."""
STAGES = ("read", "tokenize", "feed", "schedule", "pack", "copy", "launch", "wait", "rows", "write", "commit", "device")


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What one job came to."""

    lengths: str
    task: str
    documents: int
    tokens: int
    longest: int
    cores: int
    """Of a worker."""
    workers: int
    """That had something to do."""
    device: str
    backend: str
    seconds: float
    """From when a worker's model was loaded to its last commit; with several workers the longest time of one."""
    whole_seconds: float
    """Of everything, planning and loading too."""
    tokens_per_second: float
    model_tokens_per_second: float
    """Of the model alone behind the job, in full steps (of one document, where the corpus is one), when it has computed for a while;
    for the sleeping device its rate."""
    share_of_model: float
    sequence_tokens_per_second: float | None
    """The same of steps of one sequence of 65,536 tokens, where the corpus is one document and the device a GPU; else null."""
    device_share: float
    """Of the workers' seconds, those in which the device computed."""
    before_first_s: float
    between_steps_s: float
    behind_last_s: float
    """Of the workers' seconds, those in which the device had nothing to do: before its first step, between two, and behind the last,
    where rows are written and committed. With several workers sums over them, as `device_share` is by the sum of their seconds.
    """
    waste: float
    """Of the steps' rows, those without a token."""
    alignment_waste: float
    """The same of tiles in which there are tokens."""
    cpu_ns_per_token: float | None
    """CPU time of this process for everything, where all runs in it."""
    host_cpu_ns_per_token: float
    """CPU time of this process for all but the model; where the model runs on the CPU, of the stages without `launch`."""
    host_cpu_share: float | None
    """Of the process' CPU time, what was not the model's."""
    host_peak_mb: float
    host_before_mb: float
    """This process' memory before the job: torch and the corpus' maker."""
    device_peak_mb: float
    stages: dict[str, dict[str, float]]
    peers: tuple[dict[str, Any], ...] = ()
    """Each a PeerRow."""

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.lengths}, task={self.task}: {self.documents} documents, {self.tokens} tokens, the longest {self.longest}"
        each = " each" if self.workers > 1 else ""
        yield f"{plural(self.workers, 'worker')} with {plural(self.cores, 'core')}{each}, {self.device}, {self.backend}"
        yield f"job      {self.tokens_per_second:12,.0f} tokens/s in {self.seconds:.2f} s; {self.whole_seconds:.2f} s from start to end"
        yield f"model    {self.model_tokens_per_second:12,.0f} tokens/s alone; the job has {self.share_of_model:.1%} of it"
        if self.sequence_tokens_per_second is not None:
            rate = self.sequence_tokens_per_second
            share = self.tokens_per_second / rate
            yield f"sequence {rate:12,.0f} tokens/s alone, one of {SEQUENCE_TOKENS} tokens; the job has {share:.1%} of it"
        yield f"device   computed {self.device_share:.1%} of the time; nothing to do for {self.before_first_s:.2f} s before the first"
        yield f"         step, {self.between_steps_s:.2f} s between two, {self.behind_last_s:.2f} s behind the last"
        yield f"rows     {self.waste:.2%} of them held no token, {self.alignment_waste:.2%} of those in tiles with tokens"
        if self.cpu_ns_per_token is not None:
            yield f"cpu      {self.cpu_ns_per_token:.0f} ns of CPU time a token, planning, loading and all"
        yield f"host     {self.host_cpu_ns_per_token:.0f} ns of CPU time a token" + (
            "" if self.host_cpu_share is None else f", {self.host_cpu_share:.1%} of all CPU time"
        )
        yield f"memory   host {self.host_peak_mb:.0f} MB at its peak, {self.host_before_mb:.0f} before; device {self.device_peak_mb:.0f} MB"
        yield "stage       CPU s   ns/token  seconds"
        for name, cost in self.stages.items():
            yield f"{name:10}{cost['cpu_seconds']:7.2f}{1e9 * cost['cpu_seconds'] / max(self.tokens, 1):11.1f}{cost['seconds']:9.2f}"


def bench_job(options: argparse.Namespace, told: Callable[[JobRecord], None] = lambda _: None) -> JobRecord:
    """Make the corpus, run the job, and say what it took. The corpus and the output are gone afterwards, unless options.keep.

    told: called with the record when the job is done, and again behind each peer.

    Raises ConfigError where peers are asked for that cannot be held against such a job.
    """
    from longscan.jobs.bench_corpus import lengths_of, make_corpus
    from longscan.jobs.compose import compose_job
    from longscan.pipeline.run import prepare, run
    from longscan.pipeline.tokenize import load_tokenizer

    kind, _, size = options.lengths.partition(":")
    with _folder(options.keep) as folder:
        model = _model(options, folder)
        corpus = make_corpus(
            folder / "corpus.parquet", lengths_of(kind, int(size or 8000), options.tokens, options.seed), load_tokenizer(model)
        )
        words = [f"model.path={model}", f"input.path={corpus.path}", f"output.path={folder / 'out'}", "input.id_column=id"]
        words += [f"task={options.task}", f"cluster={options.cluster}"]
        build = None
        if options.fake_rate:
            from longscan.jobs.bench_fake import sleeping_engine

            build = sleeping_engine(options.fake_rate, options.fake_width)
            words += [f"engine.step_tokens={STEP_TOKENS}", f"engine.lanes={LANES}"]
        config = compose_job([*words, *options.keys])
        prepared = prepare(config)
        if options.peers:
            _check_comparable(options, prepared)
        with watched() as watch:
            run(config, build=build)
        metrics: dict[str, Any] = json.loads((folder / "out" / "_run" / "metrics.json").read_text())
        record = _record(options, corpus, metrics, watch, *_model_alone(options, prepared.choice, config, metrics, corpus.documents))
        told(record)
        for row in _peers(options, corpus.path, folder / "out", prepared.choice, record.tokens_per_second):
            record = replace(record, peers=(*record.peers, row))
            told(record)
        return record


def _model(options: argparse.Namespace, folder: Path) -> str:
    if options.shape is None:
        return str(options.model)
    from longscan.jobs.bench_shapes import write_model

    return str(write_model(folder / "model", options.shape, options.layers))


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


def _record(
    options: argparse.Namespace, corpus: Any, metrics: dict[str, Any], watch: Watch, model: float, sequence: float | None
) -> JobRecord:
    stages = {name: metrics["stages"][name] for name in STAGES if name in metrics["stages"]}
    workers, seconds = metrics["workers_at_work"], metrics["longest_worker_seconds"]
    tokens = metrics["tokens"]
    apart = options.fake_rate or metrics["device"] == "cuda"
    device, before, between = (metrics["stages"].get(name, {"seconds": 0.0})["seconds"] for name in ("device", BEFORE_FIRST, BETWEEN))
    staged = sum(cost["cpu_seconds"] for name, cost in stages.items() if apart or name != "launch")
    here = options.cluster == "inprocess"
    return JobRecord(
        lengths=options.lengths,
        task=options.task,
        documents=corpus.documents,
        tokens=tokens,
        longest=corpus.longest,
        cores=metrics["workers"]["cores"],
        workers=workers,
        device=f"sleeping, {options.fake_rate:.0f} tokens/s" if options.fake_rate else metrics["device"],
        backend=metrics["backend"],
        seconds=round(seconds, 3),
        whole_seconds=round(watch.seconds, 3),
        tokens_per_second=tokens / seconds,
        model_tokens_per_second=model,
        share_of_model=tokens / seconds / (model * workers),
        sequence_tokens_per_second=sequence,
        device_share=device / metrics["worker_seconds"],
        before_first_s=before,
        between_steps_s=between,
        behind_last_s=max(0.0, metrics["worker_seconds"] - device - before - between),
        waste=metrics["waste"],
        alignment_waste=metrics["alignment_waste"],
        cpu_ns_per_token=1e9 * watch.cpu_seconds / tokens if here else None,
        host_cpu_ns_per_token=1e9 * (watch.cpu_seconds if apart and here else staged) / tokens,
        host_cpu_share=staged / watch.cpu_seconds if here and not apart else None,
        host_peak_mb=watch.peak_mb,
        host_before_mb=watch.before_mb,
        device_peak_mb=watch.device_mb,
        stages=stages,
    )


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
        if options.json:
            Path(options.json).write_text(json.dumps(asdict(record), indent=2), "utf-8")

    bench_job(options, told)


def _lengths(word: str) -> str:
    from longscan.jobs.bench_corpus import LENGTHS

    kind, _, size = word.partition(":")
    if kind not in LENGTHS or (size and not (size.isdecimal() and int(size))):
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(LENGTHS)}, with a number of tokens behind a colon, got {word!r}")
    return word


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words of `longscan-bench job`."""
    parser.add_argument("--lengths", type=_lengths, default="lognormal:8000", metavar="KIND[:TOKENS]")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="of the whole corpus, about")
    parser.add_argument("--model", default=DEMO, help="folder of the model, and of the tokenizer")
    parser.add_argument("--shape", choices=SHAPES, help="instead of a model, random weights of this shape")
    parser.add_argument("--layers", type=int, metavar="N", help="of that shape; all that it has")
    parser.add_argument("--peers", action="store_true", help="the same documents through other implementations as well")
    parser.add_argument(
        "--peer-tokens", type=int, metavar="N", help="of their sample of the documents; 60,000 on a CPU, 4 million on a GPU"
    )
    parser.add_argument("--task", default="embed", choices=("embed", "score", "embed_score"))
    parser.add_argument("--cluster", default="inprocess", choices=("inprocess", "local"))
    parser.add_argument("--fake-rate", type=float, default=0.0, metavar="TOKENS_PER_S", help="a device that only sleeps, of this speed")
    parser.add_argument("--fake-width", type=int, default=768, help="of its vectors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", metavar="FOLDER", help="where the corpus and the output stay")
    parser.add_argument("--json", metavar="FILE", help="the same numbers for a program")
    parser.add_argument("--keys", nargs="*", default=[], metavar="key=value", help="further keys of the job, as `longscan` takes them")

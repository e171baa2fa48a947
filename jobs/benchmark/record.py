"""What `longscan-bench job` finds: a record of numbers, in lines for people and as a file of results."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longscan.jobs.benchmark.watch import Watch
from longscan.pipeline.meter import BEFORE_FIRST, BETWEEN
from longscan.pipeline.wording import plural

SEQUENCE_TOKENS = 65536
"""Of the one sequence that kernels are measured by; a job of one document is held against it as well."""
STAGES = ("read", "tokenize", "feed", "schedule", "pack", "copy", "launch", "wait", "rows", "write", "commit", "device")


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What one job came to."""

    model: str
    """Its shape, where its weights are random, else the name of its folder."""
    lengths: str
    task: str
    keys: tuple[str, ...]
    """Of the job, beside those that the benchmark sets itself."""
    documents: int
    tokens: int
    """That went through the model; those that states of an earlier run stand for did not."""
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
        rate, times = self.model_tokens_per_second, f"{self.workers} x " if self.workers > 1 else ""
        of_it = f"{self.share_of_model:.1%} of {'them' if times else 'it'}"
        yield f"model    {f'{times}{rate:,.0f}':>12} tokens/s alone; the job has {of_it}"
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


def record_of(
    options: argparse.Namespace, corpus: Any, metrics: dict[str, Any], watch: Watch, model: float, sequence: float | None
) -> JobRecord:
    """What `metrics`, a run's, `watch` and the speeds of its model alone (`model`, `sequence`) say of a job."""
    stages = {name: metrics["stages"][name] for name in STAGES if name in metrics["stages"]}
    workers, seconds = metrics["workers_at_work"], metrics["longest_worker_seconds"]
    tokens = metrics["computed_tokens"]
    apart = options.fake_rate or metrics["device"] == "cuda"
    device, before, between = (metrics["stages"].get(name, {"seconds": 0.0})["seconds"] for name in ("device", BEFORE_FIRST, BETWEEN))
    staged = sum(cost["cpu_seconds"] for name, cost in stages.items() if apart or name != "launch")
    here = options.cluster == "inprocess"
    return JobRecord(
        model=_name(options),
        lengths=options.lengths,
        task=options.task,
        keys=tuple(options.keys),
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


def _name(options: argparse.Namespace) -> str:
    if options.fake_rate:
        return "sleeping"
    if options.shape is None:
        return Path(options.model).name
    return str(options.shape) if options.layers is None else f"{options.shape}, {plural(options.layers, 'layer')}"


def write(path: Path, record: JobRecord, commit: str | None) -> None:
    """A file of results, as `longscan-bench table` reads it. commit: to be named, where there is no git to ask."""
    from longscan.kernels.bench.measure import origin
    from longscan.kernels.bench.report import Results

    Results(path, "job", origin(commit)).add(asdict(record))

"""The README's tables: of kernels and networks from kernels/results/, of whole jobs from jobs/results/; the newest of each row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longscan.kernels.bench.report import read
from longscan.pipeline.errors import OutputError
from longscan.pipeline.wording import plural

ROOT = Path(__file__).resolve().parents[2]
RESULTS, JOBS = ROOT / "kernels" / "results", ROOT / "jobs" / "results"
BEGIN = "<!-- made by `longscan-bench table --update README.md`: begin -->"
BEGIN_JOBS = "<!-- jobs, made by `longscan-bench table --update README.md`: begin -->"
END = "<!-- end -->"
NOTHING = "Nothing is kept yet: `longscan-bench kernels --json kernels/results/NAME.json` on a GPU makes the first row."
NO_JOBS = "Nothing is kept yet: `longscan-bench job --json jobs/results/NAME.json` makes the first row."
HEADER = ("| what | shape | load | time | x the limit | fastest peer | x the peer |", "|---|---|---|---|---|---|---|")
JOBS_HEADER = (
    "| model | corpus | tokens | tokens/s | of the model alone | GPU at work | idle before, between, behind its steps | GPU memory |",
    "|---|---|---|---|---|---|---|---|",
)
PEERS_HEADER = (
    "| model | corpus | peer, its loop alone | tokens | tokens/s | x the peer | vectors apart |",
    "|---|---|---|---|---|---|---|",
)
VERSION = re.compile(r" \d+(\.\w+)+$")

Content = Mapping[str, Any]


def summary(folder: Path = RESULTS) -> str:
    """The table in Markdown, and below it where its numbers come from."""
    rows: dict[tuple[str, ...], str] = {}
    origins: dict[tuple[str, ...], Content] = {}
    for content in read(folder.glob("*.json")):
        for row in content["rows"]:
            key, line = (_operator if content["kind"] == "kernels" else _network)(row)
            rows[key], origins[key] = line, content["facts"]
    if not rows:
        return NOTHING
    return "\n".join([*HEADER, *(rows[key] for key in sorted(rows, key=_order)), "", *_origins(origins.values())])


def jobs_summary(folder: Path = JOBS) -> str:
    """The same of whole jobs, and of the peers that were timed in the same runs: of each peer the newest, of whatever version and with
    whichever chunk was best. One that came to nothing, since it was not there or failed, hides none that did.
    """
    jobs: dict[tuple[str, ...], str] = {}
    peers: dict[tuple[str, ...], dict[str, Content]] = {}
    origins: dict[tuple[str, ...], Content] = {}
    for content in read(folder.glob("*.json")):
        for row in content["rows"]:
            key = (row["model"], _corpus(row), str(row["workers"]))
            jobs[key], origins[key] = _job(key, row), content["facts"]
            for peer in row["peers"]:
                name = VERSION.sub("", peer["name"].partition(",")[0])
                before = peers.setdefault(key, {}).get(name)
                if before is None or _has_numbers(peer) or not _has_numbers(before):
                    peers[key][name], origins[(*key, name)] = peer, content["facts"]
    if not jobs:
        return NO_JOBS
    beside = [_peer(key, peer) for key in sorted(peers) for peer in peers[key].values()]
    lines = [*JOBS_HEADER, *(jobs[key] for key in sorted(jobs)), "", *([*PEERS_HEADER, *beside, ""] if beside else [])]
    return "\n".join([*lines, *_measured(origins.values())])


def write_summary(readme: Path, folder: Path = RESULTS, jobs: Path = JOBS) -> None:
    """Put each table between its two marks of `readme`. Raises OutputError where there are none, or no such file that can be written."""
    try:
        text = readme.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(f"--update: expected a Markdown file with the tables' marks, and {readme} cannot be read: {error}") from error
    for mark, table in ((BEGIN, summary(folder)), (BEGIN_JOBS, jobs_summary(jobs))):
        before, begin, rest = text.partition(mark)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise OutputError(f"{readme}: expected the marks {mark} and {END}, found none to write the table between")
        text = f"{before}{mark}\n\n{table}\n\n{END}{after}"
    try:
        readme.write_text(text, "utf-8")
    except OSError as error:
        raise OutputError(f"--update: {readme} cannot be written: {error}") from error


def _operator(row: Content) -> tuple[tuple[str, ...], str]:
    ours = row["longscan"]
    key = (row["operator"], row["shape"], row["load"])
    if ours["milliseconds"] is None:
        return key, _line(*key, ours["note"], "", "", "")
    time = f"{ours['milliseconds']:.3f} ms"
    if "ns_per_token_head" in ours:
        time += f", {ours['ns_per_token_head']:.3f} ns a token and head"
    if "peak_bytes" in ours:
        time += f", {ours['peak_bytes'] / 1e6:.0f} MB"
    timed = [peer for peer in row["peers"] if peer["milliseconds"] is not None]
    best = min(timed, key=lambda peer: peer["milliseconds"], default=None)
    names = ("", "") if best is None else (f"{best['name']}, {best['milliseconds']:.3f} ms", f"{best['times_ours']:.2f}")
    return key, _line(*key, time, f"{ours['ratio_to_limit']:.2f}", *names)


def _network(row: Content) -> tuple[tuple[str, ...], str]:
    key = ("network", f"{row['shape']}, {row['layers']} layers", row["load"])
    time = f"{row['tokens_per_second']:,.0f} tokens/s, {row['layer_milliseconds']:.2f} ms a layer"
    peer = ("", "")
    if row["times_peer"] is not None:
        peer = (f"{row['peer']}, {row['peer_tokens_per_second']:,.0f} tokens/s", f"{row['times_peer']:.2f}")
    return key, _line(*key, time, f"{row['ratio_to_products_and_limits']:.2f}", *peer)


def _corpus(row: Content) -> str:
    kind, _, size = row["lengths"].partition(":")
    words = {"constant": f"documents of {size}", "lognormal": f"log-normal lengths, median {size}", "giant": "one document"}.get(kind, kind)
    if row["task"] != "embed":
        words += f"; {row['task']}"
    if row["device"] != "cuda":
        words += f"; {row['device']}"
    return "; ".join([words, *(f"`{key}`" for key in row.get("keys", ()))])


def _job(key: Sequence[str], row: Content) -> str:
    speed = f"{row['tokens_per_second']:,.0f} in {row['seconds']:.1f} s"
    if row["workers"] > 1:
        speed += f", {plural(row['workers'], 'GPU' if row['device'] == 'cuda' else 'worker')}"
    share = f"{row['share_of_model']:.1%}"
    if row["sequence_tokens_per_second"] is not None:
        share += f"; {row['tokens_per_second'] / row['sequence_tokens_per_second']:.1%} of one sequence of 65,536"
    idle = " / ".join(f"{row[name]:.2f}" for name in ("before_first_s", "between_steps_s", "behind_last_s"))
    here = row["cpu_ns_per_token"] is not None  # workers in other processes have memory of their own
    memory = f"{row['device_peak_mb'] / 1e3:.1f} GB" if here and row["device_peak_mb"] else ""
    return _line(key[0], key[1], f"{row['tokens']:,}", speed, share, f"{row['device_share']:.1%}", f"{idle} s", memory)


def _peer(key: Sequence[str], peer: Content) -> str:
    if peer["tokens_per_second"] is None:
        return _line(key[0], key[1], peer["name"], f"{peer['tokens']:,}", peer["note"], "", "")
    apart = peer["note"] if peer["distance"] is None else f"{peer['distance']:.1e}"
    return _line(
        key[0], key[1], peer["name"], f"{peer['tokens']:,}", f"{peer['tokens_per_second']:,.0f}", f"{peer['times_peer']:.2f}", apart
    )


def _has_numbers(peer: Content) -> bool:
    return peer["tokens_per_second"] is not None or peer["distance"] is not None


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _order(key: Sequence[str]) -> tuple[int, str, str]:
    kinds = ("ssd", "conv1d", "norm", "pool", "logprob", "product", "network")
    return kinds.index(key[0]), key[1], key[2]


def _measured(facts: Iterable[Content]) -> Iterator[str]:
    """A line for each GPU, or CPU, commit and date that a row of the table is from."""
    for where in sorted({f"{_machine(f)}, {f['date']}, commit {f['commit']}" for f in facts}):
        yield f"* measured on {where}"


def _machine(facts: Content) -> str:
    return "a CPU" if facts["gpu"] is None else f"{facts['gpu']}, driver {facts['driver']}, bf16"


def _origins(facts: Iterable[Content]) -> Iterator[str]:
    yield from _measured(facts)
    yield ""
    yield "Limits: 4.3 TB/s or 790 TFLOP/s, whichever takes longer; of a network, its products by cuBLAS in the same run and the limits of"
    yield "the rest."

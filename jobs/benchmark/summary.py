"""The README's table of the kernels and networks, made of the results that are kept in kernels/results/: the newest of each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longscan.kernels.bench.report import read
from longscan.pipeline.errors import OutputError

RESULTS = Path(__file__).resolve().parents[2] / "kernels" / "results"
BEGIN = "<!-- made by `longscan-bench table --update README.md`: begin -->"
END = "<!-- end -->"
NOTHING = "Nothing is kept yet: `longscan-bench kernels --json kernels/results/NAME.json` on a GPU makes the first row."
HEADER = ("| what | shape | load | time | x the limit | fastest peer | x the peer |", "|---|---|---|---|---|---|---|")

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


def write_summary(readme: Path, folder: Path = RESULTS) -> None:
    """Put the table between the two marks of `readme`. Raises OutputError where there are none."""
    text = readme.read_text("utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise OutputError(f"{readme}: expected the marks {BEGIN} and {END}, found none to write the table between")
    readme.write_text(f"{before}{BEGIN}\n\n{summary(folder)}\n\n{END}{after}", "utf-8")


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


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _order(key: Sequence[str]) -> tuple[int, str, str]:
    kinds = ("ssd", "conv1d", "norm", "pool", "logprob", "product", "network")
    return kinds.index(key[0]), key[1], key[2]


def _origins(facts: Any) -> Iterator[str]:
    """A line for each GPU, commit and date that a row of the table is from."""
    for where in sorted({f"{f['gpu']}, driver {f['driver']}, {f['date']}, commit {f['commit']}" for f in facts}):
        yield f"Measured on {where}; bf16."
    yield "Limits: 4.3 TB/s or 790 TFLOP/s, whichever takes longer; of a network, its products by cuBLAS in the same run and the limits of"
    yield "the rest."

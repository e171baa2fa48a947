"""Whole networks: tokens a second of longscan's, against cuBLAS and the limits of the rest, and against the stack of its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from longscan.jobs.benchmark.needs import require_gpu
from longscan.jobs.benchmark.stacks import GEOMETRIES, Parts, Weights, peer_stack, products_alone, random_weights, triton_parts
from longscan.kernels.bench.case import NOT_INSTALLED, relative_error
from longscan.kernels.bench.limits import conv1d_work, gated_norm_work, ssd_work, stream_norm_work
from longscan.kernels.bench.measure import Timer, facts, in_turns, time_on_gpu
from longscan.kernels.bench.report import Results, chip_lines
from longscan.kernels.checks import Backend
from longscan.kernels.layouts import Layout
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments
from longscan.kernels.ssd.cases import Shape
from longscan.kernels.ssd.spans import span_tiles
from longscan.pipeline.model import Mamba2, Mamba2Geometry

TOLERANCE = 3e-2
"""Relative distance of two networks' hidden states, all layers in bf16, that may be compared."""


@dataclass(frozen=True, slots=True)
class Load:
    """Equally long documents, all from their beginning."""

    name: str
    documents: int
    tokens: int
    """Of each."""
    kept: bool
    """Documents go on after the step, so their states are written."""

    def layout(self) -> Layout:
        tiles = -(-self.tokens // TILE)
        lanes = [d if self.kept else NO_LANE for d in range(self.documents)]
        entries = tuple(Entry(d * tiles, self.tokens, lane_out=lanes[d], ends=not self.kept) for d in range(self.documents))
        return Layout(self.name, entries, self.documents * tiles, slots=self.documents if self.kept else 1)


LOADS = (
    Load("11 documents of 5952", 11, 5952, kept=True),
    Load("16 documents of 4096", 16, 4096, kept=True),
    Load("one document of 65536", 1, 65_536, kept=True),
    Load("65 documents of 1000", 65, 1000, kept=False),
)


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One network under one load; milliseconds are a layer's. What could not be measured is null, and `note` says why."""

    shape: str
    load: str
    layers: int
    tokens_per_second: float
    layer_milliseconds: float
    products_milliseconds: float
    limits_milliseconds: float
    """Of everything but the products."""
    ratio_to_products_and_limits: float
    peer: str
    peer_tokens_per_second: float | None
    peer_layer_milliseconds: float | None
    times_peer: float | None
    distance: float | None
    """Relative, of the hidden states of the two."""
    note: str = ""

    def lines(self) -> Iterator[str]:
        """For people."""
        least = f"(products {self.products_milliseconds:.3f} + limits {self.limits_milliseconds:.3f} ms)"
        speed = f"{self.tokens_per_second:,.0f} tokens/s, {self.layer_milliseconds:.3f} ms a layer"
        yield f"{self.shape}, {self.layers} layers; {self.load}: {speed}, {self.ratio_to_products_and_limits:.3f} x {least}"
        if self.peer_tokens_per_second is None or self.times_peer is None:
            yield f"   {self.peer}: {self.note}"
        else:
            yield (
                f"   {self.peer}: {self.peer_tokens_per_second:,.0f} tokens/s, {self.peer_layer_milliseconds:.3f} ms a layer; "
                f"ours {self.times_peer:.2f} x  [distance {self.distance:.1e}]"
            )


def bench_model(
    models: Sequence[str], *, layers: int | None, path: Path | None, commit: str | None, chunks: Sequence[int], load: str = ""
) -> list[str]:
    """Print a row a model and load, and write them to `path`. Returns a line for each pair of networks that do not agree.

    layers: of each model; None: all that it has. load: part of the names of the loads that are run.

    Raises ConfigError where there is no GPU.
    """
    require_gpu("model")
    known = facts(commit)
    print(*chip_lines(known), sep="\n", flush=True)
    results = Results(path, "model", known)
    wrong: list[str] = []
    timer = partial(time_on_gpu, warmup=1, repeats=3)
    for name in models:
        geometry = replace(GEOMETRIES[name], num_layers=layers or GEOMETRIES[name].num_layers)
        with torch.inference_mode():
            weights = random_weights(geometry, device="cuda", dtype=torch.bfloat16)
            for given in (one for one in LOADS if load in one.name):
                row = measure(name, geometry, weights, given, timer=timer, parts=triton_parts, chunks=chunks)
                print(*row.lines(), sep="\n", flush=True)
                results.add(asdict(row))
                if row.distance is not None and row.peer_tokens_per_second is None:
                    wrong.append(f"model {name} ({given.name}): {row.note}")
                torch.cuda.empty_cache()
        del weights
    return wrong


def measure(
    name: str,
    geometry: Mamba2Geometry,
    weights: Weights,
    load: Load,
    *,
    timer: Timer,
    parts: Callable[[int], Parts],
    chunks: Sequence[int],
    backend: Backend = "cutile",
) -> ModelRow:
    """Check a network against its peers' and time both, their products, and what the limits of the rest come to."""
    layout, device, g = load.layout(), weights["embedding"].device, geometry
    generator = torch.Generator(device).manual_seed(1)
    ids_BL = torch.randint(g.vocab_size, (load.documents, load.tokens), generator=generator, device=device)
    tokens, rows = load.documents * load.tokens, layout.num_tiles * TILE
    hidden, ours = _ours(geometry, weights, load, layout, ids_BL, backend)
    peer = _peer(geometry, weights, ids_BL, hidden, timer, parts, chunks)
    calls = [ours, products_alone(geometry, weights, rows), *([] if peer.call is None else [peer.call])]
    seconds, products, *theirs = in_turns(calls, timer)
    products, limits = products / g.num_layers, _limits(geometry, layout, tokens)
    return ModelRow(
        shape=name,
        load=load.name,
        layers=g.num_layers,
        tokens_per_second=tokens / seconds,
        layer_milliseconds=seconds * 1e3 / g.num_layers,
        products_milliseconds=products * 1e3,
        limits_milliseconds=limits * 1e3,
        ratio_to_products_and_limits=seconds / g.num_layers / (products + limits),
        peer=peer.name,
        peer_tokens_per_second=tokens / theirs[0] if theirs else None,
        peer_layer_milliseconds=theirs[0] * 1e3 / g.num_layers if theirs else None,
        times_peer=theirs[0] / seconds if theirs else None,
        distance=peer.distance,
        note=peer.note,
    )


def _ours(
    geometry: Mamba2Geometry, weights: Weights, load: Load, layout: Layout, ids_BL: torch.Tensor, backend: Backend
) -> tuple[torch.Tensor, Callable[[], object]]:
    """Hidden states [tokens, D] of the documents, and the call that makes them. One document alone is cut into spans."""
    device, dtype = weights["embedding"].device, weights["embedding"].dtype
    model = Mamba2(geometry, weights, device=device, dtype=dtype, backend=backend)
    spans = span_tiles(geometry.num_heads) if load.documents == 1 else None
    segments = Segments.pack(layout.entries, layout.num_tiles, device, span_tiles=spans)
    ids_T = _padded(ids_BL, layout.num_tiles * TILE // load.documents)
    state = model.new_state(layout.slots)
    hidden_TD, _ = model.step(ids_T, segments, state)
    return hidden_TD[segments.real_rows().to(device)].clone(), lambda: model.step(ids_T, segments, state)


def _padded(ids_BL: torch.Tensor, rows: int) -> torch.Tensor:
    """[B rows]: documents end to end, each in `rows` rows."""
    return F.pad(ids_BL, (0, rows - ids_BL.shape[1])).flatten()


def _limits(geometry: Mamba2Geometry, layout: Layout, tokens: int) -> float:
    """Seconds a layer of all but the products."""
    g = geometry
    scan = ssd_work(Shape("", H=g.num_heads, P=g.head_dim, G=g.num_groups, N=g.state_size), layout)
    works = (scan, conv1d_work(g.channels, tokens), gated_norm_work(g.inner, tokens), stream_norm_work(g.d_model, tokens))
    return sum(work.seconds for work in works)


@dataclass(frozen=True, slots=True)
class _Peer:
    """The peers' network; where it cannot be timed there is no call, and `note` says why."""

    name: str
    call: Callable[[], object] | None = None
    distance: float | None = None
    """Of its hidden states from ours."""
    note: str = ""


def _peer(
    geometry: Mamba2Geometry,
    weights: Weights,
    ids_BL: torch.Tensor,
    hidden: torch.Tensor,
    timer: Timer,
    parts: Callable[[int], Parts],
    chunks: Sequence[int],
) -> _Peer:
    """The chunk is the best for a layer."""
    name = "torch products, mamba_ssm Triton scan and norms, fla-core convolution"
    try:
        one = replace(geometry, num_layers=1)
        tried = {chunk: timer(partial(peer_stack, one, weights, parts(chunk), ids_BL)) for chunk in chunks}
        best = min(tried, key=lambda chunk: tried[chunk])
        call = partial(peer_stack, geometry, weights, parts(best), ids_BL)
        distance = relative_error(call().flatten(0, 1), hidden)
    except ImportError as error:
        return _Peer(name, note=NOT_INSTALLED if isinstance(error, ModuleNotFoundError) else f"not usable: {error}")
    except Exception as error:  # another project's code on this machine's compiler: the row says so
        return _Peer(name, note=f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:160]}")
    name += f", chunk {best}"
    if not distance <= TOLERANCE:
        known = distance if distance < float("inf") else None
        return _Peer(name, distance=known, note=f"the two do not agree: distance {distance:.1e}")
    return _Peer(name, call, distance)

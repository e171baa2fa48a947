"""The peers of a whole job: the same documents through other implementations, in the loop that a careful user would write.

Documents are sorted by length and go in batches, in segments whose states are carried on; who has ended leaves the batch at the
segment's border. Each loop ends in the mean of a document's hidden states, held against longscan's vectors before anything
is timed. Their token ids are given to them: no peer pays for reading, tokenizing or writing, of which longscan's time has all.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from longscan.jobs.benchmark.stacks import Parts, States, carrying_stack, triton_parts
from longscan.pipeline.model import read_geometry
from longscan.pipeline.model.weights import load_weights
from longscan.pipeline.tokenize import load_tokenizer

Array = npt.NDArray[Any]
Answer = TypeVar("Answer")

STEP_TOKENS = {"cpu": 2048, "cuda": 65536}
"""Tokens of a batch; halved where the memory does not hold it. On a CPU transformers is fastest at about so many."""
SEGMENT_TOKENS = {"cpu": 2048, "cuda": 4096}
"""Of a document, as long as the batch is full."""
LEAST_STEP = 512
PEER_TOKENS = {"cpu": 60_000, "cuda": 4_000_000}
"""Of the sample, unless said otherwise."""
CHECK_TOKENS = {"cpu": 8_192, "cuda": 262_144}
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""Distance of two unit vectors of a document."""
WINDOW = 512
CHUNK = 256
CHUNKS = (64, 128, 256)


class Peer(Protocol):
    """A network that takes batches of equally long pieces, and states on."""

    name: str

    def forward(self, ids_BL: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """Hidden states [B, L, D] after the final norm, and what the next pieces go on from; None is the beginning."""

    def keep(self, state: Any, rows: torch.Tensor) -> Any:
        """The state of these documents of the batch alone."""


class Transformers:
    """transformers' own network, its state carried by its cache."""

    def __init__(self, folder: str | Path, device: str, dtype: torch.dtype) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model = transformers.Mamba2Model.from_pretrained(folder, dtype=dtype).to(device).eval()
        self._cache = "cache" if "cache" in inspect.signature(self._model.forward).parameters else "cache_params"
        self.name = f"transformers {transformers.__version__}, chunk {self._model.config.chunk_size}"

    def forward(self, ids_BL: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        output = self._model(ids_BL, use_cache=True, **{self._cache: state})
        return output.last_hidden_state, getattr(output, self._cache)

    def keep(self, state: Any, rows: torch.Tensor) -> Any:
        state.reorder_cache(rows)
        return state


class Kernels:
    """The stack of mamba_ssm's and fla's kernels, its states carried."""

    def __init__(
        self, folder: str | Path, device: str, dtype: torch.dtype, parts: Callable[[int], Parts] = triton_parts, chunk: int = CHUNK
    ) -> None:
        self._geometry = read_geometry(folder)
        self._weights = load_weights(folder, self._geometry, device=device, dtype=dtype)
        self._parts = parts(chunk)
        self.name = f"mamba_ssm and fla-core kernels, chunk {chunk}"

    def forward(self, ids_BL: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return carrying_stack(self._geometry, self._weights, self._parts, ids_BL, state)

    def keep(self, state: States, rows: torch.Tensor) -> States:
        return [(conv[rows], ssm[rows]) for conv, ssm in state]


class Took(NamedTuple):
    """Of a loop over all documents."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class PeerRow:
    """What became of one peer. What could not be measured is null, and `note` says why."""

    name: str
    documents: int
    tokens: int
    step_tokens: int
    seconds: float | None
    tokens_per_second: float | None
    cpu_ns_per_token: float | None
    """CPU time of this process; where the device is the CPU, what other work on the machine does not change."""
    times_peer: float | None
    """Tokens a second of longscan's whole job, by those of the peer's loop alone."""
    distance: float | None
    """Largest, of a document's unit vector from longscan's; null for what computes another function."""
    note: str = ""

    def line(self) -> str:
        """For people."""
        if self.tokens_per_second is None:
            return f"peer     {self.name}: {self.note}"
        checked = f"distance {self.distance:.1e}" if self.distance is not None else self.note
        return (
            f"peer  {self.tokens_per_second:15,.0f} tokens/s, {self.cpu_ns_per_token:.0f} ns of CPU time a token, {self.name}, batches of "
            f"{self.step_tokens}: the job has {self.times_peer:.2f} x  [{checked}]"
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """Documents of a job's corpus, and what longscan made of them."""

    ids: list[Array]
    vectors: list[Array]
    """Unit vectors [D]."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    def first(self, tokens: int) -> Sample:
        """The first documents that come to as many tokens, at least one."""
        ends = np.cumsum([len(ids) for ids in self.ids])
        count = int(np.searchsorted(ends, tokens)) + 1
        return Sample(self.ids[:count], self.vectors[:count])


def take_sample(corpus: Path, output: Path, model: str, tokens: int, seed: int) -> Sample:
    """Documents in an order that is drawn, as many as `tokens` hold, at least one: so long ones may be left out where it is few."""
    table = pq.read_table(corpus, columns=["id", "text"])
    rows = pq.read_table(output / "documents", columns=["doc_id", "num_tokens", "embedding"])
    lengths, place = rows["num_tokens"].to_pylist(), {name: row for row, name in enumerate(rows["doc_id"].to_pylist())}
    names = table["id"].to_pylist()
    chosen: list[int] = []
    held = 0
    for n in np.random.default_rng(seed).permutation(len(names)):
        length = lengths[place[names[n]]]
        if length and (not chosen or held + length <= tokens):
            chosen.append(int(n))
            held += length
    tokenizer = load_tokenizer(model)
    vectors = [np.array(rows["embedding"][place[names[n]]].as_py()) for n in chosen]
    ids = [found.ids for n in chosen for found in tokenizer.encode([table["text"][n].as_py()])]
    return Sample(ids, [vector / np.linalg.norm(vector) for vector in vectors])


def bench_peers(
    sample: Sample, folder: str, device: str, dtype: torch.dtype, job_rate: float, parts: Callable[[int], Parts] = triton_parts
) -> Iterator[PeerRow]:
    """A row a peer: checked, then timed. job_rate: tokens a second of longscan's job.

    folder: of the model. parts: of the stack of kernels, which is left out on a CPU.
    """
    last: Peer | None = None
    if device == "cuda" or parts is not triton_parts:
        kernels: dict[str, Callable[[], Peer]] = {
            f"mamba_ssm and fla-core kernels, chunk {chunk}": partial(Kernels, folder, device, dtype, parts, chunk) for chunk in CHUNKS
        }
        rows = []
        for name, make in kernels.items():
            row, last = _measured(name, make, sample.first(CHECK_TOKENS[device]), device, dtype, job_rate)
            rows.append(row)
        best = max(rows, key=lambda row: row.tokens_per_second or 0.0)
        row, last = _measured(best.name, kernels[best.name], sample, device, dtype, job_rate)
        yield row
    row, transformers = _measured("transformers", lambda: Transformers(folder, device, dtype), sample, device, dtype, job_rate)
    yield row
    yield _windows(last or transformers, sample, device, job_rate)


def _measured(
    name: str, make: Callable[[], Peer], sample: Sample, device: str, dtype: torch.dtype, job_rate: float
) -> tuple[PeerRow, Peer | None]:
    """Check a peer on the first of the sample, then time it on all of it. Returns it too, if it can be used."""
    step, distance = STEP_TOKENS[device], None
    try:
        peer = make()
        check = sample.first(CHECK_TOKENS[device])
        step, found = fitting(step, lambda step: mean_vectors(peer, check.ids, step, device))
        distance = max(float(np.linalg.norm(a / np.linalg.norm(a) - b)) for a, b in zip(found, check.vectors, strict=True))
        if not distance <= TOLERANCE[dtype]:
            distance = distance if math.isfinite(distance) else None
            return _row(peer.name, sample, step, None, job_rate, distance, "its vectors are not longscan's: it is not timed"), None
        step, took = fitting(step, partial(_timed, peer, sample.ids, device))
        return _row(peer.name, sample, step, took, job_rate, distance), peer
    except ImportError as error:
        return _row(name, sample, step, None, job_rate, None, f"not usable: {error}"), None
    except Exception as error:  # another project's code on this machine's compiler: the row says so
        note = f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
        return _row(name, sample, step, None, job_rate, distance, note), None


def _windows(peer: Peer | None, sample: Sample, device: str, job_rate: float) -> PeerRow:
    """Each document in windows that have never met, and the mean of their means: what sentence-transformers' users do with long texts."""
    name = f"windows of {WINDOW} tokens, each from its beginning"
    if peer is None:
        return _row(name, sample, STEP_TOKENS[device], None, job_rate, None, "no peer to compute them")
    windows = [ids[start : start + WINDOW] for ids in sample.ids for start in range(0, len(ids), WINDOW)]
    step, took = fitting(STEP_TOKENS[device], partial(_timed, peer, windows, device))
    return _row(f"{name}, {peer.name}", sample, step, took, job_rate, None, "another function: not compared")


def _row(name: str, sample: Sample, step: int, took: Took | None, job_rate: float, distance: float | None, note: str = "") -> PeerRow:
    rate = None if took is None else sample.tokens / took.seconds
    return PeerRow(
        name=name,
        documents=len(sample.ids),
        tokens=sample.tokens,
        step_tokens=step,
        seconds=None if took is None else took.seconds,
        tokens_per_second=rate,
        cpu_ns_per_token=None if took is None else 1e9 * took.cpu_seconds / sample.tokens,
        times_peer=None if rate is None else job_rate / rate,
        distance=distance,
        note=note,
    )


def fitting(step_tokens: int, work: Callable[[int], Answer]) -> tuple[int, Answer]:
    """`work(step_tokens)`, with half of them as often as the device's memory does not hold it. Returns how many it was, and its result."""
    while True:
        try:
            return step_tokens, work(step_tokens)
        except torch.OutOfMemoryError:
            if step_tokens <= LEAST_STEP:
                raise
        torch.cuda.empty_cache()  # behind the error, which holds on to what was allocated
        step_tokens //= 2


def _timed(peer: Peer, documents: Sequence[Array], device: str, step_tokens: int) -> Took:
    began, cpu = time.perf_counter(), time.process_time()
    mean_vectors(peer, documents, step_tokens, device)  # the last vector is on the host: nothing runs any more
    return Took(time.perf_counter() - began, time.process_time() - cpu)


@torch.inference_mode()
def mean_vectors(peer: Peer, documents: Sequence[Array], step_tokens: int, device: str) -> list[Array]:
    """Mean of the hidden states of each document's tokens, [D], float64."""
    order = sorted(range(len(documents)), key=lambda n: -len(documents[n]))
    vectors: dict[int, Array] = {}
    segment = min(SEGMENT_TOKENS[device], step_tokens)
    while order:
        count = max(1, step_tokens // min(len(documents[order[0]]), segment))
        batch, order = order[:count], order[count:]
        sums = _batch_sums(peer, [documents[n] for n in batch], step_tokens, segment, device)
        for n, total_D in zip(batch, sums.cpu().numpy(), strict=True):
            vectors[n] = total_D / len(documents[n])
    return [vectors[n] for n in range(len(documents))]


def _batch_sums(peer: Peer, batch: Sequence[Array], step_tokens: int, segment: int, device: str) -> torch.Tensor:
    """[B, D], float64: sums of the hidden states of documents that come longest first."""
    state: Any = None
    sums: torch.Tensor | None = None
    at, alive = 0, len(batch)
    while alive:
        shortest, longest = len(batch[alive - 1]) - at, len(batch[0]) - at
        # Full steps, but none much longer than the shortest; whole chunks, since a peer would only fill them up.
        width = min(step_tokens // alive, max(segment, shortest), longest)
        if width < longest:
            width = max(width // CHUNK * CHUNK, min(width, CHUNK))
        ids = np.zeros((alive, width), dtype=np.int64)
        for row, document in zip(ids, batch[:alive], strict=True):
            part = document[at : at + width]
            row[: len(part)] = part
        hidden_BLD, state = peer.forward(torch.from_numpy(ids).to(device), state)
        real_B = torch.tensor([min(width, len(document) - at) for document in batch[:alive]], device=device)
        real_BL = torch.arange(width, device=device) < real_B[:, None]
        part_BD = (hidden_BLD.float() * real_BL[:, :, None]).sum(1).double()
        sums = part_BD if sums is None else torch.cat([sums[:alive] + part_BD, sums[alive:]])
        at += width
        going_on = sum(len(document) > at for document in batch)
        if 0 < going_on < alive:
            state = peer.keep(state, torch.arange(going_on, device=device))
        alive = going_on
    assert sums is not None
    return sums

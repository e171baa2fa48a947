"""A stack of mamba2-130m's layers on a CPU against transformers' forward in segments with its cache: equal first, then the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from compare import relative_error
from fakes import tiny_checkpoint
from longscan.kernels.segments import TILE, Entry, Segments
from longscan.pipeline.model import load_model

TOKENS = 16_384
SEGMENT = 2_048
LAYERS = 2
VOCABULARY = 512
ROUNDS = 3
BARS = {256: 1.9, 64: 1.3}
"""transformers' chunk -> how many times faster longscan is at least; 256 is its default."""


def timed(run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    hidden = run()
    return time.perf_counter() - start, hidden


def named(chunk: int) -> str:
    return f"transformers, chunk {chunk}"


@pytest.mark.slow
def test_faster_than_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = tiny_checkpoint(tmp_path, d_model=768, head_dim=64, state_size=128, num_layers=LAYERS, vocab_size=VOCABULARY)
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(4))
    model = load_model(folder, dtype=torch.float32, device="cpu", backend="torch")
    steps = [Segments.pack([Entry(0, SEGMENT, start, lane_in=0, lane_out=0)], SEGMENT // TILE) for start in range(0, TOKENS, SEGMENT)]

    def ours() -> torch.Tensor:
        state = model.new_state(1)
        return torch.cat([model.step(part, segments, state)[0] for part, segments in zip(ids.split(SEGMENT), steps, strict=True)])

    def theirs(peer: transformers.Mamba2Model) -> torch.Tensor:
        cache, parts = None, []
        for part in ids.split(SEGMENT):
            output = peer(part[None], cache=cache, use_cache=True)
            cache = output.cache
            parts.append(output.last_hidden_state[0])
        return torch.cat(parts)

    peers = {chunk: transformers.Mamba2Model.from_pretrained(folder, chunk_size=chunk, dtype=torch.float32) for chunk in BARS}
    seconds: dict[str, float] = {}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            taken, hidden = timed(ours)
            seconds["longscan"] = min(taken, seconds.get("longscan", taken))
            for chunk, peer in peers.items():
                taken, expected = timed(lambda peer=peer: theirs(peer))
                assert relative_error(hidden, expected) <= 1e-4
                seconds[named(chunk)] = min(taken, seconds.get(named(chunk), taken))
    report = [f"{LAYERS} layers of mamba2-130m, {TOKENS} tokens, {torch.get_num_threads()} threads, best of {ROUNDS}, seconds a layer:"]
    for name, taken in seconds.items():
        report.append(f"  {name:>24} {taken / LAYERS:.2f}, {taken / seconds['longscan']:.2f} x")
    with capsys.disabled():
        print("", *report, sep="\n")
    for chunk, bar in BARS.items():
        assert seconds[named(chunk)] / seconds["longscan"] >= bar, "\n".join(report)

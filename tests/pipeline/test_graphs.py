"""Steps as CUDA graphs: which graph a step takes, and on a GPU the bits of the model itself, whatever the steps hold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from emulated_network import Graph, put_on_emulator, record_on_cpu
from fakes import tiny_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from longscan.kernels.segments import NO_LANE, TILE, Entry, Segments
from longscan.kernels.ssd.spans import Spans, cut
from longscan.pipeline.engine.graphs import FEWEST_CHAINS, GraphedModel, all_chains, chains_for, with_graphs
from longscan.pipeline.model import Mamba2, ModelState, load_model

TILES = 64


def packed(lengths: list[int], **options: int) -> Segments:
    entries, tile = [], 0
    for length in lengths:
        entries.append(Entry(tile, length))
        tile += entries[-1].num_tiles
    return Segments.pack(entries, max(tile, 1), slots=max(tile, 1), **options)


@given(st.integers(1, 5000), st.integers(0, 100))
def test_a_graph_has_room_for_its_steps_and_little_more(entries: int, more: int) -> None:
    segments = Segments.pack([Entry(e, 1) for e in range(entries)], entries + more, slots=entries + more)
    chains = chains_for(segments)
    assert entries <= chains <= max(FEWEST_CHAINS, 3 * entries // 2)
    assert chains <= entries + more


def test_few_graphs_are_enough_for_all_steps() -> None:
    """Of a step of 90,112 tokens, all documents of one token: 1,408 numbers of entries."""
    found = {chains_for(Segments.pack([Entry(e, 1) for e in range(entries)], 1408, slots=1408)) for entries in range(1, 1409)}
    assert len(found) <= 17


@given(st.integers(1, 300), st.integers(1, 300), st.data())
def test_all_are_known_beforehand(slots: int, lanes: int, data: st.DataObject) -> None:
    entries = data.draw(st.integers(1, min(slots, lanes)))
    segments = Segments.pack([Entry(e, 1) for e in range(entries)], slots, slots=slots)
    assert chains_for(segments) in all_chains(slots, lanes)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.lists(st.integers(1, 300), min_size=1, max_size=9))
def test_a_layout_is_written_over_another(before: list[int], after: list[int]) -> None:
    """What a graph reads is the layout that is copied there, for entries and for spans."""
    num_tiles = 64
    one, two = (
        Segments.pack([Entry(7 * e, length) for e, length in enumerate(lengths)], num_tiles, slots=num_tiles, span_tiles=2)
        for lengths in (before, after)
    )
    recorded, spans = one.recorded(chains_for(one)), cut(one).recorded()
    recorded.derived[Spans] = spans
    assert recorded.chains == chains_for(one)
    assert spans.count == spans.slot.numel()
    recorded.buffer.copy_(two.buffer)
    for name in ("first_tile", "num_tokens", "position_tile", "lane_in", "lane_out", "order", "tile_entry"):
        assert_same_bits(name, getattr(recorded, name), getattr(two, name))
    if cut(two).slot.numel() == spans.slot.numel():
        spans.buffer.copy_(cut(two).buffer)
        for name in ("first_tile", "num_tokens", "wanted", "slot", "source", "none", "first_span", "num_spans"):
            assert_same_bits(name, getattr(spans, name), getattr(cut(two), name))


def test_blocks_for_fewer_entries_than_there_are_is_refused() -> None:
    segments = packed([10, 10, 10])
    with pytest.raises(ValueError, match="chains: expected 3"):
        segments.recorded(2)


def test_a_model_that_is_on_no_gpu_is_left_as_it_is(tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint(tmp_path), dtype=torch.float32, device="cpu", backend="torch")
    assert with_graphs(model) is model


def check_bits(
    model: Mamba2,
    graphed: GraphedModel,
    *,
    tiles: int,
    more: int,
    longest: int,
    steps: int,
    span_tiles: int | None,
    run: Callable[[Callable[[], torch.Tensor], int], torch.Tensor] = lambda call, _: call(),
    recorded: bool = True,
) -> None:
    """Steps of ever more entries, `more` each time, of at most `longest` tiles: that begin, go on, and leave their state behind or not.

    run: makes the call that is a step of `graphed`, of this number. recorded: whether there are graphs at the end.
    """
    lanes = 1 + more * (steps - 1)
    states = [model.new_state(lanes) for _ in range(2)]
    generator = torch.Generator().manual_seed(3)
    written: set[int] = set()
    with torch.inference_mode():
        for step in range(steps):
            entries, tile = [], 0
            for lane in torch.randperm(lanes, generator=generator).tolist()[: 1 + more * step]:
                length = int(torch.randint(1, longest * TILE, (1,), generator=generator))
                kept = float(torch.rand(1, generator=generator)) < 0.8
                if tile + -(-length // TILE) > tiles:
                    break
                entries.append(Entry(tile, length, TILE * step, lane if lane in written else NO_LANE, lane if kept else NO_LANE))
                written |= {lane} if kept else set()
                tile += entries[-1].num_tiles
            segments = Segments.pack(entries, tiles, model.device, slots=tiles, span_tiles=span_tiles)
            ids_T = torch.randint(97, (tiles * TILE,), generator=generator).to(model.device)
            expected, _ = model.step(ids_T, segments, states[0])
            found = run(partial(_hidden, graphed, ids_T, segments, states[1]), step)
            assert_same_bits(f"hidden states of step {step}", found.cpu(), expected.cpu())
    for name in ("ssm", "tail"):
        assert_same_bits(name, getattr(states[1], name).cpu(), getattr(states[0], name).cpu())
    assert graphed._given_up != recorded
    assert 1 < len(graphed._recorded) < steps if recorded else not graphed._recorded


@torch.inference_mode()
def _hidden(graphed: GraphedModel, ids_T: torch.Tensor, segments: Segments, state: ModelState) -> torch.Tensor:
    return graphed.step(ids_T, segments, state)[0]


def in_threads(call: Callable[[], torch.Tensor], step: int) -> torch.Tensor:
    """The first call here, the others in a thread of their own: as an engine rehearses where it is made, and then runs in its thread."""
    if step == 0:
        return call()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.gpu
@pytest.mark.parametrize("span_tiles", [None, 4])
def test_the_bits_are_those_of_the_model(tmp_path: Path, span_tiles: int | None) -> None:
    shape = {"d_model": 256, "head_dim": 64, "num_layers": 2, "state_size": 128, "vocab_size": 97}
    folder = tiny_checkpoint(tmp_path, dtype=torch.bfloat16, **shape)
    model = load_model(folder, dtype=torch.bfloat16, device="cuda", backend="cutile", row_block=TILES * TILE)
    graphed = with_graphs(model)
    assert isinstance(graphed, GraphedModel)
    check_bits(model, graphed, tiles=TILES, more=1, longest=5, steps=12, span_tiles=span_tiles, run=in_threads)


@pytest.mark.parametrize("span_tiles", [None, 1])
def test_the_bits_are_those_of_the_model_on_the_emulator(tmp_path: Path, span_tiles: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph makes again is made there of the layout that is written over the recorded one, spans and their sources among it."""
    put_on_emulator(monkeypatch)
    record_on_cpu(monkeypatch)
    folder = tiny_checkpoint(tmp_path, dtype=torch.bfloat16, vocab_size=97, num_layers=1)
    model = load_model(folder, dtype=torch.bfloat16, device="cpu", backend="torch", row_block=16 * TILE)
    check_bits(model, GraphedModel(model), tiles=16, more=2, longest=2, steps=6, span_tiles=span_tiles)


@pytest.mark.parametrize(("failures", "told"), [(1, []), (2, ["cannot be recorded as CUDA graphs here (the 2nd reason): "])])
def test_a_step_that_cannot_be_recorded_is_tried_again_and_then_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failures: int, told: list[str]
) -> None:
    """What is told is what went wrong, and not that recording could not end, which follows from it."""
    put_on_emulator(monkeypatch)
    record_on_cpu(monkeypatch)
    folder = tiny_checkpoint(tmp_path, dtype=torch.bfloat16, vocab_size=97, num_layers=1)
    model = load_model(folder, dtype=torch.bfloat16, device="cpu", backend="torch", row_block=16 * TILE)
    reasons = ["the 1st reason", "the 2nd reason"][:failures]
    end, step = Graph.capture_end, Mamba2.step

    def failing(*arguments: Any) -> Any:
        if Graph.recording is not None and reasons:
            raise RuntimeError(reasons[0])
        return step(*arguments)

    def unended(graph: Graph) -> None:
        end(graph)
        if reasons:
            reasons.pop(0)
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(Mamba2, "step", failing)
    monkeypatch.setattr(Graph, "capture_end", unended)
    graphed = GraphedModel(model)
    with caplog.at_level(logging.WARNING):
        check_bits(model, graphed, tiles=16, more=4, longest=1, steps=3, span_tiles=None, recorded=failures == 1)
    assert len(caplog.messages) == len(told)
    assert all(words in message for words, message in zip(told, caplog.messages, strict=True))

"""The demo's trainer: the network carries its state exactly, the streams are what they say, a tiny training works end to end."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from itertools import islice
from pathlib import Path

import pytest
import torch
from longscan.jobs.demo import checkpoint, corpus, train
from longscan.jobs.demo.measure import log_probs
from longscan.jobs.demo.network import Network, Shape, ssd
from longscan.jobs.demo.vocabulary import END_ID
from longscan.pipeline.errors import InputError

SHAPE = Shape(vocab_size=97, d_model=64, num_layers=2)


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network(SHAPE).eval()


@pytest.mark.parametrize("tokens", [64, 128, 320], ids="T{}".format)
def test_ssd_is_the_recurrence(tokens: int) -> None:
    torch.manual_seed(tokens)
    S, H, P, N = 2, 3, 4, 5
    x, B, C = (torch.randn(S, tokens, *rest, dtype=torch.float64) for rest in ((H, P), (N,), (N,)))
    dt, A = torch.rand(S, tokens, H, dtype=torch.float64), -torch.rand(H, dtype=torch.float64)
    begin = state = torch.randn(S, H, N, P, dtype=torch.float64)
    y = []
    for t in range(tokens):
        added = torch.einsum("sh,sn,shp->shnp", dt[:, t], B[:, t], x[:, t])
        state = (dt[:, t] * A).exp()[:, :, None, None] * state + added
        y.append(torch.einsum("sn,shnp->shp", C[:, t], state))
    got_y, got_state = ssd(x, dt, A, B, C, begin)
    torch.testing.assert_close(got_y, torch.stack(y, dim=1))
    torch.testing.assert_close(got_state, state)


def test_network_in_chunks_is_the_network_whole() -> None:
    model = network()
    ids = torch.randint(97, (3, 448))
    with torch.no_grad():
        whole, end = model(ids, model.new_state(3))
        state, parts = model.new_state(3), []
        for chunk in ids.split((64, 256, 128), dim=1):
            logits, state = model(chunk, state)
            parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
    for (tail, ssm), (end_tail, end_ssm) in zip(state, end, strict=True):
        torch.testing.assert_close(tail, end_tail, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ssm, end_ssm, atol=1e-5, rtol=1e-5)


def test_network_refuses_a_broken_tile() -> None:
    model = network()
    with pytest.raises(ValueError, match="expected a multiple of 64 tokens, got 65"):
        model(torch.zeros(1, 65, dtype=torch.int64), model.new_state(1))


def test_reset_is_a_start_of_its_own() -> None:
    model = network()
    ids = torch.randint(1, 97, (300,))
    apart = torch.cat([log_probs(model, part) for part in ids.split(128)])
    torch.testing.assert_close(log_probs(model, ids, reset=128), apart, atol=1e-5, rtol=0)
    assert (log_probs(model, ids)[128:] - apart[128:]).abs().max() > 1e-4


def test_streams_are_consecutive_pieces_of_single_texts() -> None:
    texts = [torch.arange(1000, 1900), torch.arange(5000, 6500)]
    recipe = train.Recipe(streams=4, chunk=64, jump=0.1)
    begun, jumps, at_start = None, 0, 0
    for inputs, targets, keep in islice(train.Streams(texts, recipe, torch.device("cpu")), 200):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert torch.equal(targets.diff(dim=1), torch.ones_like(targets[:, 1:])), "a chunk that leaves its text"
        assert torch.equal(inputs[:, 0] == END_ID, ~keep)
        if begun is None:
            assert not keep.any()
        else:
            assert torch.equal(inputs[keep, 0], begun[keep])
        jumps += int((~keep).sum())
        at_start += int(torch.isin(targets[~keep, 0], torch.tensor([1000, 5000])).sum())
        begun = targets[:, -1]
    assert 80 < jumps < 240
    assert 0 < at_start < jumps / 4


def test_carry_forgets_gradients_and_stopped_streams() -> None:
    model = network()
    _, state = model(torch.randint(97, (2, 64)), model.new_state(2))
    for before, after in zip(state, train.carry(state, torch.tensor([True, False])), strict=True):
        for old, new in zip(before, after, strict=True):
            assert old.requires_grad
            assert not new.requires_grad
            torch.testing.assert_close(new[0], old[0].detach())
            assert not new[1].any()


def test_a_tiny_training_ends_in_a_folder_and_a_card(tmp_path: Path) -> None:
    recipe = train.Recipe(vocab_size=300, d_model=64, num_layers=1, streams=2, chunk=64, steps=12, warmup=2, checks=3, average=0.5)
    texts = dict.fromkeys(("a", "b", "c"), "the cat sat on the mat, and the dog sat on the cat. " * 20)
    tokenizer = train.vocabulary.learn(texts.values(), recipe.vocab_size)
    ids = [torch.tensor(tokenizer.encode(text).ids) for text in texts.values()]
    novels = [{"title": title, "text": text, "held_out": title == "c"} for title, text in texts.items()]
    lesson = train.Lesson(novels, tokenizer, ids[:2], ids[2], len(texts["c"]))
    torch.manual_seed(0)
    model = Network(Shape(tokenizer.get_vocab_size(), 64, 1))
    untrained = -float(log_probs(model.eval(), ids[2]).sum())
    recipe = dataclasses.replace(recipe, vocab_size=tokenizer.get_vocab_size())
    outcome = train.train(model, lesson, recipe)
    train.finish(model, lesson, recipe, outcome, tmp_path)
    assert outcome["steps"] == 12
    loaded, _ = checkpoint.load(tmp_path)
    assert -float(log_probs(loaded, ids[2]).sum()) < untrained - 100
    card = (tmp_path / "README.md").read_text("utf-8")
    assert "*c*, **held out**" in card
    assert "12 steps" in card


def _record(lines: list[str]) -> bytes:
    strings = b"".join(struct.pack(">ii", 0x40009, len(line.encode())) + line.encode() for line in lines)
    body = b"X\n" + struct.pack(">iiii", 3, 262657, 197888, 5) + b"UTF-8" + struct.pack(">ii", 16, len(lines)) + strings
    return struct.pack(">I", len(body)) + zlib.compress(body)


def test_corpus_reads_an_r_database() -> None:
    records = [_record([title.upper(), "", "Chapter 1", "à £"]) for title in ("Emma", "Persuasion")]
    assert [corpus.lines(record)[-1] for record in corpus.records(b"".join(records))] == ["à £", "à £"]
    with pytest.raises(InputError, match=r"expected 6 novels, found \['Emma', 'Persuasion'\]"):
        corpus.novels(b"".join(records))
    with pytest.raises(InputError, match="found 'ULYSSES'"):
        corpus.novels(_record(["Ulysses", ""]))


def test_corpus_says_where_a_database_is_another_format() -> None:
    record = _record(["Emma"])
    with pytest.raises(InputError, match="expected a record of"):
        list(corpus.records(struct.pack(">I", 7) + record[4:]))
    with pytest.raises(InputError, match="expected an XDR character vector"):
        corpus.lines(b"X\n" + struct.pack(">iiii", 3, 0, 0, 5) + b"UTF-8" + struct.pack(">ii", 13, 0))

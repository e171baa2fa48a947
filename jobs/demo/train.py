"""Train the demo's model: five novels in, one folder in Hugging Face format out, the sixth novel never seen.

    python -m longscan.jobs.demo.train --out DIR [--steps N --seconds N --dropout P ...]

Parallel streams run through the novels, a chunk a step, and hand their state on to the next chunk (truncated
backpropagation through time): the model learns to live with a state that has seen a whole novel. Now and then a stream
jumps elsewhere and begins from nothing but `END`, as every document does in the product.

The end of one training novel is set aside to choose among checkpoints; weights are an average over the last steps.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from longscan.jobs.demo import card, checkpoint, vocabulary
from longscan.jobs.demo.corpus import PARQUET
from longscan.jobs.demo.measure import log_probs, measure, token_bytes
from longscan.jobs.demo.network import LayerState, Network, Shape
from longscan.jobs.demo.vocabulary import END_ID
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

CHECKED_NOVEL = "Mansfield Park"
CHECKED_TOKENS = 16_384
"""The end of this training novel that is set aside to choose among checkpoints."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings, as they are in the model kept here.

    Compared on an H200, 21 s each, in bits per byte of what is set aside: dropout 0.1, 0.2, 0.3: 1.461, 1.427, 1.427; dropout 0.2
    with weight decay 0.5: 1.421; with 10% noise: 1.411, which then ran longer and was best at step 1,708 (1.390). That run's schedule
    ended with `seconds`, 80.5; `steps` is what fitted in.
    """

    vocab_size: int = 2048
    d_model: int = 256
    num_layers: int = 4
    streams: int = 32
    chunk: int = 1024
    """Tokens of a stream in one step: gradients reach back to the chunk's start, the state to the stream's."""
    jump: float = 1 / 32
    """Chance that a stream begins elsewhere at a chunk's border; one jump in 16 goes to a novel's first token."""
    steps: int = 4445
    seconds: float = 3600.0
    """The schedule ends with the last step or with this time, whichever comes first."""
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.2
    noise: float = 0.1
    """Share of the tokens read that are replaced by random ones."""
    average: float = 0.998
    """Decay of the weights' running average, a step."""
    checks: int = 25
    """Checkpoints compared on what is set aside, evenly spaced."""
    seed: int = 0
    compile: int = 0
    """1: the mixers through torch.compile."""


class Streams:
    """Endless batches of consecutive chunks: inputs_ST, targets_ST, and keep_S, which streams go on with their state."""

    def __init__(self, texts: Sequence[Tensor], recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        marked = [torch.cat([torch.tensor([END_ID]), ids]) for ids in texts]
        lengths = torch.tensor([len(ids) for ids in marked], device=device)
        self.ids = torch.cat(marked).to(device)
        self.stop = lengths.cumsum(0)
        self.start = self.stop - lengths
        self.random = torch.Generator(device).manual_seed(recipe.seed)
        self.at_S = self.end_S = torch.zeros(recipe.streams, dtype=torch.int64, device=device)

    def _uniform(self) -> Tensor:
        return torch.rand(self.recipe.streams, generator=self.random, device=self.ids.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        chunk = self.recipe.chunk
        while True:
            jump_S = (self._uniform() < self.recipe.jump) | (self.at_S + chunk + 1 > self.end_S)
            text_S = torch.bucketize((self._uniform() * len(self.ids)).long(), self.stop, right=True).clamp(max=len(self.stop) - 1)
            room_S = self.stop[text_S] - self.start[text_S] - chunk
            into_S = (self._uniform() * room_S).long() * (self._uniform() > 1 / 16)
            self.at_S = torch.where(jump_S, self.start[text_S] + into_S, self.at_S)
            self.end_S = torch.where(jump_S, self.stop[text_S], self.end_S)
            window = self.ids[self.at_S.unsqueeze(1) + torch.arange(chunk + 1, device=self.ids.device)]
            inputs_ST, targets_ST = window[:, :-1].clone(), window[:, 1:]
            inputs_ST[:, 0] = torch.where(jump_S, END_ID, inputs_ST[:, 0])
            self.at_S = self.at_S + chunk
            yield inputs_ST, targets_ST, ~jump_S


def carry(state: Sequence[LayerState], keep_S: Tensor) -> list[LayerState]:
    """The state without its history of gradients, zeroed where a stream does not go on."""
    return [(tail.detach() * keep_S[:, None, None], ssm.detach() * keep_S[:, None, None, None]) for tail, ssm in state]


def optimizer_of(network: Network, recipe: Recipe) -> torch.optim.AdamW:
    """Weight decay on matrices alone: not on norms, biases, the convolution's taps, or what sets the decay."""
    matrices = [p for name, p in network.named_parameters() if p.ndim == 2]
    others = [p for name, p in network.named_parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)


def learning_rate(step: int, progress: float, recipe: Recipe) -> float:
    """Linear warm-up, then half a cosine down to zero at progress 1."""
    return recipe.learning_rate * min(1.0, (step + 1) / recipe.warmup) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


@torch.no_grad()
def blend(averaged: Network, network: Network, share: float) -> None:
    """Move the running average by `share` towards the network's weights."""
    for old, new in zip(averaged.parameters(), network.parameters(), strict=True):
        old.lerp_(new, share)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is learned from, and what is set aside."""

    novels: list[dict[str, Any]]
    """Every row of the corpus: for the measurement at the end alone."""
    tokenizer: Tokenizer
    texts: list[Tensor]
    checked: Tensor
    checked_bytes: int

    @classmethod
    def prepare(cls, recipe: Recipe) -> Lesson:
        novels = pq.read_table(PARQUET).to_pylist()
        read = {novel["title"]: novel["text"] for novel in novels if not novel["held_out"]}
        tokenizer = vocabulary.learn(read.values(), recipe.vocab_size)
        ids = {title: torch.tensor(tokenizer.encode(text).ids) for title, text in read.items()}
        checked = ids[CHECKED_NOVEL][-CHECKED_TOKENS:]
        ids[CHECKED_NOVEL] = ids[CHECKED_NOVEL][:-CHECKED_TOKENS]
        return cls(novels, tokenizer, list(ids.values()), checked, int(token_bytes(tokenizer)[checked].sum()))


def train(network: Network, lesson: Lesson, recipe: Recipe) -> dict[str, Any]:
    """Train `network` and leave in it the averaged weights that predicted best what is set aside. Returns what happened."""
    device = network.backbone.norm_f.weight.device
    checked = lesson.checked.to(device)
    averaged = copy.deepcopy(network).eval()
    if recipe.compile:
        network.compile_mixers()
    optimizer, state = optimizer_of(network, recipe), network.new_state(recipe.streams)
    best, best_weights, best_step, due = math.inf, {}, 0, 1
    begin, step, loss = time.monotonic(), 0, torch.tensor(math.nan)
    network.train()
    for inputs_ST, targets_ST, keep_S in Streams(lesson.texts, recipe, device):
        progress = max(step / recipe.steps, (time.monotonic() - begin) / recipe.seconds)
        if progress * recipe.checks >= due or progress >= 1:
            due = int(progress * recipe.checks) + 1
            bits = -float(log_probs(averaged, checked).sum()) / math.log(2) / lesson.checked_bytes
            if bits < best:
                best, best_step = bits, step
                best_weights = {name: value.clone() for name, value in averaged.state_dict().items()}
            elapsed = time.monotonic() - begin
            print(f"step {step:6d}  {elapsed:6.1f} s  loss {loss.item():.4f}  set aside {bits:.4f} bpb", flush=True)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress, recipe)
        noisy_ST = torch.rand(inputs_ST.shape, device=device) < recipe.noise
        inputs_ST = torch.where(noisy_ST, torch.randint_like(inputs_ST, recipe.vocab_size), inputs_ST)
        logits_STV, state = network(inputs_ST, carry(state, keep_S))
        loss = F.cross_entropy(logits_STV.flatten(0, 1), targets_ST.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        blend(averaged, network, max(1 - recipe.average, 1 / (step + 1)))
        step += 1
    network.load_state_dict(best_weights)
    return {"steps": step, "best_step": best_step, "set_aside": best, "seconds": time.monotonic() - begin}


def facts_of(network: Network, recipe: Recipe, outcome: dict[str, Any], train_tokens: int) -> dict[str, Any]:
    """What the card says beside the measurements."""
    given = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(Recipe)}
    changed = [f" --{field.name} {given[field.name]}" for field in dataclasses.fields(Recipe) if given[field.name] != field.default]
    shape = network.shape
    return {
        **given,
        **outcome,
        "num_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "state_size": shape.state_size,
        "parameters": sum(p.numel() for p in network.parameters()),
        "end_id": END_ID,
        "checked_tokens": CHECKED_TOKENS,
        "checked_novel": CHECKED_NOVEL,
        "arguments": "".join(changed),
        "epochs": outcome["steps"] * recipe.streams * recipe.chunk / train_tokens,
        "best_epochs": outcome["best_step"] * recipe.streams * recipe.chunk / train_tokens,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU",
    }


def finish(network: Network, lesson: Lesson, recipe: Recipe, outcome: dict[str, Any], out: Path) -> None:
    """Save the folder, read it back, measure what was read, and write the card."""
    checkpoint.save(network, lesson.tokenizer, out)
    torch.set_float32_matmul_precision("highest")
    saved, tokenizer = checkpoint.load(out)
    measured = measure(saved.to(network.backbone.norm_f.weight.device), tokenizer, lesson.novels)
    facts = facts_of(saved, recipe, outcome, sum(map(len, lesson.texts)))
    held_out = next(novel["title"] for novel in lesson.novels if novel["held_out"])
    (out / "README.md").write_text(card.write(facts | {"held_out": held_out}, measured), "utf-8")


def run(out: Path, recipe: Recipe) -> None:
    """The whole way from the corpus to the folder `out`."""
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    lesson = Lesson.prepare(recipe)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = Network(Shape(recipe.vocab_size, recipe.d_model, recipe.num_layers), recipe.dropout).to(device)
    outcome = train(network, lesson, recipe)
    finish(network, lesson, recipe, outcome, out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    for field in dataclasses.fields(Recipe):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    arguments = vars(parser.parse_args())
    out = arguments.pop("out")
    run(out, Recipe(**arguments))
    print((out / "README.md").read_text("utf-8"))


if __name__ == "__main__":
    main()

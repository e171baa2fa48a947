"""The model's card, written from what was measured: nothing in it is typed in by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [mamba2, longscan]
---

# A small Mamba-2 that has read Jane Austen

The model of longscan's demo: {parameters:,} parameters, {num_layers} layers of width {d_model} ({num_heads} heads of {head_dim}, one
group, state {state_size}), tied embeddings, byte-level BPE of {vocab_size:,} entries. It predicts the next token of English prose as
Jane Austen wrote it, line breaks included, and is good for nothing else: small enough to read her six novels on two CPU cores in
minutes, good enough that carrying its state from a novel's first token to its last shows in the numbers.

Matrices, taps and the taps' biases are bfloat16; `A_log`, `D`, `dt_bias` and the norms are float32. `<|endoftext|>` (id {end_id}) is
the context of every first token. All figures below are of the weights as saved, computed in float32.

## Data
`austen.parquet`, the six novels published from 1811 to 1817, built by `jobs/demo/corpus.py` from the Debian package
`r-cran-janeaustenr` (janeaustenr, (c) 2016-2017 Julia Silge, MIT license; its texts are Project Gutenberg's). The novels are in the
public domain. Texts are kept with their line breaks; a modern publisher's note after *Northanger Abbey* is left out.

Trained on five novels; *{held_out}* was seen by neither the tokenizer's nor the model's training, nor by any choice of settings.
The last {checked_tokens:,} tokens of *{checked_novel}* were set aside to choose among checkpoints and settings; `train.Recipe`
says which were compared.

## Training
`python -m longscan.jobs.demo.train --out DIR{arguments}`: {steps:,} steps in {seconds:.0f} s on {device}.

{streams} parallel streams run through the novels, {chunk:,} tokens each a step. The state is handed on from step to step (truncated
backpropagation through time) and zeroed where a stream jumps elsewhere, which happens at {jump:.1%} of the borders.
AdamW, learning rate {learning_rate} with a cosine to zero, weight decay {weight_decay}, dropout {dropout}, {noise:.0%} of the tokens
read replaced by random ones, weights averaged with decay {average}. In all about {epochs:.0f} passes over the training text; the
checkpoint kept is that of step {best_step:,}, after {best_epochs:.0f} passes.

"""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _curve(stretches: Sequence[Mapping[str, Any]], name: str) -> str:
    rows = [[f"{s['from']:,} to {s['to']:,}", f"{s['carried']:.3f}", f"{s['reset']:.3f}"] for s in stretches]
    return _table([name, "state carried", "reset every 512"], rows)


def write(facts: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """The card. facts: the names in HEAD; measured: what `measure.measure` returns."""
    novels = [
        [
            f"*{row['title']}*" + (", **held out**" if row["held_out"] else ""),
            f"{row['tokens']:,}",
            f"{row['bytes']:,}",
            f"{row['carried']:.3f}",
            f"{row['reset']:.3f}",
        ]
        for row in measured["novels"]
    ]
    return (
        HEAD.format_map(facts)
        + "## Bits per byte\n"
        + _table(["novel", "tokens", "bytes", "state carried", "reset every 512"], novels)
        + "\nAlong the held-out novel, by position:\n\n"
        + _curve(measured["curves"]["position"], "tokens from the novel's start")
        + "\nThe same tokens by their distance from the last reset; with the state carried a reset never comes:\n\n"
        + _curve(measured["curves"]["offset"], "tokens from the reset")
    )

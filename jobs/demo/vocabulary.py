"""The demo model's tokenizer: byte-level BPE, learned on the training novels alone.

GPT-2's pre-tokenizer cuts a text into words, each with the space before it, and no merge crosses such a cut. So whatever
the entries are, the cut between a non-space and a space that a letter follows is exact: both sides have the same tokens
alone and together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
"""Begins every text as context and ends none: BOS and EOS in one, the first entry."""

END_ID = 0


def learn(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `size` entries: END, the 256 bytes, then merges, the most frequent first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers.AutoTokenizer reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

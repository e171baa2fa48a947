"""What the demo ships: corpus, tokenizer and model, whole and as small as promised."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from longscan.jobs.demo import checkpoint, corpus
from longscan.jobs.demo.measure import log_probs, token_bytes
from longscan.kernels.segments import Entry, Segments
from longscan.pipeline.model import load_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(corpus.__file__).parent
MODEL = DEMO / "model"
MB = 1_000_000
TITLES = [
    "Sense and Sensibility",
    "Pride and Prejudice",
    "Mansfield Park",
    "Emma",
    "Northanger Abbey",
    "Persuasion",
]


@cache
def novels() -> dict[str, dict[str, Any]]:
    return {row["title"]: row for row in pq.read_table(corpus.PARQUET).to_pylist()}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@cache
def held_out_ids(count: int) -> torch.Tensor:
    """The held-out novel's first tokens."""
    return torch.tensor(tokenizer().encode(novels()["Persuasion"]["text"]).ids[:count])


@cache
def card_rows() -> dict[str, list[str]]:
    """First cell -> the other cells, of every line of the card's tables."""
    lines = (MODEL / "README.md").read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row[1:] for row in cells}


def test_sizes() -> None:
    shipped = {path.name for path in MODEL.iterdir()}
    assert shipped == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert corpus.PARQUET.stat().st_size < 2.5 * MB
    assert corpus.PARQUET.stat().st_size + sum(path.stat().st_size for path in MODEL.iterdir()) < 7 * MB
    network, _ = checkpoint.load(MODEL)
    assert 1_000_000 <= sum(p.numel() for p in network.parameters()) <= 2_500_000


def test_corpus_is_six_whole_novels_in_order_of_publication() -> None:
    rows = novels()
    assert list(rows) == TITLES
    assert [row["published"] for row in rows.values()] == sorted(row["published"] for row in rows.values())
    assert [title for title, row in rows.items() if row["held_out"]] == ["Persuasion"]
    for title, row in rows.items():
        text = row["text"]
        assert text.upper().startswith(title.upper()), title
        assert 400_000 < len(text) < 900_000, title
        assert max(map(len, text.splitlines())) <= 76, f"{title}: line breaks are gone"
        assert corpus.EDITORS_NOTE not in text, title
    assert rows["Pride and Prejudice"]["text"].endswith("had been the means of uniting them.\n")
    assert rows["Northanger Abbey"]["text"].endswith("No. 97, Vol. II, Rambler.\n")


def test_corpus_has_a_row_group_a_novel_and_no_dictionary_of_texts() -> None:
    metadata = pq.ParquetFile(corpus.PARQUET).metadata
    assert metadata.num_row_groups == len(TITLES)
    text = metadata.schema.names.index("text")
    columns = [metadata.row_group(group).column(text) for group in range(metadata.num_row_groups)]
    assert {column.compression for column in columns} == {"ZSTD"}
    assert not any(column.has_dictionary_page for column in columns)


@pytest.mark.slow
def test_corpus_is_what_the_package_gives(tmp_path: Path) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        pytest.skip("needs apt-get and dpkg")
    subprocess.run(["apt-get", "update"], capture_output=True, check=True)
    assert corpus.table(corpus.fetch(tmp_path)).equals(pq.read_table(corpus.PARQUET))


@pytest.mark.parametrize("title", TITLES)
def test_tokenizer_gives_every_novel_back(title: str) -> None:
    fast = AutoTokenizer.from_pretrained(MODEL)
    text = novels()[title]["text"]
    assert fast.is_fast
    ids = fast(text).input_ids
    assert ids == tokenizer().encode(text).ids
    assert fast.decode(ids) == text
    assert int(token_bytes(tokenizer())[torch.tensor(ids)].sum()) == len(text.encode("utf-8"))


def test_tokenizer_can_be_cut_before_a_word() -> None:
    """No entry spans "x" and " y": a space stands first in an entry, or in an entry that is all white space."""
    state = json.loads((MODEL / "tokenizer.json").read_text("utf-8"))
    assert state["normalizer"] is None
    assert state["post_processor"] is None
    assert state["pre_tokenizer"] == {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    assert [(token["content"], token["lstrip"], token["rstrip"]) for token in state["added_tokens"]] == [("<|endoftext|>", False, False)]
    vocabulary = tokenizer().get_vocab()
    assert len(vocabulary) == 2048 <= 4096
    white = {"Ġ", "Ċ", "č", "ĉ"}
    assert [entry for entry in vocabulary if "Ġ" in entry[1:] and not set(entry) <= white] == []


def test_tokenizer_gives_the_same_tokens_in_pieces() -> None:
    text = novels()["Persuasion"]["text"]
    places = [match.start() + 1 for match in re.finditer(r"\S [A-Za-z]", text)]
    cuts = [0, *sorted(random.Random(0).sample(places, 300)), len(text)]
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    together = [token for piece in pieces for token in tokenizer().encode(piece).ids]
    assert together == tokenizer().encode(text).ids


def test_transformers_reads_the_model_and_it_predicts_the_held_out_novel() -> None:
    ids = held_out_ids(4000)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    context = torch.cat([torch.tensor([model.config.bos_token_id]), ids[:-1]])
    with torch.no_grad():
        oracle = model(context.unsqueeze(0)).logits[0].log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
    num_bytes = int(token_bytes(tokenizer())[ids].sum())
    assert 1.0 < -float(oracle.sum()) / math.log(2) / num_bytes < 1.8

    network, _ = checkpoint.load(MODEL)
    torch.testing.assert_close(log_probs(network, ids), oracle.double(), atol=1e-3, rtol=0)


def test_the_product_computes_what_was_trained() -> None:
    ids = held_out_ids(2000)
    network, _ = checkpoint.load(MODEL)
    model = load_model(MODEL, dtype=torch.float32, device="cpu", backend="torch")
    tiles = -(-len(ids) // 64)
    context = torch.zeros(tiles * 64, dtype=torch.int64)
    context[1 : len(ids)] = ids[:-1]
    segments = Segments.pack([Entry(first_tile=0, num_tokens=len(ids), lane_out=0, ends=True)], tiles)
    hidden, _ = model.step(context, segments, model.new_state(1))
    scored = model.logprobs(hidden[: len(ids)], ids)
    torch.testing.assert_close(scored.double(), log_probs(network, ids), atol=1e-4, rtol=0)


def test_carrying_the_state_pays_and_the_card_says_so() -> None:
    ids = held_out_ids(8192)
    network, _ = checkpoint.load(MODEL)
    bits = math.log(2) * int(token_bytes(tokenizer())[ids].sum())
    carried, reset = (-float(log_probs(network, ids, every).sum()) / bits for every in (None, 512))
    assert carried < reset - 0.01
    rows = card_rows()
    by_position = [(float(a), float(b)) for row, (a, b) in ((r, c[-2:]) for r, c in rows.items() if re.match(r"[\d,]+ to ", r))]
    assert len(by_position) == 11
    assert all(a <= b for a, b in by_position)
    tokens, num_bytes, whole, whole_reset = rows["*Persuasion*, **held out**"]
    assert int(tokens.replace(",", "")) == len(tokenizer().encode(novels()["Persuasion"]["text"]).ids)
    assert int(num_bytes.replace(",", "")) == len(novels()["Persuasion"]["text"].encode("utf-8"))
    assert float(whole) < float(whole_reset)
    # The title page and the first pages cost more than the novel does.
    assert float(whole) < carried < float(whole) + 0.1

"""What a job writes, against its definition: transformers' Mamba-2 in fp32 on each whole text, and arithmetic on what it gives."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from fakes import tiny_checkpoint
from longscan.jobs.run import main
from tiny_jobs import SENTENCE, rows, words, write_input
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

Array = npt.NDArray[np.float64]

WINDOW = 128
CONTEXT = 0
"""The tokenizer's only special token: what precedes a text where its first token is scored."""


def long_text(num_words: int) -> str:
    """Words in an order that does not repeat."""
    choices = [*SENTENCE.split(), "naïve", "Ωmega", "🦜", "𝔘nicode", "don't", "1811", "\t", "\u0301"]
    picked = random.Random(5).choices(choices, k=num_words)
    return " ".join(picked)


TEXTS: dict[str, str | None] = {
    "empty": "",
    "one byte": "a",
    "null": None,
    "emoji": "👩‍👩‍👧‍👦 and 🇫🇷 " * 12,
    "line ends": "first\r\nsecond\r\n\r\nthird\rfourth\n" * 9,
    "accents": "e\u0301le\u0300ve Ελληνικά 中文没有空格 " * 7,
    "twenty thousand tokens": long_text(7000),
    "a sentence": SENTENCE,
    "null character": "\x00one\x00two",
    "two thousand tokens": long_text(550)[::-1],
    "space": " ",
}


@dataclass(frozen=True)
class Expected:
    """A text's tokens, where they stand, and what transformers says of them."""

    ids: list[int]
    spans: list[tuple[int, int]]
    logprobs: Array
    """[n]: of each token given all before it; NaN where there is nothing before it."""
    hidden: Array
    """[n, D]: after the final norm."""


def spans_of(tokens: list[str], text: str) -> list[tuple[int, int]]:
    """The code points that each byte-level token has a byte of, half-open, counted from the bytes alone."""
    char_of_byte = [index for index, char in enumerate(text) for _ in char.encode()]
    ends = np.cumsum([len(token) for token in tokens], dtype=int).tolist()  # a letter of these tokens stands for a byte
    return [(char_of_byte[end - len(token)], char_of_byte[end - 1] + 1) for token, end in zip(tokens, ends, strict=True)]


def by_definition(folder: Path, text: str, model: Any, context: list[int]) -> Expected:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert set("".join(encoded.tokens)) <= set(ByteLevel.alphabet())
    ids, skip = encoded.ids, len(context)
    with torch.no_grad():
        output = model(torch.tensor([context + ids]), output_hidden_states=True)
    scores = torch.log_softmax(output.logits[0].double(), -1).numpy()
    # The row before a token scores it; without a context, no row comes before the first.
    logprobs = [scores[skip + i - 1, token] if skip + i else math.nan for i, token in enumerate(ids)]
    return Expected(ids, spans_of(encoded.tokens, text), np.array(logprobs), output.hidden_states[-1][0, skip:].double().numpy())


def pooled(hidden: Array, pooling: str) -> Array:
    weights = np.arange(1, len(hidden) + 1)
    vector = {
        "mean": lambda: hidden.mean(0),
        "last": lambda: hidden[-1],
        "max": lambda: hidden.max(0),
        "weighted_mean": lambda: (hidden * weights[:, None]).sum(0) / weights.sum(),
    }[pooling]()
    unit: Array = vector / np.linalg.norm(vector)
    return unit


POOLINGS = ("mean", "last", "max", "weighted_mean")


def assert_vectors(row: dict[str, Any], hidden: Array) -> None:
    for pooling in POOLINGS:
        found = row[f"embedding_{pooling}"]
        if not len(hidden):
            assert found is None
        else:
            np.testing.assert_allclose(found, pooled(hidden, pooling), rtol=0, atol=2e-5, err_msg=f"{row['doc_id']}: {pooling}")


def assert_document(row: dict[str, Any], expected: Expected, text: str) -> None:
    scored = expected.logprobs[~np.isnan(expected.logprobs)]
    assert row["num_tokens"] == len(expected.ids)
    assert row["num_scored_tokens"] == len(scored)
    assert row["num_bytes"] == len(text.encode())
    assert row["log_likelihood"] == pytest.approx(scored.sum(), rel=1e-5)
    if len(scored):
        assert row["bits_per_byte"] == pytest.approx(-scored.sum() / math.log(2) / len(text.encode()), rel=1e-5)
    else:
        assert row["bits_per_byte"] is None
    assert_vectors(row, expected.hidden)


def assert_windows(found: list[dict[str, Any]], expected: Expected) -> None:
    starts = range(0, len(expected.ids), WINDOW)
    assert [row["window_index"] for row in found] == list(range(len(starts)))
    for row, start in zip(found, starts, strict=True):
        end = min(start + WINDOW, len(expected.ids))
        assert (row["token_start"], row["token_end"]) == (start, end)
        assert (row["char_start"], row["char_end"]) == (expected.spans[start][0], expected.spans[end - 1][1])
        assert row["log_likelihood"] == pytest.approx(np.nansum(expected.logprobs[start:end]), rel=1e-5)
        assert_vectors(row, expected.hidden[start:end])


def assert_tokens(found: list[dict[str, Any]], expected: Expected) -> None:
    logprobs: list[float | None] = []
    ids: list[int] = []
    for row in found:
        assert row["token_start"] == len(ids)
        ids += row["token_ids"]
        logprobs += row["logprobs"]
    assert ids == expected.ids
    assert [value is None for value in logprobs] == np.isnan(expected.logprobs).tolist()
    values = [math.nan if value is None else value for value in logprobs]
    np.testing.assert_allclose(values, expected.logprobs, rtol=0, atol=1e-4)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers says at length which optional kernels it has not."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize(("first_token", "context"), [("auto", [CONTEXT]), ("skip", [])])
def test_every_table_is_what_its_definition_says(tmp_path: Path, first_token: str, context: list[int]) -> None:
    folder = tiny_checkpoint(tmp_path / "model", d_model=32, num_groups=2, tokenizer=True)
    source = write_input(tmp_path / "in.parquet", list(TEXTS.values()), row_group=4, name=list(TEXTS))
    tasks = ("task=embed_score", f"task.embedding.pooling=[{','.join(POOLINGS)}]", "task.score.per_token=true", "max_errors=1")
    windows = (f"task.embedding.window_tokens={WINDOW}", f"task.score.window_tokens={WINDOW}", f"task.score.first_token={first_token}")
    out = tmp_path / "out"
    assert main(words(folder, source, out, "input.id_column=name", *tasks, *windows)) == 0
    documents, window_rows, token_rows = rows(out, "documents"), rows(out, "windows"), rows(out, "tokens")
    assert [row["doc_id"] for row in documents] == [name for name, text in TEXTS.items() if text is not None]
    assert [row["doc_id"] for row in rows(out, "errors")] == ["null"]
    model = transformers.Mamba2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row in documents:
        name = row["doc_id"]
        text = TEXTS[name] or ""
        expected = by_definition(folder, text, model, context) if text else Expected([], [], np.zeros(0), np.zeros((0, 32)))
        assert_document(row, expected, text)
        assert_windows([window for window in window_rows if window["doc_id"] == name], expected)
        assert_tokens([segment for segment in token_rows if segment["doc_id"] == name], expected)
    assert max(row["num_tokens"] for row in documents) >= 20_000
    assert min(row["num_tokens"] for row in documents if row["num_tokens"]) == 1

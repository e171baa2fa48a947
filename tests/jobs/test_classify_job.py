"""task=classify, through the command: documents and sentences against the model's own hidden states, errors, and company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from fakes import tiny_checkpoint
from longscan.jobs.run import main
from safetensors.torch import save_file
from tiny_jobs import hidden_of, rows, table, texts, words, write_input
from tokenizers import Tokenizer

WEIGHT = {"tone.weight": torch.randn(3, 64, generator=torch.Generator().manual_seed(1)), "tone.bias": torch.tensor([0.1, -0.2, 0.3])}
AGE = {"age.weight": torch.randn(1, 64, generator=torch.Generator().manual_seed(2))}
LABELS = ("low", "middle", "high")
TEXTS = [*texts(5), "", "One. Two two.  Three é字! And four", "x. " * 200]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True)
    save_file(WEIGHT | AGE, folder / "classifier.safetensors", metadata={"labels": json.dumps({"tone": LABELS})})
    return folder


def logits_of(hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tone = hidden @ WEIGHT["tone.weight"].double().numpy().T + WEIGHT["tone.bias"].double().numpy()
    return tone, hidden @ AGE["age.weight"].double().numpy().T


def check(row: dict[str, Any], hidden: np.ndarray) -> None:
    tone, age = logits_of(hidden)
    assert np.allclose(row["logits_tone"], tone, atol=1e-4)
    assert np.allclose(row["logits_age"], age, atol=1e-4)
    assert row["label_tone"] == LABELS[int(np.argmax(row["logits_tone"]))]
    assert "label_age" not in row


def ends_of(text: str) -> list[int]:
    return [n + 1 for n, character in enumerate(text) if character in ".!"] + [len(text)] * bool(text)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_documents(pooling: str, model: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.parquet", TEXTS)
    assert main(words(model, source, tmp_path / "out", "task=classify", f"task.classify.pooling={pooling}")) == 0
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = rows(tmp_path / "out", "documents")
    assert table(tmp_path / "out", "documents").column_names == ["doc_id", "num_tokens", "logits_age", "logits_tone", "label_tone"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == ["_run", "documents", "errors"]
    for row, text in zip(found, TEXTS, strict=True):
        if not text:
            assert (row["logits_tone"], row["logits_age"], row["label_tone"]) == (None, None, None)
            continue
        hidden = hidden_of(model, tokenizer.encode(text).ids)
        check(row, hidden[-1] if pooling == "last" else hidden.mean(axis=0))


@pytest.mark.parametrize("unit", ["chars", "tokens"])
def test_a_score_a_sentence(unit: str, model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    encoded = [tokenizer.encode(text) for text in TEXTS]
    ends = [ends_of(text) for text in TEXTS]
    if unit == "tokens":
        ends = [[sum(start < end for start, _ in one.offsets) for end in of] for one, of in zip(encoded, ends, strict=True)]
    ends[0] = [0, *ends[0]]
    source = write_input(tmp_path / "in.parquet", TEXTS, ends=ends)
    more = ["task=classify", "task.classify.at=positions", "input.positions_column=ends", f"input.positions_unit={unit}"]
    assert main(words(model, source, tmp_path / "out", *more)) == 0
    assert table(tmp_path / "out", "documents").column_names == ["doc_id", "num_tokens"]
    found = rows(tmp_path / "out", "positions")
    by_document = {n: [row for row in found if row["doc_id"] == f"in.parquet#{n}"] for n in range(len(TEXTS))}
    for n, text in enumerate(TEXTS):
        if not text:
            assert not by_document[n]
            continue
        assert [row["position_index"] for row in by_document[n]] == list(range(len(ends[n])))
        assert [row["position"] for row in by_document[n]] == ends[n]
        hidden = hidden_of(model, encoded[n].ids)
        for row in by_document[n]:
            last = row["position"] - 1
            if unit == "chars":
                last = max((i for i, (start, _) in enumerate(encoded[n].offsets) if start < row["position"]), default=-1)
            assert row["token"] == (last if last >= 0 else None)
            if last < 0:
                assert row["logits_tone"] is row["label_tone"] is None
            else:
                check(row, hidden[last])
    alone = write_input(tmp_path / "one.parquet", TEXTS[-1:], ends=ends[-1:])
    assert main(words(model, alone, tmp_path / "alone", *more, "engine.step_tokens=1024")) == 0
    assert [row["logits_tone"] for row in rows(tmp_path / "alone", "positions")] == [
        row["logits_tone"] for row in by_document[len(TEXTS) - 1]
    ]


def test_bad_positions_are_error_rows(model: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.parquet", ["a b c"] * 5, ends=[[1, 3], None, [3, 1], [-1], [2, None]])
    more = ["task=classify", "task.classify.at=positions", "input.positions_column=ends", "max_errors=4"]
    assert main(words(model, source, tmp_path / "out", *more)) == 0
    assert [(row["row"], row["error"]) for row in rows(tmp_path / "out", "errors")] == [
        *((1, "NullPositions"), (2, "InvalidPositions"), (3, "InvalidPositions"), (4, "NullPositions"))
    ]
    assert len(rows(tmp_path / "out", "positions")) == 2


def test_a_head_of_its_own_is_another_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_input(tmp_path / "in.parquet", texts(3))
    save_file({"weight": torch.randn(2, 64)}, tmp_path / "head.safetensors")
    assert main(words(model, source, tmp_path / "out", "task=classify")) == 0
    named = f"task.classify.head={tmp_path / 'head.safetensors'}"
    assert main(words(model, source, tmp_path / "out", "task=classify", named)) == 2
    assert "model.heads" in capsys.readouterr().err
    assert main(words(model, source, tmp_path / "named", "task=classify", named)) == 0
    assert {row["label"] for row in rows(tmp_path / "named", "documents")} <= {"0", "1"}
    (part,) = (tmp_path / "named" / "documents").iterdir()
    assert json.loads(pq.read_schema(part).metadata[b"longscan"])["task"]["classify"] == {"at": "document", "pooling": "last"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["task.classify.head=/nowhere.safetensors"], "task.classify.head: expected a safetensors file of linear heads at /nowhere"),
        (["task.classify.at=positions"], "input.positions_column: expected a column of the positions"),
        (["input.positions_column=ends"], "input.positions_column: expected null, or task=classify and task.classify.at=positions"),
        (["task.classify.at=positions", "input.positions_column=text"], "expected lists of integers, found string"),
        (["task.classify.at=positions", "input.positions_column=gone"], "input.positions_column=gone: found no such column"),
        (
            ["task.classify.at=positions", "input.positions_column=ends", "input.tokens_column=ends"],
            "input.positions_unit: expected tokens",
        ),
        (["task.classify.at=everywhere"], "task.classify.at: expected one of document, positions"),
        (["task.classify.pooling=first"], "task.classify.pooling: expected one of mean, last"),
        (["input.passthrough=[label_tone]"], "input.passthrough: expected each column once and none of"),
    ],
)
def test_what_cannot_be_done_is_told(
    more: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_input(tmp_path / "in.parquet", ["a", "b"], ends=[[1], [1]], label_tone=["x", "y"])
    assert main(words(model, source, tmp_path / "out", "task=classify", *more)) == 2
    assert message in capsys.readouterr().err

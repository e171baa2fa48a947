"""model.parse_special through the command: special tokens in texts are text, unless they are to be parsed; the output says which."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
from fakes import END_OF_TEXT, tiny_checkpoint
from longscan.jobs.run import main
from tiny_jobs import rows, words, write_input


def test_special_tokens_in_a_text(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", tokenizer=True)
    source = write_input(tmp_path / "in.parquet", [f"one{END_OF_TEXT}two"])
    found = {}
    for name, more in (("text", []), ("token", ["model.parse_special=true"])):
        assert main(words(model, source, tmp_path / name, "task=score", "task.score.per_token=true", *more)) == 0
        (row,) = rows(tmp_path / name, "tokens")
        (part,) = (tmp_path / name / "documents").iterdir()
        facts = json.loads(pq.read_schema(part).metadata[b"longscan"])["model"]["tokenizer"]
        assert (facts["parse_special"], facts["bos_id"], facts["eos_id"]) == (name == "token", 0, 0)
        found[name] = row["token_ids"]
    assert 0 not in found["text"]
    assert found["token"].count(0) == 1
    assert len(found["token"]) < len(found["text"])
    assert main(words(model, source, tmp_path / "text", "task=score", "task.score.per_token=true", "model.parse_special=true")) == 2

"""What the sentence-transformers files in a model's folder ask for, through the command; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from checkpoint_formats import rewrite
from fakes import tiny_checkpoint
from longscan.jobs import convert
from longscan.jobs.run import main
from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import ModelError
from longscan.pipeline.model.classify import HEAD_FILE
from longscan.pipeline.model.recipe import Recipe, read_recipe, recipe_files, settle
from tiny_jobs import hidden_of, rows, texts, words, write_input
from tokenizers import Tokenizer, processors

ST = "sentence_transformers.models."
PROMPTS = {"query": "Instruct: find\nQuery: ", "document": "", "passage": "passage:\n"}
END = 0
"""Id of the tokenizer's <|endoftext|>."""


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content), "utf-8")


def embedding_model(
    folder: Path, *, pooling: dict[str, Any], normalize: bool = True, end: bool = False, begin: bool = False, **config: Any
) -> Path:
    """A tiny model with the files of sentence-transformers. begin, end: its tokenizer puts its one special token around a text."""
    tiny_checkpoint(folder, tokenizer=True, seed=4)
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    modules = [{"idx": n, "name": str(n), "path": f"{n}_{kind}" * (n > 0), "type": ST + kind} for n, kind in enumerate(kinds)]
    write(folder / "modules.json", modules)
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **pooling})
    write(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None, **config})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = "<|endoftext|> " * begin + "$A" + " <|endoftext|>" * end
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<|endoftext|>", END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def expected(folder: Path, prompt: str, text: str, pooling: str, *, whole: bool, normalize: bool = True) -> np.ndarray:
    """As sentence-transformers has it: the tokenizer on both as one, with its template; `whole` pools over the prompt and BOS too."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    encoded = tokenizer.encode(prompt + text)
    hidden = hidden_of(folder, encoded.ids)
    # The first token that reaches beyond the prompt; special tokens stand at (0, 0), EOS behind all.
    own = next(n for n, (_, end) in enumerate(encoded.offsets) if end > len(prompt))
    chosen = hidden if whole else hidden[own:]
    vector: np.ndarray = {"mean": chosen.mean(axis=0), "max": chosen.max(axis=0), "last": hidden[-1]}[pooling]
    return vector / np.linalg.norm(vector) if normalize else vector


def embedded(folder: Path, source: Path, out: Path, *more: str) -> np.ndarray:
    assert main(words(folder, source, out, *more)) == 0
    return np.array([row["embedding"] for row in rows(out, "documents")])


@pytest.mark.parametrize("name", ["query", "document", "passage", None])
@pytest.mark.parametrize(
    ("key", "pooling", "include", "begin"),
    [
        ("pooling_mode_lasttoken", "last", True, False),
        ("pooling_mode_lasttoken", "last", False, True),
        ("pooling_mode_mean_tokens", "mean", True, True),
        ("pooling_mode_mean_tokens", "mean", True, False),
        ("pooling_mode_mean_tokens", "mean", False, False),
        ("pooling_mode_max_tokens", "max", True, True),
    ],
)
def test_a_folder_says_how_it_is_used(key: str, pooling: str, include: bool, begin: bool, name: str | None, tmp_path: Path) -> None:
    folder = embedding_model(tmp_path / "model", pooling={key: True, "include_prompt": include}, end=True, begin=begin)
    spoken = ["hello", *texts(4), "\n\nand then", "x" * 300]
    source = write_input(tmp_path / "in.parquet", spoken)
    found = embedded(folder, source, tmp_path / "out", *([f"task.embedding.prompt={name}"] if name else []))
    prompt = PROMPTS[name] if name else ""
    for vector, text in zip(found, spoken, strict=True):
        assert np.allclose(vector, expected(folder, prompt, text, pooling, whole=include), atol=1e-5), text[:20]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    for row, text in zip(rows(tmp_path / "out", "documents"), spoken, strict=True):
        offsets = tokenizer.encode(prompt + text, add_special_tokens=False).offsets
        assert row["num_tokens"] == 1 + sum(end > len(prompt) for _, end in offsets), "the prompt and BOS are in no count, EOS is"


def test_keys_come_before_the_folder(tmp_path: Path) -> None:
    folder = embedding_model(tmp_path / "model", pooling={"pooling_mode": "lasttoken"}, end=True, default_prompt_name="query")
    source = write_input(tmp_path / "in.parquet", texts(3))
    found = embedded(folder, source, tmp_path / "default")
    assert np.allclose(found[0], expected(folder, PROMPTS["query"], texts(1)[0], "last", whole=True), atol=1e-5)
    more = ["task.embedding.prompt=null", "task.embedding.pooling=[mean]", "task.embedding.normalize=false", "model.append_eos=false"]
    found = embedded(folder, source, tmp_path / "keys", *more, "task.embedding.include_prompt=false")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = hidden_of(folder, tokenizer.encode(texts(1)[0], add_special_tokens=False).ids).mean(axis=0)
    assert np.allclose(found[0], plain, atol=1e-5)
    literal = embedded(folder, source, tmp_path / "literal", "task.embedding.prompt_text=Say: ")
    assert np.allclose(literal[0], expected(folder, "Say: ", texts(1)[0], "last", whole=True), atol=1e-5)


def test_bits_and_windows_know_no_company_and_no_prompt(tmp_path: Path) -> None:
    folder = embedding_model(tmp_path / "model", pooling={"pooling_mode": "mean"})
    chosen = texts(9)[7]
    more = ["task.embedding.prompt=query", "task.embedding.window_tokens=64"]
    alone = embedded(folder, write_input(tmp_path / "one.parquet", [chosen]), tmp_path / "one", *more)
    among = embedded(folder, write_input(tmp_path / "many.parquet", [*texts(7), chosen, *texts(7, seed=3)]), tmp_path / "many", *more)
    assert np.array_equal(alone[0], among[7])
    windows = [row for row in rows(tmp_path / "many", "windows") if row["doc_id"].endswith("#7")]
    assert windows[0]["token_start"] == windows[0]["char_start"] == 0
    assert windows[-1]["char_end"] == len(chosen)
    (part,) = (tmp_path / "one" / "documents").iterdir()
    facts = json.loads(pq.read_schema(part).metadata[b"longscan"])
    assert facts["task"]["embedding"]["prompt_text"] == PROMPTS["query"]
    assert facts["task"]["embedding"]["include_prompt"] is True
    assert len(facts["model"]["prompt_ids"]) > 3


def test_a_model_that_is_converted_embeds_as_before(tmp_path: Path) -> None:
    pooling = {"pooling_mode": "lasttoken", "include_prompt": False}
    folder = embedding_model(tmp_path / "model", pooling=pooling, end=True, default_prompt_name="query")
    write(folder / "sentence_bert_config.json", {"max_seq_length": 99})
    (folder / HEAD_FILE).write_bytes(b"heads")
    original = rewrite(folder, tmp_path / "original", "hugging_face_bin", copied=("tokenizer.json", "tokenizer_config.json", HEAD_FILE))
    for name in recipe_files(folder):
        (original / name).parent.mkdir(exist_ok=True)
        (original / name).write_bytes((folder / name).read_bytes())
    assert convert.main([str(original), str(tmp_path / "target")]) == 0
    assert read_recipe(tmp_path / "target") == read_recipe(folder) == Recipe("last", True, False, PROMPTS, "query", 99)
    assert (tmp_path / "target" / HEAD_FILE).read_bytes() == b"heads"
    source = write_input(tmp_path / "in.parquet", texts(3))
    assert np.array_equal(embedded(tmp_path / "target", source, tmp_path / "a"), embedded(folder, source, tmp_path / "b"))
    write(original / "modules.json", [{"type": ST + "Pooling", "path": "../model"}])
    assert convert.main([str(original), str(tmp_path / "another")]) == 2


MEAN = {"pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules.json": {}}, "expected a JSON list of objects, found another dict"),
        (
            {"modules.json": [{"type": ST + "Transformer"}]},
            "expected a Transformer, one Pooling and perhaps a Normalize, found Transformer",
        ),
        (
            {"modules.json": [{"type": ST + kind, "path": kind} for kind in ("Transformer", "Pooling", "Dense")]},
            "found Transformer, Pooling, Dense: longscan does not compute that",
        ),
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True}}, "pooling_mode: expected one of mean, .* found cls"),
        ({"1_Pooling/config.json": {**MEAN, "pooling_mode_max_tokens": True}}, "found mean and max"),
        ({"1_Pooling/config.json": {}}, "found none"),
        ({"1_Pooling/config.json": {**MEAN, "include_prompt": "no"}}, "include_prompt: expected true or false, found 'no'"),
        ({"config_sentence_transformers.json": {"prompts": ["a"]}}, "prompts: expected texts by name"),
        ({"config_sentence_transformers.json": {"default_prompt_name": "q"}}, "default_prompt_name: expected one of no prompts, found 'q'"),
        ({"config_sentence_transformers.json": {"default_prompt_name": ["q"]}}, r"default_prompt_name: expected one of .*, found \['q'\]"),
        (
            {"modules.json": [{"type": ST + "Transformer"}, {"type": ST + "Pooling", "path": "../elsewhere"}]},
            "found a link that leaves its folder",
        ),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, "do_lower_case: expected false"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_not_computed_is_refused(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = embedding_model(tmp_path / "model", pooling=MEAN)
    assert read_recipe(folder) == Recipe("mean", True, True, PROMPTS)
    for name, content in files.items():
        write(folder / name, content)
    with pytest.raises(ModelError, match=message) as caught:
        read_recipe(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["task.embedding.prompt=quest"], "task.embedding.prompt: expected a prompt of the model (query, document, passage), got 'quest'"),
        (["task=embed_score", "task.embedding.prompt=query"], "task.embedding.prompt: expected task=embed, got task=embed_score"),
        (["task.embedding.prompt=query", "input.tokens_column=ids"], "input.tokens_column brings token ids"),
        (["task.embedding.pooling=[weighted_mean]"], "task.embedding.include_prompt: expected false with weighted_mean"),
    ],
)
def test_prompts_that_cannot_be_used(more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = embedding_model(tmp_path / "model", pooling=MEAN)
    source = write_input(tmp_path / "in.parquet", texts(2), ids=[[1, 2], [3]])
    assert main(words(folder, source, tmp_path / "out", *more)) == 2
    assert message in capsys.readouterr().err


def test_without_these_files_nothing_changes() -> None:
    settled = settle(JobConfig(), None, None)
    embedding = settled.task.embedding
    assert (embedding.pooling, embedding.normalize, embedding.include_prompt, embedding.prompt_text) == (["mean"], True, False, None)
    assert settled.model.append_eos is False

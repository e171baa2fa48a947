"""Which tokenizer a folder gives, what is known of it, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import sentencepiece as sentencepiece_library
from fakes import LINES
from longscan.pipeline.errors import ModelError
from longscan.pipeline.tokenize import TextTokenizer, check_fits, load_tokenizer
from tokenizer_zoo import PROVEN, WORDS
from tokenizers import AddedToken, NormalizedString, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

MAMBA2 = {"model_type": "mamba2"}


def write(folder: Path, backend: Tokenizer | None = None, **files: object) -> str:
    """A folder with tokenizer.json and JSON files named by keyword; its path."""
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return str(folder)


def copy(name: str) -> Tokenizer:
    return Tokenizer.from_str(PROVEN[name]().to_str())


def ids(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.encode([text])[0].ids.tolist()


def test_the_file_decides_the_ids_whatever_class_the_model_type_stands_for(tmp_path: Path) -> None:
    """AutoTokenizer takes GPT-NeoX's class for a mamba2 folder: it splits otherwise, and adds tokens the file has not."""
    original = copy("qwen")
    loaded = load_tokenizer(write(tmp_path, original, config=MAMBA2))
    assert ids(loaded, "in 2024 I'LL") == original.encode("in 2024 I'LL", add_special_tokens=False).ids
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (original.get_vocab_size(), None, None)


def test_bos_and_eos_and_whether_the_template_adds_them(tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    loaded = load_tokenizer(write(tmp_path, copy("llama2"), tokenizer_config=config))
    assert (loaded.bos_id, loaded.eos_id, loaded.adds_bos, loaded.adds_eos) == (1, 2, True, True)
    assert not {1, 2} & set(ids(loaded, WORDS))
    llama3 = TextTokenizer(PROVEN["llama3"](), bos_id=0)
    assert (llama3.adds_bos, llama3.adds_eos) == (True, False)
    neox = TextTokenizer(PROVEN["neox"](), bos_id=0, eos_id=0)
    assert (neox.adds_bos, neox.adds_eos) == (False, False)


def test_truncation_and_padding_in_the_file_are_not_applied(tmp_path: Path) -> None:
    original = copy("bert")
    expected = original.encode(WORDS, add_special_tokens=False).ids
    original.enable_truncation(5)
    original.enable_padding(length=10_000)
    loaded = load_tokenizer(write(tmp_path, original))
    assert ids(loaded, WORDS) == expected
    assert original.truncation is not None


def test_special_tokens_in_a_text_are_text_unless_they_are_to_be_parsed(tmp_path: Path) -> None:
    path = write(tmp_path, copy("neox"), tokenizer_config={"eos_token": "<|end|>"})
    loaded, parsing = load_tokenizer(path), load_tokenizer(path, parse_special=True)
    assert loaded.eos_id == parsing.eos_id == 0
    assert 0 not in ids(loaded, "a<|end|>b")
    assert ids(parsing, "a<|end|>b")[1] == 0
    space_run = PROVEN["neox"]().token_to_id("    ")
    assert ids(loaded, "a    b") == [*ids(loaded, "a"), space_run, *ids(loaded, "b")]


def test_vocabulary_and_merges_without_a_tokenizer_file_are_converted(tmp_path: Path) -> None:
    original = copy("gpt2")
    write(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"}, config={"model_type": "gpt2"})
    original.model.save(str(tmp_path))
    assert ids(load_tokenizer(str(tmp_path)), WORDS) == original.encode(WORDS, add_special_tokens=False).ids


def sentencepiece(folder: Path, rule: str = "identity") -> sentencepiece_library.SentencePieceProcessor:
    """tokenizer.model of a BPE made the way that Llama's and Mistral's is: texts as they are, unknown characters as bytes."""
    (folder / "corpus").write_text("\n".join(LINES * 20), "utf-8")
    sentencepiece_library.SentencePieceTrainer.train(
        input=str(folder / "corpus"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        normalization_rule_name=rule,
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        minloglevel=2,
    )
    return sentencepiece_library.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def test_a_sentencepiece_model_gives_its_own_ids(tmp_path: Path) -> None:
    original = sentencepiece(tmp_path)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": False}
    loaded = load_tokenizer(write(tmp_path, config=MAMBA2, tokenizer_config=config))
    assert (loaded.bos_id, loaded.eos_id) == (1, 2)
    # Not texts that begin with a space: transformers' class puts no second one before them, as SentencePiece does.
    for text in ("It is a truth  universally\n\nacknowledged", "a é字"):
        assert ids(loaded, text) == original.encode(text)


def test_joins_are_those_of_the_scores_and_not_of_the_ids(tmp_path: Path) -> None:
    """As in Mistral v3's file, whose runs of spaces come first and have the lowest score; transformers joins them first."""
    sentencepiece(tmp_path)
    file = tmp_path / "tokenizer.model"
    original = sentencepiece_library.SentencePieceProcessor(model_file=str(file))
    content = file.read_bytes()
    for id in range(3 + 256, original.vocab_size(), 2):
        piece = original.id_to_piece(id).encode()
        field = b"\n" + bytes([len(piece)]) + piece + b"\x15"  # of the file's protocol buffer: a piece, and behind it its score
        before, after = content.split(field)
        content = before + field + struct.pack("<f", -1e9) + after[4:]
    file.write_bytes(content)
    changed = sentencepiece_library.SentencePieceProcessor(model_file=str(file))
    path = write(tmp_path, config=MAMBA2, tokenizer_config={"tokenizer_class": "LlamaTokenizer", "legacy": False})
    text = " ".join(LINES)
    assert ids(load_tokenizer(path), text) == changed.encode(text) != original.encode(text)
    transformers_own = AutoTokenizer.from_pretrained(path).backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert transformers_own != changed.encode(text), "or there is nothing to put in order any more"


def test_a_sentencepiece_model_whose_normalizer_is_lost_is_refused(tmp_path: Path) -> None:
    sentencepiece(tmp_path, "nmt_nfkc")
    path = write(tmp_path, config=MAMBA2, tokenizer_config={"tokenizer_class": "LlamaTokenizer", "legacy": False})
    with pytest.raises(ModelError, match=r"tokenizer.model: expected a SentencePiece model that transformers converts without a change"):
        load_tokenizer(path)


@pytest.mark.parametrize("name", ["tokenizer.model.v3", "tekken.json"])
def test_files_of_mistral_common_are_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=rf"expected a tokenizer.json, found {name}, which mistral-common reads.*Put the tokenizer.json"):
        load_tokenizer(write(tmp_path, config=MAMBA2))
    assert load_tokenizer(write(tmp_path, copy("mistral_v3"))).vocab_size > 256, "beside a tokenizer.json they do no harm"


def test_a_sentencepiece_model_of_no_class_is_refused(tmp_path: Path) -> None:
    """By the model's type it would get GPT-NeoX's class, and an end-of-text token that it does not have."""
    sentencepiece(tmp_path)
    with pytest.raises(ModelError, match=r"whose tokenizer_class says what tokenizer\.model is for"):
        load_tokenizer(write(tmp_path, config=MAMBA2))


@pytest.mark.parametrize(
    ("name", "special"),
    [
        ("neox", "<|end|>"),
        ("llama2", "</s>"),
        ("llama3", "<|begin_of_text|>"),
        ("mistral_v3", "[INST]"),
        ("qwen", "<|im_start|>"),
        ("o200k", "<|x|>"),
    ],
)
def test_special_tokens_of_every_family_are_text_unless_parsed(name: str, special: str, tmp_path: Path) -> None:
    backend = copy(name)
    if backend.token_to_id(special) is None:
        backend.add_special_tokens([special])
    path, own = write(tmp_path, backend), backend.token_to_id(special)
    loaded, parsing = load_tokenizer(path), load_tokenizer(path, parse_special=True)
    assert own not in ids(loaded, f"a{special}b")
    assert ids(parsing, f"a{special}b").count(own) == 1
    assert loaded.parse_special < parsing.parse_special


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "expected a tokenizer"),
        ({"config": MAMBA2}, "found no vocabulary"),
        ({"config": {"model_type": "canine"}, "tokenizer_config": {"tokenizer_class": "CanineTokenizer"}}, "expected a fast tokenizer"),
        ({"tokenizer": {"version": "1.0"}}, "could not load it"),
        ({"tokenizer": [1, 2]}, "could not load it"),
    ],
    ids=["empty", "model_alone", "slow_only", "damaged", "no_tokenizer"],
)
def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        load_tokenizer(write(tmp_path, **files))
    assert str(tmp_path) in str(raised.value)
    assert "set model.tokenizer to" in str(raised.value)


def test_code_that_comes_with_a_tokenizer_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "custom.py").write_text("import pathlib\npathlib.Path(__file__ + '.ran').touch()\nclass Custom: pass\n", "utf-8")
    config = {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": ["custom.Custom", "custom.Custom"]}}
    with pytest.raises(ModelError, match="could not load it"):
        load_tokenizer(write(tmp_path, tokenizer_config=config, config=MAMBA2))
    loaded = load_tokenizer(write(tmp_path, copy("gpt2"), tokenizer_config=config))
    assert ids(loaded, "a b")
    assert not list(tmp_path.rglob("*.ran"))


@pytest.mark.parametrize("path", ["no such folder", "a//b", "/no/such/folder", ""])
def test_a_path_that_is_no_folder_is_refused(path: str) -> None:
    with pytest.raises(ModelError, match="expected a folder, found none"):
        load_tokenizer(path)


def test_parts_in_python_are_refused() -> None:
    class Upper:
        def normalize(self, normalized: NormalizedString) -> None:
            normalized.uppercase()

    backend = copy("gpt2")
    backend.normalizer = normalizers.Normalizer.custom(Upper())
    with pytest.raises(ModelError, match="parts written in Python are not supported"):
        TextTokenizer(backend)


def test_random_merges_are_not_cut() -> None:
    model = models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")], dropout=0.5)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert "at random" in str(TextTokenizer(backend).cuts.reason)


def test_the_fingerprint_is_of_what_decides_the_ids() -> None:
    fingerprint = TextTokenizer(copy("neox")).fingerprint
    same = copy("neox")
    same.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    same.enable_truncation(7)
    assert TextTokenizer(same, bos_id=0).fingerprint == fingerprint
    normalized, added, split = copy("neox"), copy("neox"), copy("neox")
    normalized.normalizer = normalizers.NFKC()
    added.add_tokens([AddedToken("new")])
    split.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    others = {TextTokenizer(other).fingerprint for other in (normalized, added, split, copy("gpt2"))}
    assert len(others | {fingerprint}) == 5


def test_a_tokenizer_that_does_not_fit_the_model_is_refused_with_both_sizes() -> None:
    backend = copy("gpt2")
    size = backend.get_vocab_size()
    fits = TextTokenizer(backend, eos_id=0)
    check_fits(fits, size)
    check_fits(fits, size + 28)
    with pytest.raises(ModelError, match=rf"expected ids below {size - 1}, .* a tokenizer of {size} entries with ids up to {size - 1}"):
        check_fits(fits, size - 1)


def test_a_special_token_that_no_text_is_given_need_not_fit() -> None:
    backend = copy("gpt2")
    size = backend.get_vocab_size()
    backend.add_special_tokens(["[PAD]"])
    check_fits(TextTokenizer(backend), size)
    for beyond in (TextTokenizer(backend, eos_id=size), TextTokenizer(backend, parse_special=True)):
        with pytest.raises(ModelError, match=f"expected ids below {size}, .* ids up to {size}"):
            check_fits(beyond, size)
    backend.add_tokens(["[WORD]"])
    with pytest.raises(ModelError, match=f"ids up to {size + 1}"):
        check_fits(TextTokenizer(backend), size)

"""A tokenizer from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longscan.pipeline.errors import ModelError
from longscan.pipeline.tokenize.sentencepieces import by_score
from longscan.pipeline.tokenize.tokenizer import TextTokenizer

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
MISTRALS = ("tokenizer.model.v*", "tekken*.json")
"""Of mistral-common, beside the tokenizer.json of a Hugging Face repository."""
WANTED = "set model.tokenizer to the folder or hub id of the tokenizer that the model was trained with"


def load_tokenizer(path: str, *, parse_special: bool = False) -> TextTokenizer:
    """The fast tokenizer of a folder; no code that comes with it is ever run.

    Where there is a tokenizer.json, it alone decides the ids. AutoTokenizer is not asked then: by the model's type it may
    take a class of its own that keeps the file's vocabulary and replaces the rest (a mamba2 folder gets GPT-NeoX's
    splitting and its two special tokens, whatever the file says). Other files (vocab.json and merges.txt,
    tokenizer.model) are converted by AutoTokenizer, whose joins of SentencePiece's pieces are put in SentencePiece's order.

    Raises ModelError where there is no tokenizer, or none that the `tokenizers` library can run.
    """
    source = f"tokenizer {path!r}"
    if not path or not Path(path).is_dir():
        raise ModelError(f"{source}: expected a folder, found none; {WANTED}")
    files = {name: (Path(path) / name).is_file() for name in (TOKENIZER_FILE, SENTENCEPIECE_FILE, "vocab.json")}
    mistrals = sorted(file.name for pattern in MISTRALS for file in Path(path).glob(pattern))
    if mistrals and not any(files.values()):
        raise ModelError(
            f"{source}: expected a {TOKENIZER_FILE}, found {', '.join(mistrals)}, which mistral-common reads and longscan does not. "
            f"Put the {TOKENIZER_FILE} and tokenizer_config.json of the model's Hugging Face repository there, or {WANTED}"
        )
    converts = files[SENTENCEPIECE_FILE] and not files[TOKENIZER_FILE]
    if converts and not _names_class(Path(path)):
        raise ModelError(
            f"{source}: expected a {TOKENIZER_FILE}, or a tokenizer_config.json whose tokenizer_class says what {SENTENCEPIECE_FILE} "
            f"is for; without, its special tokens are guessed. Convert it, or {WANTED}"
        )
    try:
        loaded = _load(path)
    except Exception as error:  # a damaged file makes transformers raise anything from KeyError to bare Exception
        raise ModelError(f"{source}: expected a tokenizer, could not load it: {_first_line(error)}; {WANTED}") from error
    if not getattr(loaded, "is_fast", False):
        raise ModelError(
            f"{source}: expected a fast tokenizer (a {TOKENIZER_FILE}, or files that convert to one), found "
            f"{type(loaded).__name__}, which runs in Python only; {WANTED}"
        )
    backend = loaded.backend_tokenizer
    if not set(backend.get_vocab(with_added_tokens=True)) - set(loaded.all_special_tokens):
        raise ModelError(
            f"{source}: expected a tokenizer ({TOKENIZER_FILE}, vocab.json and merges.txt, or tokenizer.model), found no "
            f"vocabulary; {WANTED}"
        )
    if converts:
        backend = by_score(backend, Path(path) / SENTENCEPIECE_FILE)
    return TextTokenizer(backend, bos_id=loaded.bos_token_id, eos_id=loaded.eos_token_id, parse_special=parse_special)


def _load(path: str) -> Any:
    # Imported here because it takes seconds and brings torch along; tokenizing needs neither.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast if (Path(path) / TOKENIZER_FILE).is_file() else AutoTokenizer
    return kind.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def _names_class(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_bytes()).get("tokenizer_class"))
    except (OSError, ValueError, AttributeError):
        return False


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

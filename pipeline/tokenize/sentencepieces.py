"""A tokenizer that transformers made of a SentencePiece model, held against SentencePiece itself.

SentencePiece joins the two pieces whose union has the highest score. transformers writes the joins down in the order of the
pieces' ids, which is another one where a vocabulary has pieces in front that nobody gave a score: Mistral v3's runs of spaces
come first then, and every text with two spaces in a row gets other ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longscan.pipeline.errors import ModelError
from tokenizers import Tokenizer

PROBES = (
    *("It is a truth  universally\n\nacknowledged,\tthat", "x   y    z\n x  é", "1234.5 a_b __init__(self)  # no"),
    *("ﬁne ｆｕｌｌ ② e\u0301", "Привет, мир  你好，世界。한국어", "😀 👩\u200d👩\u200d👧 🇫🇷\u3000\xa0end "),
    "</s> [INST] <0x41> ▁▁ a▁b",
)
"""Texts that tell conversions apart. None begins with a space: transformers puts no second one before it, as SentencePiece does."""


def by_score(backend: Tokenizer, file: Path) -> Tokenizer:
    """`backend` with the joins of a BPE in the order of the scores in `file`, the SentencePiece model that it was made of.

    A backend with other ids than the file's is returned as it is. Raises ModelError where the ids of PROBES are not SentencePiece's.
    """
    from sentencepiece import SentencePieceProcessor  # imported here because few tokenizers need it

    original = SentencePieceProcessor(model_file=str(file))
    size = original.vocab_size()
    if any(backend.id_to_token(id) != original.id_to_piece(id) for id in range(size)):
        return backend
    content: dict[str, Any] = json.loads(backend.to_str())
    if content["model"]["type"] == "BPE":
        scores = {original.id_to_piece(id): original.get_score(id) for id in range(size)}
        content["model"]["merges"].sort(key=lambda pair: -scores["".join(pair)])
        backend = Tokenizer.from_str(json.dumps(content))
    _check(backend, original, file)
    return backend


def _check(backend: Tokenizer, original: Any, file: Path) -> None:
    plain = Tokenizer.from_str(backend.to_str())
    plain.encode_special_tokens = True
    for text in PROBES:
        found, expected = plain.encode(text, add_special_tokens=False).ids, original.encode(text)
        if found != expected:
            raise ModelError(
                f"{file}: expected a SentencePiece model that transformers converts without a change, found ids {found} of {text!r}, "
                f"for which SentencePiece has {expected}. Put the model's own tokenizer.json beside it"
            )

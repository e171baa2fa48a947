"""Documents -> token streams, exact for a text of any length, in memory bounded by pieces, in parallel.

    load.py             a folder or hub id -> TextTokenizer
    tokenizer.py        TextTokenizer: ids of text alone, and what is known of the tokenizer
    documents.py        DocumentTokenizer: the verb; several callers at once, in order, a little ahead
    texts.py            one text -> blocks, cut into pieces where it is safe
    blocks.py           short texts, token ids, the EOS token
    prompt.py           a prompt before every text
    cuts.py             where a text can be cut, and the proof: read this first
    normalizers.py, pretokenizers.py, patterns.py    the proof, stage by stage
    regex.py, characters.py    what it stands on

The ids of a document are those of the tokenizer on the whole text, without special tokens added. Where no cut of a
tokenizer can be proven, its texts are tokenized whole, and the log says so and why.
"""

from __future__ import annotations

from longscan.pipeline.tokenize.documents import DocumentTokenizer
from longscan.pipeline.tokenize.load import load_tokenizer
from longscan.pipeline.tokenize.prompt import Prompt, make_prompt
from longscan.pipeline.tokenize.tokenizer import TextTokenizer, check_fits

__all__ = ["DocumentTokenizer", "Prompt", "TextTokenizer", "check_fits", "load_tokenizer", "make_prompt"]

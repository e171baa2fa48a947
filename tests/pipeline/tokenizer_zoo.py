"""Tokenizers of every family, trained or built on the spot, and texts that are hard to cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = (
    "the cat didn't sit; I'll say they've 1,234.56 reasons -- she'd HELP us. low lower lowest newer wider "
    "l'été à Noël, cœur naïf; Straße, Ünïcödé; Привет мир, привет; 你好，世界。今天天气很好！东京タワーへ行く。 한국어 문장 "
    "fn main() { let x = vec![1, 2, 3]; }  // comment\n\tif (x == 0)  return;\r\n\r\n<b>bold</b> http://a.b/c?d=e&f=g "
    "😀 👩‍👩‍👧 🇫🇷 e\u0301 a\u0308\u0323 นี่คือ हिन्दी "
)
CORPUS = [WORDS, WORDS.upper(), "   ".join(WORDS.split(" ")), WORDS.replace(" ", "\n"), "aaaa abab ababab aab " * 4, "▁a▁▁b __ "] * 3

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
POSSESSIVE = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
DEEPSEEK = (r"[\r\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+")

FRAGMENTS = (
    *("a", "b", "ab", "the", "low", "I", "didn't", "I'll", "'s", "'S", "s", "t", "'", "’", "it's", "K", "ſ", "ß", "İ", "ﬁ", "²", "½", "Ⅷ"),
    *(" ", "  ", "   ", "     ", "\t", "\n", "\n\n", "\r\n", "\r", " \n ", "\n  ", "\xa0", "\u3000", "\u2003", "\u2028", "\x0b", "\x0c"),
    *("1", "12", "2024", "3.14", "٣", "१", ".", ",", ", ", ". ", "!", "...", "--", "_", "__", "$", "+", "<", "=", "/", "//", "(", "“", "”"),
    *("你", "好", "世界", "，", "。", "「", "タ", "か", "が", "か\u3099", "ﾊﾟ", "한", "한국", "\u1112\u1161", "\u11ab", "각\u11a8"),
    *("é", "e\u0301", "\u0301", "\u0323", "a\u0308\u0323", "<\u0338", "Å", "\u212b", "है", "नि", "ก็", "ﷺ", "\u0600", "\u0e33"),
    *("😀", "👩‍👩‍👧", "🇫🇷", "\u200b", "\u200d", "\u200c", "\ufeff", "\u00ad", "\ufffd", "\x00", "\x1c", "\x85", "\u180e", "𝒳"),
    *("𠀀", "Ა", "\ue000"),
    *("▁", "▁▁", " ▁", "<s>", "</s>", "<unk>", "<|end|>", "<|en", "[MASK]", "[MA", "[INST]", "<0x41>", "Foo", "foo", "fOo", "wörd"),
    *("##a", "<tag>", " <tag> "),
)

texts = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.characters(exclude_categories=["Cs"])), max_size=10).map("".join),
)


def _bpe(tokenizer: Tokenizer, *special: str, alphabet: bool, size: int = 500, unk: str | None = None) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*special, *([unk] if unk else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [],
        show_progress=False,
        max_token_length=12,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    _bpe(tokenizer, "<|end|>", alphabet=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def _split(*patterns: str, ignore_merges: bool = False, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = _byte_level(pre_tokenizers.Sequence([*splits, byte_level]), normalizer)
    if ignore_merges:
        model = tokenizer.model
        model.ignore_merges = True
        tokenizer.model = model
    return tokenizer


def gpt2() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def gpt2_with_prefix() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))


def neox() -> Tokenizer:
    tokenizer = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC())
    tokenizer.add_tokens([AddedToken(" " * n, normalized=True) for n in range(2, 12)])
    return tokenizer


def llama3() -> Tokenizer:
    tokenizer = _split(LLAMA3, ignore_merges=True)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    return tokenizer


def qwen() -> Tokenizer:
    return _split(LLAMA3.replace("{1,3}", ""), normalizer=normalizers.NFC())


def o200k() -> Tokenizer:
    return _split(O200K)


def possessive() -> Tokenizer:
    return _split(POSSESSIVE)


def deepseek() -> Tokenizer:
    tokenizer = _split(*DEEPSEEK)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in DEEPSEEK]
    last = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, *last])
    return tokenizer


def added_tokens() -> Tokenizer:
    """Added tokens with every flag, raw and normalized, beside a special one that begins like another."""
    lower = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    tokenizer = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), lower)
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>", lstrip=True, rstrip=True), AddedToken("s>a")])
    tokenizer.add_tokens([AddedToken("Foo", normalized=True), AddedToken("low", single_word=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<tag>", lstrip=True, normalized=False), AddedToken("[MASK]", rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(". t", normalized=True), AddedToken("wörd", normalized=True, single_word=True)])
    return tokenizer


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=9))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def _sentencepiece(tokenizer: Tokenizer, *, byte_fallback: bool, controls: Sequence[str] = ()) -> Tokenizer:
    """A BPE like those of SentencePiece, trained with words split at spaces, run without."""
    normalizer, pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    extra = [*controls, *(f"<0x{byte:02X}>" for byte in range(256))] if byte_fallback else []
    _bpe(tokenizer, "<unk>", "<s>", "</s>", *extra, alphabet=False, size=600 if byte_fallback else 340)
    model = tokenizer.model
    model.unk_token, model.fuse_unk, model.byte_fallback = "<unk>", True, byte_fallback
    tokenizer.model = model
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def _prepend_and_replace() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def llama2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = _prepend_and_replace()
    _sentencepiece(tokenizer, byte_fallback=True)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return tokenizer


def llama2_with_unknowns() -> Tokenizer:
    """Unknown characters are fused."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = _prepend_and_replace()
    return _sentencepiece(tokenizer, byte_fallback=False)


def metaspace_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _sentencepiece(tokenizer, byte_fallback=True)


def mistral_v3() -> Tokenizer:
    """Control tokens, which are special, at the vocabulary's front, then bytes, then pieces; no normalizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    controls = ("[INST]", "[/INST]", "[TOOL_CALLS]", *(f"[control_{n}]" for n in range(8, 12)))
    tokenizer = _sentencepiece(tokenizer, byte_fallback=True, controls=controls)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *controls])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def gemma() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return _sentencepiece(tokenizer, byte_fallback=True)


def composing() -> Tokenizer:
    """Compositions decide what the model may join."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    return _sentencepiece(tokenizer, byte_fallback=True)


def _unigram(pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.UnigramTrainer(vocab_size=280, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram_first() -> Tokenizer:
    return _unigram(pre_tokenizers.Metaspace(prepend_scheme="first"))


def unigram_always() -> Tokenizer:
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")])
    return _unigram(words, normalizers.NFKC())


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFKD()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()])
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["<unk>", "[MASK]"], show_progress=False))
    return tokenizer


def punctuation() -> Tokenizer:
    """Punctuation joins what is before it, digits are runs, and `_` ends a word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    steps = [pre_tokenizers.Punctuation("merged_with_previous"), pre_tokenizers.Digits(), pre_tokenizers.CharDelimiterSplit("_")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return _bpe(tokenizer, alphabet=False, size=300, unk="<unk>")


def unigram_whole() -> Tokenizer:
    """Nothing separates words before the model sees them."""
    return _unigram(pre_tokenizers.Metaspace(split=False))


def stripping() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Strip())


PROVEN: dict[str, Callable[[], Tokenizer]] = {
    build.__name__: cache(build)
    for build in (
        gpt2,
        gpt2_with_prefix,
        neox,
        llama3,
        qwen,
        o200k,
        possessive,
        deepseek,
        added_tokens,
        bert,
        llama2,
        llama2_with_unknowns,
        metaspace_bpe,
        mistral_v3,
        gemma,
        composing,
        unigram_first,
        unigram_always,
        word_level,
        punctuation,
    )
}
UNPROVEN: dict[str, Callable[[], Tokenizer]] = {build.__name__: cache(build) for build in (unigram_whole, stripping)}

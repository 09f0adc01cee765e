"""The tokenizer that a GGUF file describes: its vocabulary is there, how text is cut before it is only named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jitney.errors import ModelError

Fields = Mapping[str, Any]
"""Metadata of the file by key."""

_CONTROL, _USER_DEFINED = 3, 4
_DIGIT_BY_DIGIT: Final = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_GPT2: Final = ("gpt-2", "olmo")
_WHOLE_WORDS_FIRST: Final = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
"""A word that is a token is that token, whatever the merges say."""

_ADDS_BOS: Final = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral")
_COMPOSED: Final = ("qwen2",)
"""Text is brought into the Unicode form NFC first."""


def tokenizer_of(fields: Fields) -> Tokenizer:
    """Raises ModelError for a kind that is not known, and KeyError for a field that is missing."""
    kind = fields["tokenizer.ggml.model"]
    if kind == "gpt2":
        tokenizer = _byte_level(fields)
    elif kind == "llama":
        tokenizer = _sentencepiece(fields)
    else:
        raise ModelError(f"tokenizer {kind!r} cannot be converted from GGUF; gpt2 and llama can")
    tokenizer.add_special_tokens(_added(fields, _CONTROL))
    tokenizer.add_tokens(_added(fields, _USER_DEFINED))
    _add_ends(tokenizer, fields)
    return tokenizer


def tokenizer_config(fields: Fields, *, max_model_len: int) -> dict[str, Any]:
    """Content of `tokenizer_config.json`."""
    tokens = fields["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    named = {name: fields.get(f"tokenizer.ggml.{short}_token_id") for name, short in keys.items()}
    template = fields.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[number] for name, number in named.items() if number is not None},
        "add_bos_token": _adds_bos(fields),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
        **({} if template is None else {"chat_template": template}),
    }


def _added(fields: Fields, wanted: int) -> list[AddedToken]:
    """The tokens of a kind, which are found in a text before anything else is."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type", ())
    found = [token for token, kind in zip(tokens, kinds, strict=False) if kind == wanted]
    return [AddedToken(token, special=wanted == _CONTROL, normalized=False) for token in found]


def _byte_level(fields: Fields) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre", "default")
    vocab = {token: number for number, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    tokenizer.pre_tokenizer = _cut(pre)
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _cut(pre: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging, by the name that llama.cpp has for it."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _GPT2:
        return words
    if pre in _DIGIT_BY_DIGIT:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if pre not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ModelError(f"tokenizer 'gpt2' with pre-tokeniser {pre!r} cannot be converted from GGUF")
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(fields: Fields) -> Tokenizer:
    """BPE over a vocabulary with scores: the merges follow from both."""
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    tokens = fields["tokenizer.ggml.tokens"]
    vocab = {token: number for number, token in enumerate(tokens)}
    scores = dict(zip(tokens, fields["tokenizer.ggml.scores"], strict=True))
    names = {"unk_token": ("unknown", 0), "bos_token": ("bos", 1), "eos_token": ("eos", 2)}
    special = {
        name: tokens[fields.get(f"tokenizer.ggml.{short}_token_id", usual)] for name, (short, usual) in names.items()
    }
    made: Any = LlamaTokenizer(
        vocab=vocab,
        merges=generate_merges(vocab, scores),
        add_prefix_space=bool(fields.get("tokenizer.ggml.add_space_prefix", True)),
        **special,
    )
    backend: Tokenizer = made.backend_tokenizer
    return backend


def _adds_bos(fields: Fields) -> bool:
    usual = fields["tokenizer.ggml.model"] == "llama" or fields.get("tokenizer.ggml.pre") in _ADDS_BOS
    return bool(fields.get("tokenizer.ggml.add_bos_token", usual))


def _add_ends(tokenizer: Tokenizer, fields: Fields) -> None:
    """What is put before and behind a prompt."""
    tokens = fields["tokenizer.ggml.tokens"]
    first = fields.get("tokenizer.ggml.bos_token_id") if _adds_bos(fields) else None
    last = fields.get("tokenizer.ggml.eos_token_id") if fields.get("tokenizer.ggml.add_eos_token") else None
    if first is None and last is None:
        return
    pieces = [tokens[first] if first is not None else None, "$A", tokens[last] if last is not None else None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[piece for piece in pieces if piece is not None],
        special_tokens=[(tokens[number], number) for number in (first, last) if number is not None],
    )

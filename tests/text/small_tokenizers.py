"""Small real tokenizers of every kind that the text room knows, trained here and written as checkpoints are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = """\
 alpha beta gamma delta: the quick brown fox jumps over the lazy dog, and the dog does not mind at all.
She sells sea shells by the sea shore. Once upon a time there was a small town by the sea.
def add(a, b): return a + b    # four spaces    before this
{"name": "value", "list": [1, 2, 3]} <b>bold</b> > quoted | a | table |
Où est la gare ? Grüße aus Köln. Привет, мир.
""".splitlines()

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|function_call|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "<|fim_prefix|>", "covid19", "\n\n")
"""Added tokens that are not flagged as special: two kinds of marker, an ordinary word, and white space."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SPM_CONTROL = ("<unk>", "<s>", "</s>")


def byte_bpe(directory: Path, *, bos: bool = False, template: str | None = CHATML) -> Path:
    """Byte-level BPE: ids 0 to 3 are `CONTROL`, the last ones are `MARKERS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    if bos:
        bos_only = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
        tokenizer.post_processor = bos_only
    # tokenizer.json decides; this field is for tokenizers that have none.
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "add_bos_token": not bos}
    return write(directory, tokenizer, config, template)


def spm_bpe(directory: Path, *, strip: bool = True, template: str | None = None) -> Path:
    """Metaspace BPE with byte fallback, as Llama 2 and Mistral have it: a BOS, and a ▁ put before every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=[*SPM_CONTROL, *BYTE_TOKENS], show_progress=False, limit_alphabet=60
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

    def with_fallback(spec: dict[str, Any]) -> None:
        # A trainer knows bytes only as special tokens; in a converted checkpoint they are plain vocabulary.
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in BYTE_TOKENS]
        spec["model"]["byte_fallback"] = True

    return write(directory, tokenizer, config, template, with_fallback)


def unigram(directory: Path, *, scheme: str = "always", template: str | None = None) -> Path:
    """Unigram with a Metaspace decoder and no byte fallback. Its `</s>` is a piece that plain text could reach."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=list(SPM_CONTROL), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return write(directory, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, template)


def unigram_bytes(directory: Path) -> Path:
    """Unigram with byte fallback and no BOS: what a sentencepiece model of that kind is converted to."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=list(SPM_CONTROL), unk_token="<unk>")
    trainer.show_progress = False
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )

    def with_fallback(spec: dict[str, Any]) -> None:
        spec["model"]["vocab"] += [[token, -20.0] for token in BYTE_TOKENS]
        spec["model"]["byte_fallback"] = True

    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return write(directory, tokenizer, config, None, with_fallback)


def of_words(directory: Path, words: list[str], decoder: dict[str, Any] | None) -> Path:
    """A tokenizer whose ids are these words, from 0 on, with that decoder; nothing in it is special."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return write(directory, tokenizer, {}, None, lambda spec: spec.update(decoder=decoder))


def by_hand(directory: Path, pieces: list[str], *, scheme: str) -> Path:
    """A metaspace tokenizer of exactly these pieces: ids 0 and 1 are <unk> and </s>, theirs follow."""
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in ("<unk>", "</s>", *pieces)], unk_id=0))
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return write(directory, tokenizer, {"eos_token": "</s>", "unk_token": "<unk>"}, None)


def wordpiece(directory: Path) -> Path:
    """A decoder that is neither of the two kinds of language models."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return write(directory, tokenizer, {"eos_token": "[SEP]", "unk_token": "[UNK]"}, None)


def fused_bytes(directory: Path) -> Path:
    """Bytes again, behind a decoder of two steps."""
    byte_bpe(directory)
    tokenizer = original(directory)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def write(
    directory: Path, tokenizer: Tokenizer, config: dict[str, Any], template: str | None, change: Any = None
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    spec = json.loads(tokenizer.to_str())
    if change is not None:
        change(spec)
    (directory / "tokenizer.json").write_text(json.dumps(spec), "utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, "utf-8")
    return directory


def original(directory: Path) -> Tokenizer:
    """The plain `tokenizers` object of a checkpoint, to compare with."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))

"""Workers with tokenizers of several kinds: those of the text room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.text import small_tokenizers as small

from jitney_worker.text.tokenizer import Tokenizer

FAMILY = "👨‍👩‍👧‍👦"
KINDS: dict[str, Callable[[Path], Path]] = {
    "byte-level": lambda directory: small.byte_bpe(directory),
    "byte-level with bos": lambda directory: small.byte_bpe(directory, bos=True),
    "metaspace": lambda directory: small.spm_bpe(directory, template=small.CHATML),
    "metaspace by hand": lambda directory: small.by_hand(directory, ["▁", "▁leading", "▁x"], scheme="always"),
    "metaspace by hand, all spaces kept": lambda directory: small.by_hand(
        directory, ["▁", "▁leading", "▁x"], scheme="never"
    ),
    "no template": lambda directory: small.byte_bpe(directory, template=None),
}
BYTES = ("byte-level", "metaspace")


def with_tokenizer(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("tokenizer", kinds, indirect=True)


def byte_ids(tokenizer: Tokenizer, content: str | bytes) -> list[int]:
    """One token for each byte."""
    ids: dict[bytes, int] = {}
    for number in range(tokenizer.vocab_size):
        ids.setdefault(tokenizer.pieces.bytes_of(number), number)
    return [ids[bytes([byte])] for byte in (content.encode() if isinstance(content, str) else content)]

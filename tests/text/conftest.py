"""Tokenizers for the text tests: small ones trained on the spot, and the demo model's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import small_tokenizers as small

from jitney_worker.text.tokenizer import Tokenizer

BUILDERS: dict[str, Callable[[Path], Path]] = {
    "byte-bpe": small.byte_bpe,
    "byte-bpe-bos": lambda directory: small.byte_bpe(directory, bos=True),
    "spm-bpe": small.spm_bpe,
    "spm-bpe-keep": lambda directory: small.spm_bpe(directory, strip=False),
    "unigram": small.unigram,
    "unigram-first": lambda directory: small.unigram(directory, scheme="first"),
    "unigram-never": lambda directory: small.unigram(directory, scheme="never"),
    "unigram-bytes": small.unigram_bytes,
    "wordpiece": small.wordpiece,
    "fused-bytes": small.fused_bytes,
}
Build = Callable[[str], Path]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`build("spm-bpe")`: the directory of that tokenizer, made once for the whole run."""

    @cache
    def made(kind: str) -> Path:
        return smollm2() if kind == "smollm2" else BUILDERS[kind](tmp_path_factory.mktemp(kind))

    return made


@pytest.fixture(scope="session")
def load(build: Build) -> Callable[[str], Tokenizer]:
    """`load("spm-bpe")`: that tokenizer, loaded once for the whole run."""
    return cache(lambda kind: Tokenizer.load(build(kind)))


@pytest.fixture(scope="session")
def byte_bpe(load: Callable[[str], Tokenizer]) -> Tokenizer:
    return load("byte-bpe")


def smollm2() -> Path:
    """The demo model's directory; fetched once if this machine does not have it."""
    from jitney_worker.model.resolve import resolve

    return resolve("smollm2-135m-instruct")

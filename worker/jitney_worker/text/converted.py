"""A tokenizer.json for checkpoints that have none: transformers makes it of the files that they have instead."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from jitney.errors import ModelError, first_line

SENTENCEPIECE: Final = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model")
OLDER: Final = (*SENTENCEPIECE, "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")
"""Any one of these is a vocabulary; further files belong to some of them (merges.txt to vocab.json)."""


def has_older_files(directory: Path) -> bool:
    return any((directory / name).is_file() for name in OLDER)


def converted(directory: Path) -> bytes:
    """What its tokenizer.json would say. Nothing is written, and the same files always give the same bytes.

    It takes seconds, because transformers is imported; so a model that is started often is better saved once with
    its tokenizer.json. No code of the checkpoint is run. Raises ModelError that says why it cannot be done.
    """
    if (directory / SENTENCEPIECE[0]).is_file() and find_spec("sentencepiece") is None:
        raise ModelError(
            f"{directory} has no tokenizer.json, and its tokenizer.model can be converted only if sentencepiece and "
            "protobuf are installed: install them, or save the tokenizer elsewhere with its tokenizer.json"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        return bytes(tokenizer.backend_tokenizer.to_str().encode())
    except Exception as error:  # whatever transformers and the libraries behind it raise
        raise ModelError(
            f"{directory} has no tokenizer.json, and none can be made of its other files: {first_line(error)[:300]}"
        ) from error

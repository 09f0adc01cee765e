"""The calls of an answer: as its text gives them away, piece by piece, and as a whole."""

from __future__ import annotations

import hashlib
import string
from dataclasses import dataclass
from typing import Final

_DIGITS: Final = string.digits + string.ascii_letters
_ID_LENGTH: Final = 9
"""What the strictest of templates (Mistral's) takes for the id of a call: nine letters or digits."""


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call begins. index: dense from 0 within the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """The next piece of a call's arguments: JSON as the model wrote it."""

    index: int
    text: str


Piece = Said | Called | Argued


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as a whole. arguments: JSON as the model wrote it, which need not parse if it was free to write."""

    id: str
    name: str
    arguments: str


def call_id(job_id: str, choice: int, index: int) -> str:
    """The id of one call of one answer: the same for whoever reads it, whenever."""
    number = int.from_bytes(hashlib.sha256(f"{job_id}/{choice}/{index}".encode()).digest())
    digits = []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits)

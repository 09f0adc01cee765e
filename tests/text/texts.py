"""Byte sequences to decode: valid text of many scripts, and what is no text at all."""

from __future__ import annotations

import random

FAMILY = "👨‍👩‍👧‍👦"
VALID = (
    "the sea",
    " ",
    "\n\n",
    "a  b",
    "😀",
    "👍🏽",
    FAMILY,
    "🇫🇷🇯🇵",
    "❤️‍🔥",
    "안녕",
    "\u1112\u1161\u11ab",
    "cafe\u0301",
    "n\u0303\u0323",
    "שלום \u200fעולם",
    "مرحبا",
    "नमस्ते",
    "日本語",
    "\U00020bb7\U0010fffd",
    "\x00\x7f",
    "\ufffd",
    "▁",
)
INVALID = (
    b"\x80",
    b"\xff",
    b"\xc3",
    b"\xc0\xaf",
    b"\xe2\x82",
    b"\xed\xa0\x80",
    b"\xf0\x9f\x98",
    b"\xf0\x9f\x80\xf0",
    b"\xf4\x90\x80\x80",
    b"\xf8\x88\x80\x80\x80",
)


def byte_sequence(seed: int) -> bytes:
    """Up to about forty bytes: every third is valid text, every third broken, every third broken only by chance."""
    chance = random.Random(seed)
    valid = b"".join(chance.choice(VALID).encode() for _ in range(chance.randint(1, 5)))
    if seed % 3 == 0:
        return valid
    if seed % 3 == 1:
        cut = chance.randint(0, len(valid))
        return valid[:cut] + chance.choice(INVALID) * chance.randint(1, 3) + valid[cut:]
    return chance.randbytes(chance.randint(1, 12)) + valid[: chance.randint(0, len(valid))]


def is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def character_by_character(content: bytes) -> str:
    """Good characters, and one U+FFFD for each other byte: how a run of fallback bytes is shown."""
    text = ""
    while content:
        size = next((n for n in (1, 2, 3, 4) if is_text(content[:n]) and len(content[:n].decode()) == 1), 0)
        text += content[:size].decode() or "\ufffd"
        content = content[size or 1 :]
    return text

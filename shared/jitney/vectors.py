"""An embedding as it travels: float32, little-endian, in base64. OpenAI's `encoding_format` means the same by that."""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode


def pack_embedding(float32s: bytes) -> str:
    """float32s: the numbers one after the other, little-endian."""
    return b64encode(float32s).decode("ascii")


def unpack_embedding(packed: str) -> tuple[float, ...]:
    """The inverse, as numbers. Each float32 is a float of the same value. Raises ValueError for anything else."""
    float32s = b64decode(packed, validate=True)
    if len(float32s) % 4:
        raise ValueError(f"an embedding of {len(float32s)} bytes is no row of float32")
    return struct.unpack(f"<{len(float32s) // 4}f", float32s)

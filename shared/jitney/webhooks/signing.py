"""The signature of an announcement: Standard Webhooks 1.0, https://www.standardwebhooks.com/. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence


def headers(id: str, timestamp: int, body: bytes, keys: Sequence[bytes]) -> dict[str, str]:
    """What goes with `body`. id: the same at every attempt. timestamp: of this attempt, Unix seconds.

    One signature for each key, so that a receiver who knows any of them can verify it.
    """
    return {
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{_signature(f'{id}.{timestamp}.'.encode() + body, key)}" for key in keys),
    }


def _signature(signed: bytes, key: bytes) -> str:
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()

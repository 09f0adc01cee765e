"""The keys that open this API: those of its settings, and those in Redis, remembered for a few seconds."""

from __future__ import annotations

import asyncio
import hmac
from typing import Final

from jitney.apikeys import ApiKey, digest_of_secret, find_key
from jitney.connection import Redis
from jitney.redis_link import answering
from jitney.single_flight import SingleFlight

MAX_REMEMBERED: Final = 4_096


class Keyring:
    """Finds the key behind a secret. Only keys that Redis knows are remembered, never that one is unknown.

    keep_s: how long a key of Redis is believed without asking again; so long a revoked one may still work.
    """

    def __init__(self, own: tuple[ApiKey, ...], redis: Redis, *, keep_s: float) -> None:
        self._own = own
        self._redis = redis
        self._keep_s = keep_s
        self._known: dict[str, tuple[float, ApiKey]] = {}
        self._asking = SingleFlight[ApiKey | None]()

    async def find(self, secret: bytes) -> ApiKey | None:
        """None for a key that nobody knows. Raises QueueUnavailable: where Redis cannot say, nobody comes in."""
        digest = digest_of_secret(secret)
        return self._of_settings(digest) or await self._of_redis(digest)

    async def aclose(self) -> None:
        await self._asking.aclose()

    def _of_settings(self, digest: str) -> ApiKey | None:
        # Each is compared to its last digit, so that the time it takes tells nothing of how far one agrees.
        same = [key for key in self._own if hmac.compare_digest(key.sha256, digest)]
        return same[0] if same else None

    async def _of_redis(self, digest: str) -> ApiKey | None:
        """Looked up by digest: how long that takes depends on bits that nobody can choose without knowing a key."""
        believed_until, key = self._known.get(digest, (0.0, None))
        if key is not None and asyncio.get_running_loop().time() < believed_until:
            return key
        async with answering():
            return await self._asking.ask(digest, lambda: self._ask_redis(digest))

    async def _ask_redis(self, digest: str) -> ApiKey | None:
        # Counted from before the question: an answer that took long is not believed any longer for it.
        asked_at = asyncio.get_running_loop().time()
        key = await find_key(self._redis, digest)
        self._known.pop(digest, None)
        if key is not None:
            if len(self._known) >= MAX_REMEMBERED:
                del self._known[next(iter(self._known))]  # the one that was asked for longest ago
            self._known[digest] = (asked_at + self._keep_s, key)
        return key

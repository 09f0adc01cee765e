"""Tokenizers that workers publish for who has no checkpoint: one per digest, for as long as a card names it.

A field of one hash for each, `jitney:tokenizers`: what is in it is made by `jitney.text.files`, and opaque here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from redis.exceptions import WatchError

from jitney.cards import list_cards
from jitney.connection import Redis
from jitney.keys import QUEUES, TOKENIZERS

MAX_PACKED_BYTES: Final = 16 << 20
"""Compressed. A tokenizer of 50,000 tokens has 0.6 MB, one of 256,000 about 8."""


async def publish_tokenizer(redis: Redis, digest: str, pack: Callable[[], bytes]) -> bool:
    """Write what `pack` gives, unless it is there already. False: it is larger than may be published.

    pack: called on a thread, and only when needed. The queue's card must have been written before. Raises the errors
    of Redis, and those of `pack`.
    """
    if await redis.hexists(TOKENIZERS, digest):
        return True
    packed = await asyncio.to_thread(pack)
    if len(packed) > MAX_PACKED_BYTES:
        return False
    await redis.hsetnx(TOKENIZERS, digest, packed)
    await _drop_unnamed(redis)
    return True


async def fetch_tokenizer(redis: Redis, digest: str) -> bytes | None:
    """What was published under this digest; None if nothing was, or more than may be."""
    size = await redis.hstrlen(TOKENIZERS, digest)
    if not 0 < size <= MAX_PACKED_BYTES:
        return None
    packed: bytes | None = await redis.hget(TOKENIZERS, digest)  # type: ignore[assignment]
    return packed


async def _drop_unnamed(redis: Redis) -> None:
    """Forget the tokenizers that no card names any more.

    Under a watch of the cards: one that is written meanwhile may name what would be dropped here.
    """
    async with redis.pipeline(transaction=True) as pipeline:
        try:
            await pipeline.watch(QUEUES)
            named = {card.tokenizer_digest for card in (await list_cards(redis)).values()}
            unnamed = [digest for digest in await redis.hkeys(TOKENIZERS) if _text(digest) not in named]
            if unnamed:
                pipeline.multi()  # type: ignore[no-untyped-call]
                pipeline.hdel(TOKENIZERS, *unnamed)
                await pipeline.execute()
        except WatchError:
            pass  # whoever wrote a card publishes next, and looks again


def _text(digest: bytes | str) -> str:
    return digest.decode("utf-8", "replace") if isinstance(digest, bytes) else digest

"""What a worker tells of its queue before it serves: the card, and the tokenizer that the card names."""

from __future__ import annotations

from typing import Protocol

from redis.exceptions import RedisError

from jitney.cards import QueueCard, write_card
from jitney.connection import Redis
from jitney.errors import ModelError
from jitney.logs import logger
from jitney.published import MAX_PACKED_BYTES, publish_tokenizer


class Packs(Protocol):
    """A tokenizer, as bytes. `pack` takes up to seconds."""

    @property
    def digest(self) -> str: ...
    def pack(self) -> bytes: ...


async def register_queue(redis: Redis, queue: str, card: QueueCard, tokenizer: Packs) -> QueueCard:
    """Write the card, then publish the tokenizer; returns the card that holds now.

    In this order: a tokenizer that no card names is dropped by whoever publishes next. Without it the queue is served
    all the same, and an API estimates what it could have counted. Raises SettingsError as `write_card` does.
    """
    written = await write_card(redis, queue, card)
    log = logger(part="registration", queue=queue)
    try:
        if not await publish_tokenizer(redis, tokenizer.digest, tokenizer.pack):
            log.warning("tokenizer_too_large_to_publish", max_bytes=MAX_PACKED_BYTES)
    except (
        RedisError,
        OSError,
        ModelError,
    ) as error:  # no memory left, no right to, too slow, or its files have changed
        log.warning("tokenizer_not_published", error=str(error))
    return written

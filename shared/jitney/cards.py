"""Queue cards: what a queue serves, durable, written by its first worker; and aliases of queues."""

from __future__ import annotations

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from redis.exceptions import WatchError

from jitney.connection import Redis
from jitney.errors import SettingsError, UnknownQueue
from jitney.keys import ALIASES, QUEUES, check_queue_name


class QueueCard(BaseModel):
    """What every process must know of a queue's model before a worker of it lives.

    max_model_len: tokens of prompt and answer, a property of the queue and not of a worker.
    bytes_per_token: mean over the tokenizer's vocabulary, for estimates. fingerprint: of the build that wrote
    the card. tokenizer_digest: of tokenizer and chat template. created: Unix seconds.
    hidden_size: numbers of a hidden state, and so of an embedding; 0: the queue's workers give none.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    model: str
    max_model_len: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    bytes_per_token: float = Field(4.0, gt=0)
    fingerprint: str = ""
    tokenizer_digest: str = ""
    created: float = 0.0
    hidden_size: int = Field(0, ge=0)

    def encode(self) -> bytes:
        return orjson.dumps(self.model_dump())

    @classmethod
    def decode(cls, stored: bytes) -> QueueCard | None:
        """None for bytes that are no card: somebody else wrote them."""
        try:
            return cls.model_validate_json(stored)
        except ValidationError:
            return None


async def write_card(redis: Redis, queue: str, card: QueueCard) -> QueueCard:
    """Write the card of a queue, or refresh it; returns the card that holds now.

    The first writer's `max_model_len` and `created` stay. Raises SettingsError if the queue already serves
    another tokenizer or vocabulary: its waiting jobs would be read wrongly.
    """
    check_queue_name(queue)
    async with redis.pipeline(transaction=True) as pipeline:
        while True:
            try:
                await pipeline.watch(QUEUES)
                stored = await pipeline.hget(QUEUES, queue)
                current = QueueCard.decode(_bytes(stored)) if stored is not None else None
                merged = card if current is None else _merge(queue, current, card)
                if merged == current:
                    return merged  # a full Redis takes no card, and needs workers more than ever
                pipeline.multi()  # type: ignore[no-untyped-call]
                pipeline.hset(QUEUES, queue, merged.encode())
                await pipeline.execute()
                return merged
            except WatchError:
                continue


def _merge(queue: str, current: QueueCard, new: QueueCard) -> QueueCard:
    for name in ("tokenizer_digest", "vocab_size"):
        has, wants = getattr(current, name), getattr(new, name)
        if has != wants:
            raise SettingsError(
                f"queue {queue} serves {current.model} with {name}={has}, but {new.model} has {name}={wants}: "
                f"use another queue (--queue)"
            )
    return new.model_copy(update={"max_model_len": current.max_model_len, "created": current.created})


async def read_card(redis: Redis, name: str) -> tuple[str, QueueCard]:
    """The queue that `name` means (its own name or an alias) and its card. Raises UnknownQueue."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.hget(ALIASES, name)
    pipeline.hget(QUEUES, name)
    alias, stored = await pipeline.execute()
    queue = name
    if stored is None and alias is not None:
        queue = alias.decode("utf-8", "replace")
        stored = await redis.hget(QUEUES, queue)
    card = QueueCard.decode(stored) if stored is not None else None
    if card is None:
        raise UnknownQueue(name, await _known_names(redis))
    return queue, card


async def list_cards(redis: Redis) -> dict[str, QueueCard]:
    """Every queue's card by name, in order of name. What is no card is left out."""
    stored = await redis.hgetall(QUEUES)
    cards = {_text(name): QueueCard.decode(_bytes(value)) for name, value in stored.items()}
    return {name: card for name, card in sorted(cards.items()) if card is not None}


async def list_aliases(redis: Redis) -> dict[str, str]:
    """Alias to queue."""
    return {_text(alias): _text(queue) for alias, queue in (await redis.hgetall(ALIASES)).items()}


async def write_alias(redis: Redis, alias: str, queue: str) -> None:
    """Let `alias` mean `queue`. Raises UnknownQueue when there is no such card."""
    if not await redis.hexists(QUEUES, queue):
        raise UnknownQueue(queue, await _known_names(redis))
    await redis.hset(ALIASES, alias, queue)


async def _known_names(redis: Redis) -> list[str]:
    return [*await list_cards(redis), *await list_aliases(redis)]


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()

"""Cards say what a queue serves; the first writer decides what no later one may change."""

from __future__ import annotations

import asyncio

import pytest

from jitney.cards import QueueCard, list_aliases, list_cards, read_card, write_alias, write_card
from jitney.connection import Redis
from jitney.errors import InvalidJob, SettingsError, UnknownQueue
from jitney.keys import ALIASES, QUEUES

CARD = QueueCard(
    model="tiny",
    max_model_len=2_048,
    vocab_size=1_000,
    bytes_per_token=3.5,
    fingerprint="f1",
    tokenizer_digest="d1",
    created=10.0,
)


async def test_a_card_is_read_by_the_queues_name(redis: Redis, queue_name: str) -> None:
    assert await write_card(redis, queue_name, CARD) == CARD
    assert await read_card(redis, queue_name) == (queue_name, CARD)
    assert (await list_cards(redis))[queue_name] == CARD


async def test_a_later_worker_refreshes_the_card_but_not_the_length(redis: Redis, queue_name: str) -> None:
    await write_card(redis, queue_name, CARD)
    later = CARD.model_copy(update={"max_model_len": 512, "fingerprint": "f2", "created": 99.0})
    now = await write_card(redis, queue_name, later)
    assert (now.max_model_len, now.fingerprint, now.created) == (2_048, "f2", 10.0)
    assert await read_card(redis, queue_name) == (queue_name, now)


async def test_a_worker_that_changes_nothing_registers_at_a_full_redis(redis: Redis, queue_name: str) -> None:
    """It is what makes room."""
    await write_card(redis, queue_name, CARD)
    await redis.config_set("maxmemory", 1)
    try:
        assert await write_card(redis, queue_name, CARD.model_copy(update={"created": 99.0})) == CARD
    finally:
        await redis.config_set("maxmemory", 0)


@pytest.mark.parametrize(("field", "value"), [("tokenizer_digest", "d2"), ("vocab_size", 1_001)])
async def test_another_tokenizer_is_refused_and_both_are_named(
    redis: Redis, queue_name: str, field: str, value: object
) -> None:
    await write_card(redis, queue_name, CARD)
    other = CARD.model_copy(update={field: value, "model": "other"})
    with pytest.raises(SettingsError) as caught:
        await write_card(redis, queue_name, other)
    for named in (queue_name, "tiny", "other", str(getattr(CARD, field)), str(value)):
        assert named in str(caught.value)
    assert await read_card(redis, queue_name) == (queue_name, CARD)


async def test_of_many_first_writers_one_wins(redis: Redis, queue_name: str) -> None:
    cards = [CARD.model_copy(update={"max_model_len": 100 + number, "created": float(number)}) for number in range(20)]
    written = await asyncio.gather(*(write_card(redis, queue_name, card) for card in cards))
    assert len({(card.max_model_len, card.created) for card in written}) == 1


async def test_an_alias_means_its_queue(redis: Redis, queue_name: str) -> None:
    await write_card(redis, queue_name, CARD)
    await write_alias(redis, f"Alias of/{queue_name}", queue_name)
    assert await read_card(redis, f"Alias of/{queue_name}") == (queue_name, CARD)
    assert (await list_aliases(redis))[f"Alias of/{queue_name}"] == queue_name
    await redis.hdel(ALIASES, f"Alias of/{queue_name}")


async def test_an_unknown_name_is_refused_with_the_known_ones(redis: Redis, queue_name: str) -> None:
    await write_card(redis, queue_name, CARD)
    with pytest.raises(UnknownQueue) as caught:
        await read_card(redis, "nobody")
    assert queue_name in caught.value.known
    with pytest.raises(UnknownQueue):
        await write_alias(redis, "nick", "nobody")


async def test_what_is_no_card_is_no_queue(redis: Redis, queue_name: str) -> None:
    await redis.hset(QUEUES, queue_name, b"\xff not a card")
    with pytest.raises(UnknownQueue):
        await read_card(redis, queue_name)
    assert queue_name not in await list_cards(redis)
    assert await write_card(redis, queue_name, CARD) == CARD


async def test_a_name_that_cannot_be_a_queue_is_refused(redis: Redis) -> None:
    with pytest.raises(InvalidJob):
        await write_card(redis, "Not A Queue", CARD)

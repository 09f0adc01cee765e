"""Tokenizers in Redis: written once, kept as long as a card names them, read within bounds."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from jitney import published
from jitney.cards import QueueCard, write_card
from jitney.connection import Redis
from jitney.keys import QUEUES, TOKENIZERS
from jitney.published import fetch_tokenizer, publish_tokenizer


class Packing:
    """Counts how often it is asked."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.num_calls = 0

    def __call__(self) -> bytes:
        self.num_calls += 1
        return self.content


@pytest.fixture
async def digest(redis: Redis, queue_name: str) -> str:
    """Of the card of this test's queue."""
    name = secrets.token_hex(32)
    await write_card(redis, queue_name, QueueCard(model="m", max_model_len=64, vocab_size=9, tokenizer_digest=name))
    return name


async def test_what_is_published_is_read_by_its_digest(redis: Redis, digest: str) -> None:
    assert await fetch_tokenizer(redis, digest) is None
    assert await publish_tokenizer(redis, digest, Packing(b"packed \x00\xff"))
    assert await fetch_tokenizer(redis, digest) == b"packed \x00\xff"
    assert await redis.ttl(TOKENIZERS) == -1


async def test_it_is_made_and_written_once(redis: Redis, digest: str) -> None:
    first, second = Packing(b"first"), Packing(b"second")
    assert await publish_tokenizer(redis, digest, first)
    assert await publish_tokenizer(redis, digest, second)
    assert (first.num_calls, second.num_calls) == (1, 0)
    assert await fetch_tokenizer(redis, digest) == b"first"


async def test_of_two_workers_that_begin_together_the_first_to_write_stays(redis: Redis, digest: str) -> None:
    loop = asyncio.get_running_loop()

    def pack_while_another_writes() -> bytes:
        asyncio.run_coroutine_threadsafe(publish_tokenizer(redis, digest, Packing(b"first")), loop).result(20)
        return b"second"

    assert await publish_tokenizer(redis, digest, pack_while_another_writes)
    assert await fetch_tokenizer(redis, digest) == b"first"


async def test_a_larger_one_is_not_written(redis: Redis, digest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "MAX_PACKED_BYTES", 10)
    assert not await publish_tokenizer(redis, digest, Packing(b"x" * 11))
    assert await fetch_tokenizer(redis, digest) is None
    assert await publish_tokenizer(redis, digest, Packing(b"x" * 10))


async def test_a_larger_one_that_somebody_wrote_is_not_read(
    redis: Redis, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish_tokenizer(redis, digest, Packing(b"x" * 11))
    monkeypatch.setattr(published, "MAX_PACKED_BYTES", 10)
    assert await fetch_tokenizer(redis, digest) is None


async def test_one_that_no_card_names_any_more_is_dropped_by_the_next_to_publish(redis: Redis, digest: str) -> None:
    other, queue = secrets.token_hex(32), f"other{secrets.token_hex(4)}"
    await write_card(redis, queue, QueueCard(model="m", max_model_len=64, vocab_size=9, tokenizer_digest=other))
    await publish_tokenizer(redis, other, Packing(b"other"))
    await publish_tokenizer(redis, digest, Packing(b"own"))
    assert await fetch_tokenizer(redis, other) == b"other"
    await redis.hdel(QUEUES, queue)
    await redis.hdel(TOKENIZERS, digest)
    await publish_tokenizer(redis, digest, Packing(b"own"))
    assert await fetch_tokenizer(redis, other) is None
    assert await fetch_tokenizer(redis, digest) == b"own"


async def test_a_card_written_while_others_are_dropped_keeps_its_tokenizer(
    redis: Redis, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two steps of a second worker fall between the first one's look at the cards and its deletion."""
    other, queue = secrets.token_hex(32), f"other{secrets.token_hex(4)}"
    list_cards = published.list_cards

    async def list_then_another_comes(redis: Redis) -> dict[str, QueueCard]:
        cards = await list_cards(redis)
        monkeypatch.setattr(published, "list_cards", list_cards)
        await write_card(redis, queue, QueueCard(model="m", max_model_len=64, vocab_size=9, tokenizer_digest=other))
        await redis.hset(TOKENIZERS, other, b"other")
        return cards

    monkeypatch.setattr(published, "list_cards", list_then_another_comes)
    await publish_tokenizer(redis, digest, Packing(b"own"))
    assert await fetch_tokenizer(redis, other) == b"other"

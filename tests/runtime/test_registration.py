"""What a worker publishes of its queue: the card and the tokenizer, and both again when Redis came back empty."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.api.api_wire import until
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, Ears, crew

from jitney import published
from jitney.cards import read_card
from jitney.connection import connect
from jitney.embedded import EmbeddedServer
from jitney.keys import TOKENIZERS
from jitney.published import fetch_tokenizer
from jitney.text.files import TokenizerFiles
from jitney_worker.build import register
from jitney_worker.model.tiny import make_tiny
from jitney_worker.runtime.registration import register_queue
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer


async def test_a_worker_publishes_its_tokenizer_with_its_card_and_again_when_redis_came_back_empty(
    tmp_path: Path, queue_name: str, tokenizer: Tokenizer, ears: Ears
) -> None:
    with EmbeddedServer(tmp_path) as server:
        redis = connect(server.url)
        settings = load_settings(
            redis_url=server.url, queue=queue_name, lease={"duration_s": 3.0}, worker={"snapshot_every_s": 0.05}
        )
        made = await register(redis, crew(settings, tokenizer, HashModel(), {}))
        packed = await fetch_tokenizer(redis, tokenizer.digest)
        assert packed is not None
        assert TokenizerFiles.unpack(packed).digest == tokenizer.digest
        assert (await read_card(redis, queue_name))[1].tokenizer_digest == tokenizer.digest
        worker = Worker(settings, made)
        run = asyncio.create_task(worker.run())
        await ears.until("ready")
        await redis.flushall()
        await ears.until("data_set_replaced")
        await until(lambda: fetch_tokenizer(redis, tokenizer.digest), packed)
        assert (await read_card(redis, queue_name))[1].tokenizer_digest == tokenizer.digest
        worker.drain()
        assert await asyncio.wait_for(run, LIVENESS_S) == 0
        await redis.aclose()


async def test_a_tokenizer_over_the_bound_is_told_and_the_queue_is_served_all_the_same(
    redis, queue_name: str, tokenizer: Tokenizer, ears: Ears, monkeypatch: pytest.MonkeyPatch
) -> None:
    await redis.hdel(TOKENIZERS, tokenizer.digest)
    monkeypatch.setattr(published, "MAX_PACKED_BYTES", 10)
    settings = load_settings(redis_url="redis://unused", queue=queue_name)
    card = crew(settings, tokenizer, HashModel(), {}).card()
    assert await register_queue(redis, queue_name, card, tokenizer) == card
    await ears.until("tokenizer_too_large_to_publish")
    assert await fetch_tokenizer(redis, tokenizer.digest) is None


async def test_files_that_cannot_be_read_any_more_are_told_and_the_queue_is_served_all_the_same(
    redis, queue_name: str, tmp_path: Path, ears: Ears
) -> None:
    directory = make_tiny(tmp_path / "model")
    tokenizer = Tokenizer.load(directory)
    (directory / "tokenizer.json").rename(directory / "elsewhere.json")
    await redis.hdel(TOKENIZERS, tokenizer.digest)
    card = crew(load_settings(redis_url="redis://unused", queue=queue_name), tokenizer, HashModel(), {}).card()
    assert await register_queue(redis, queue_name, card, tokenizer) == card
    await ears.until("tokenizer_not_published")

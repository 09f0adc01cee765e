"""`jitney webhooks`, as typed in a shell."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.conftest import WriteCard
from tests.webhooks.receiver import Receiver, answer, settings_for
from typer.testing import CliRunner

from jitney.cli import app
from jitney.connection import Redis
from jitney.keys import Keys, new_job_id
from jitney.webhooks.announcements import BATCHES, Announcements
from jitney.webhooks.outbox import deliver_due
from jitney.webhooks.settings import WebhookSettings


async def webhooks(redis_url: str, *words: str) -> Any:
    """In a thread: the command runs an event loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["webhooks", *words, "--redis-url", redis_url])


@pytest.fixture
async def ids(redis: Redis, queue_name: str, receiver: Receiver, write_queue_card: WriteCard) -> tuple[str, str]:
    """Two that were given up: of a job and of a batch."""
    await write_queue_card()
    job = new_job_id(queue_name)
    await Announcements(redis, Keys(queue_name).prefix).add(job, "job", "failed", receiver.url())
    await Announcements(redis, BATCHES).add("batch_1", "batch", "completed", receiver.url())
    receiver.answers.extend([answer(410), answer(410)])
    assert await deliver_due(redis, settings_for(receiver), limit=10) == 2
    return job, "batch_1"


async def test_webhooks_that_were_given_up_are_listed_tried_anew_and_dropped(
    redis: Redis, redis_url: str, ids: tuple[str, str], receiver: Receiver
) -> None:
    listing = await webhooks(redis_url, "list", "--json")
    listed = {one["id"]: one for one in map(json.loads, listing.stdout.splitlines())}
    assert {id: (one["state"], one["event"]) for id, one in listed.items()} == {
        ids[0]: ("dead", "job.failed"),
        ids[1]: ("dead", "batch.completed"),
    }
    table = (await webhooks(redis_url, "list")).stdout
    assert "HTTP 410" in table
    assert ids[0] in table

    assert (await webhooks(redis_url, "retry", ids[0])).stdout.split() == [ids[0]]
    assert (await webhooks(redis_url, "retry", ids[0])).exit_code == 1
    assert await deliver_due(redis, settings_for(receiver), limit=10) == 1
    assert receiver.told[-1].event["data"] == {"id": ids[0]}

    assert (await webhooks(redis_url, "drop", "--all")).stdout.split() == [ids[1]]
    assert "no announcements" in (await webhooks(redis_url, "list")).stderr


async def test_a_webhook_that_is_not_there_can_be_neither_tried_nor_dropped(
    redis_url: str, ids: tuple[str, str]
) -> None:
    for word in ("retry", "drop"):
        refused = await webhooks(redis_url, word, "batch_2")
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "batch_2" in refused.stderr
        assert (await webhooks(redis_url, word)).exit_code == 2


def test_a_webhook_secret_is_made_that_the_settings_take() -> None:
    made = [CliRunner().invoke(app, ["webhooks", "secret"]).stdout.strip() for _ in range(2)]
    assert made[0] != made[1]
    settings = WebhookSettings.load(allowed_hosts=("a.example",), secret=" ".join(made))
    assert [len(key) for key in settings.keys] == [32, 32]

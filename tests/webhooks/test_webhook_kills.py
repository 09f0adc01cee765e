"""Deliverers that die, and deliverers that come together: told at least once, always under the same id."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from tests.conftest import WriteCard
from tests.webhooks.receiver import PATIENCE_S, SECRET, Receiver, Told, settings_for

from jitney.connection import Redis
from jitney.keys import Keys
from jitney.tether import tether
from jitney.webhooks.announcements import Announcements
from jitney.webhooks.outbox import deliver_due

PROGRAM = Path(__file__).parent / "deliver_once.py"
LEASE_S = 1_000.0


async def start(redis_url: str, receiver: Receiver) -> asyncio.subprocess.Process:
    environment = {
        **os.environ,
        "JITNEY_WEBHOOKS__ALLOWED_HOSTS": f"127.0.0.1:{receiver.port}",
        "JITNEY_WEBHOOKS__PRIVATE_HOSTS": "127.0.0.1",
        "JITNEY_WEBHOOKS__ALLOW_HTTP": "1",
        "JITNEY_WEBHOOKS__SECRET": SECRET,
    }
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROGRAM),
        redis_url,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=tether(signal.SIGKILL),
    )


async def test_a_webhook_whose_deliverer_is_killed_between_its_post_and_the_record_is_told_again_under_the_same_id(
    redis: Redis, redis_url: str, queue_name: str, receiver: Receiver, write_queue_card: WriteCard
) -> None:
    await write_queue_card()
    keys = Keys(queue_name)
    outbox = Announcements(redis, keys.prefix)
    assert await outbox.add("q.1", "job", "finished", receiver.url())
    deliverer = await start(redis_url, receiver)

    async def kill(_: Told) -> None:
        deliverer.send_signal(signal.SIGKILL)
        await deliverer.wait()

    receiver.on_told = kill
    [first] = await receiver.wait_told(1)
    assert await asyncio.wait_for(deliverer.wait(), PATIENCE_S) == -signal.SIGKILL
    receiver.on_told = None
    # It lies there under the lease of the dead, and is due when that ends.
    assert await outbox.claim(1, LEASE_S) == []
    assert await redis.zadd(keys.hooks, {"q.1": 1}, xx=True, ch=True) == 1
    assert await deliver_due(redis, settings_for(receiver), limit=10) == 1
    again = receiver.told[1]
    assert (again.headers["webhook-id"], again.body) == (first.headers["webhook-id"], first.body)
    assert await redis.exists(keys.hooks, keys.hook("q.1")) == 0


async def test_two_deliverers_at_once_tell_each_webhook_once(
    redis: Redis, redis_url: str, queue_name: str, receiver: Receiver, write_queue_card: WriteCard
) -> None:
    await write_queue_card()
    outbox = Announcements(redis, Keys(queue_name).prefix)
    for number in range(20):
        await outbox.add(f"q.{number}", "job", "finished", receiver.url())
    together = [await start(redis_url, receiver) for _ in range(2)]
    said = [await asyncio.wait_for(one.communicate(), PATIENCE_S) for one in together]
    assert [int(out) for out, _ in said] == [10, 10]
    assert set(Counter(told.headers["webhook-id"] for told in receiver.told).values()) == {1}
    assert len(receiver.told) == 20

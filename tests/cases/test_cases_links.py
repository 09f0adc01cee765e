"""B42, B47: links that come back, and servers that answer but do not serve. Nobody is restarted by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cases.conftest import StartServer
from tests.cases.moody import Moody
from tests.cases.paces import Paced
from tests.faults.proxy import Proxy
from tests.runtime.harness import LIVENESS_S, Ears, crew, expected

from jitney import AsyncClient, QueueUnavailable
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.keys import Keys
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer

LONG = 200
MAX_AHEAD = 8
"""`max_unpublished_steps`: so many may be on their way out, and as many more begun meanwhile."""

REFUSALS = {
    "READONLY You can't write against a read only replica.": True,
    "ERR READONLY You can't write against a read only replica.": True,
    "NOREPLICAS Not enough good replicas to write.": True,
    "LOADING Redis is loading the dataset in memory": False,
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": False,
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.": False,
}
"""What a server says that does not serve just now, and whether it answers reads all the same."""


@pytest.fixture
def server(start_server: StartServer) -> EmbeddedServer:
    return start_server(password="secret")


@pytest.fixture
def redis_url(server: EmbeddedServer) -> str:
    return server.url


def through(proxy: Proxy | Moody, server: EmbeddedServer) -> str:
    return server.url.replace(f":{server.port}/", f":{proxy.port}/")


@contextlib.asynccontextmanager
async def working(
    url: str,
    queue: str,
    tokenizer: Tokenizer,
    *,
    step_s: float = 0.005,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Paced]:
    """A worker that reaches Redis at this address; ended at the end of the block."""
    paced = Paced(step_s)
    made = load_settings(redis_url=url, queue=queue, **{"lease": {"duration_s": 0.9}, **settings})
    worker = Worker(made, crew(made, tokenizer, paced, engine or {}))
    run = asyncio.create_task(worker.run())
    try:
        yield paced
    finally:
        worker.drain()
        assert await asyncio.wait_for(run, LIVENESS_S) == 0


async def enqueued(client: AsyncClient, number: int, **options: Any) -> Any:
    """A job, submitted until the queue takes it."""
    async with asyncio.timeout(LIVENESS_S):
        while True:
            with contextlib.suppress(QueueUnavailable):
                return await client.enqueue([number], ignore_eos=True, idempotency_key=f"{number}", **options)


async def is_answered(client: AsyncClient, number: int) -> bool:
    job = await enqueued(client, number, max_tokens=5)
    async with asyncio.timeout(LIVENESS_S):
        while True:
            with contextlib.suppress(QueueUnavailable):  # its channel is not back yet
                return (await job.result()).token_ids == expected([number], 5)


class Reading:
    """A reader of a whole answer, in a task of its own. said: its token ids so far, every index once."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self.said: list[int] = []
        self._client = client
        self._job_id = job_id
        self._news = asyncio.Event()

    async def __aenter__(self) -> Reading:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        async for event in self._client.job(self._job_id).stream():
            assert event.type != "tokens" or event.index == len(self.said)
            self.said += event.token_ids
            self._news.set()

    async def until(self, count: int) -> None:
        """Until so many tokens have been said."""
        async with asyncio.timeout(LIVENESS_S):
            while len(self.said) < count:
                self._news.clear()
                news = asyncio.create_task(self._news.wait())
                await asyncio.wait({news, self._task}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if self._task.done():
                    self._task.result()
                    assert len(self.said) >= count, f"it ended after {len(self.said)} tokens"

    async def end(self) -> tuple[int, ...]:
        """The answer, once it is whole."""
        await asyncio.wait_for(asyncio.shield(self._task), LIVENESS_S)
        return tuple(self.said)


@pytest.mark.parametrize(("refusal", "only_writes"), REFUSALS.items(), ids=lambda value: str(value)[:12])
async def test_a_server_that_does_not_serve_for_a_while_costs_a_pause(
    server: EmbeddedServer,
    queue_name: str,
    tokenizer: Tokenizer,
    write_queue_card: Any,
    start_api: Any,
    ears: Ears,
    refusal: str,
    only_writes: bool,
) -> None:
    """B47: an open stream goes on after it, new jobs are refused meanwhile as `unavailable`, nobody crashes."""
    await write_queue_card(vocab_size=tokenizer.vocab_size)
    async with Moody(server.port).serve() as moody, AsyncClient(through(moody, server), queue=queue_name) as client:
        url = through(moody, server)
        api = await start_api(redis_url=url)
        async with working(url, queue_name, tokenizer) as paced:
            job = await client.enqueue([1], max_tokens=LONG, ignore_eos=True)
            async with Reading(client, job.id) as reading:
                await reading.until(20)
                num_steps = len(paced.steps)
                moody.turn(refusal, only_writes=only_writes)
                await ears.until("leases_given_up")
                with pytest.raises(QueueUnavailable):
                    await client.enqueue([2], max_tokens=5)
                answer = await api.post("/v1/jobs", {"model": queue_name, "prompt": [2]})
                assert (answer.status, int(answer.headers["retry-after"]) >= 1) == (503, True)
                assert (await answer.json())["error"]["code"] == "queue_unavailable"
                assert len(paced.steps) - num_steps <= 2 * MAX_AHEAD + 1, "it computes what it may not write"
                moody.turn(None)
                assert await is_answered(client, 3)
                assert await reading.end() == expected([1], LONG)
    assert moody.num_refused > 10


async def test_a_primary_that_lives_on_as_a_replica_is_left(
    start_server: StartServer,
    server: EmbeddedServer,
    redis: Redis,
    queue_name: str,
    tokenizer: Tokenizer,
    write_queue_card: Any,
    ears: Ears,
) -> None:
    """B47: the address leads to the new primary, the open connections to the old one, which answers and never writes.

    No connection breaks by itself here: whoever keeps one is refused for ever.
    """
    await write_queue_card(vocab_size=tokenizer.vocab_size)
    second = start_server(folder="second", password="secret")
    heir = connect(second.url, name="test-heir")
    for one in (redis, heir):
        await one.config_set("masterauth", "secret")
    await heir.execute_command("REPLICAOF", "127.0.0.1", str(server.port))
    async with Proxy(server.port) as address, AsyncClient(through(address, server), queue=queue_name) as client:
        async with working(through(address, server), queue_name, tokenizer):
            job = await client.enqueue([1], max_tokens=LONG, ignore_eos=True)
            async with Reading(client, job.id) as reading:
                await reading.until(20)
                address.target = second.port
                async with asyncio.timeout(LIVENESS_S):
                    while await redis.execute_command("WAIT", 1, 1_000) != 1:
                        pass
                await heir.execute_command("REPLICAOF", "NO", "ONE")
                await redis.execute_command("REPLICAOF", "127.0.0.1", str(second.port))
                assert await is_answered(client, 2)
                assert await reading.end() == expected([1], LONG)
        assert address.num_cut == 0, "a connection was broken for it: the test proves nothing"
    await heir.aclose()


async def drops_thrice(moody: Moody, ears: Ears) -> None:
    """Each time when somebody has come back."""
    for _ in range(3):
        moody.turn(None)
        await moody.until_joined()


async def is_away(moody: Moody, ears: Ears) -> None:
    """Every connection is refused, for as long as it takes the worker to give up its leases."""
    moody.refuse()
    await ears.until("leases_given_up")
    moody.turn(None)


async def goes_dead(moody: Moody, ears: Ears) -> None:
    """As when a firewall forgets: the connections stay open, and nothing comes back on them, ever."""
    moody.hold()
    await ears.until("claim_failed", "control_lost")


async def listens_to_nobody(moody: Moody, ears: Ears) -> None:
    """The same of the channel alone."""
    moody.hold_subscriptions()
    await ears.until("control_lost")


BLOWS = [drops_thrice, is_away, goes_dead]


@pytest.mark.parametrize("blow", BLOWS, ids=lambda blow: blow.__name__)
async def test_when_the_link_is_back_everybody_listens_again(
    server: EmbeddedServer,
    redis: Redis,
    queue_name: str,
    tokenizer: Tokenizer,
    write_queue_card: Any,
    ears: Ears,
    monkeypatch: pytest.MonkeyPatch,
    blow: Any,
) -> None:
    """B42: the worker claims, the client's stream goes on, within 15 s and by themselves."""
    monkeypatch.setattr("jitney_worker.runtime.control.PING_EVERY_S", 1.0)
    await write_queue_card(vocab_size=tokenizer.vocab_size)
    async with (
        Moody(server.port).serve() as moody,
        AsyncClient(through(moody, server), queue=queue_name) as client,
        working(through(moody, server), queue_name, tokenizer),
    ):
        for number in (1, 2) if blow is drops_thrice else (1,):
            job = await enqueued(client, number, max_tokens=LONG)
            async with Reading(client, job.id) as reading:
                await reading.until(10)
                await blow(moody, ears)
                async with asyncio.timeout(15.0):
                    assert await is_answered(client, 10 * number)
                    assert await reading.end() == expected([number], LONG)


@pytest.mark.parametrize("blow", [drops_thrice, listens_to_nobody], ids=lambda blow: blow.__name__)
async def test_when_the_link_is_back_a_cancel_reaches_the_worker(
    server: EmbeddedServer,
    client: AsyncClient,
    redis: Redis,
    queue_name: str,
    tokenizer: Tokenizer,
    write_queue_card: Any,
    ears: Ears,
    monkeypatch: pytest.MonkeyPatch,
    blow: Any,
) -> None:
    """B42: also on the channel on which nothing is said for hours.

    Two jobs on one seat: the second only waits, so that no refused write and, under this lease, no renewal tells
    the worker of its end. The third is claimed only once the second has left.
    """
    monkeypatch.setattr("jitney_worker.runtime.control.PING_EVERY_S", 0.5)
    await write_queue_card(vocab_size=tokenizer.vocab_size)
    async with (
        Moody(server.port).serve() as moody,
        working(
            through(moody, server),
            queue_name,
            tokenizer,
            step_s=0.1,
            engine={"max_num_seqs": 1},
            lease={"duration_s": 600.0},
        ),
    ):
        control = Keys(queue_name).ctl("w1")
        seated = await client.enqueue([1], max_tokens=400, ignore_eos=True)
        await until_owned(seated)
        await until_heard(redis, control)
        await blow(moody, ears)
        if blow is listens_to_nobody:
            await redis.client_kill_filter(_type="pubsub")  # the old connections, to which the server still speaks
        async with asyncio.timeout(15.0):
            await until_heard(redis, control)
            waiting = await client.enqueue([2], max_tokens=400, ignore_eos=True)
            await until_owned(waiting)
            assert await waiting.cancel()
            third = await client.enqueue([3], max_tokens=400, ignore_eos=True)
            await until_owned(third)
        assert await third.cancel()
        assert await seated.cancel()


async def until_heard(redis: Redis, channel: str) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while (await redis.pubsub_numsub(channel))[0][1] == 0:
            pass


async def until_owned(job: Any) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while (await job.status()).owner != "w1":
            pass

"""ops/redis/users.acl on real servers: every role can do its work, and nothing that is not its work."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as blocking_redis
import rq
import uvicorn
from redis.exceptions import NoPermissionError, RedisError, ResponseError
from rq.job import JobStatus, Retry
from rq.serializers import JSONSerializer
from tests.api.api_wire import ask
from tests.contract.contract_servers import SERVERS, binary_of
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, StartWorker, Turnstile, expected

from jitney import AsyncClient
from jitney.apikeys import add_key, list_keys, make_key, revoke_key
from jitney.cards import QueueCard, write_card
from jitney.celery.settling import Settlement
from jitney.connection import Redis, connect
from jitney.doctor import examine
from jitney.embedded import EmbeddedServer
from jitney.keys import API_KEYS, QUEUES
from jitney.queue import Queue
from jitney.scripts import NAMES, assemble
from jitney.upkeeping import keep_up
from jitney_api.batches.catalog import Catalog
from jitney_api.batches.files import DirectoryStore
from jitney_api.batches.ledger import Chunk, Ledger, Order
from jitney_api.batches.queueing import BatchQueue
from jitney_api.batches.records import FileRecord, LineError, new_file_id
from jitney_api.batches.settings import BatchSettings
from jitney_api.batches.sweeping import sweep
from jitney_api.connections import server_config
from jitney_api.settings import ApiSettings

ACL_FILE = Path(__file__).parents[2] / "ops" / "redis" / "users.acl"
ROLES = ("client", "api", "worker", "bulk", "operator")
DELIVERING = ("hook_add", "hook_claim", "hook_settle")
SCRIPTS = {
    "client": ("enqueue", "cancel"),
    "api": ("enqueue", "cancel", *DELIVERING),
    "worker": (
        "claim",
        "adopt",
        "renew",
        "append",
        "finish",
        "release",
        "retry",
        "janitor",
        "repair",
        "fold",
        *DELIVERING,
    ),
}
"""The others are an operator's."""


class GuardedServer(EmbeddedServer):
    """A server with the file that is shipped; a password for each role, and an administrator for the test."""

    def _configuration(self) -> str:
        lines = ACL_FILE.read_text().splitlines()
        closed = next(line for line in lines if line.startswith("user default off"))
        lines[lines.index(closed)] = f"user default on >{self.password} ~* &* +@all"
        for role in ROLES:
            digest = hashlib.sha256(role.encode()).hexdigest()
            lines = [
                line.replace(f"user jitney-{role} on resetpass", f"user jitney-{role} on #{digest}") for line in lines
            ]
        own = self.data_dir / "users.acl"
        own.write_text("\n".join(lines) + "\n")
        without = [line for line in super()._configuration().splitlines() if not line.startswith("requirepass")]
        return "\n".join([*without, f'aclfile "{own.resolve()}"', ""])

    def url_of(self, role: str) -> str:
        return f"redis://jitney-{role}:{role}@127.0.0.1:{self.port}/0"


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServer]:
    binary = binary_of(request.param)
    with GuardedServer(tmp_path_factory.mktemp("acl"), binary=binary, tethered=True) as running:
        assert isinstance(running, GuardedServer)
        yield running


@pytest.fixture(scope="module")
def redis_url(server: GuardedServer) -> str:
    """What the fixtures of a worker take: here its own role's."""
    return server.url_of("worker")


@pytest.fixture
async def roles(server: GuardedServer) -> AsyncIterator[dict[str, Redis]]:
    clients = {role: connect(server.url_of(role), name="jitney-test") for role in ROLES}
    yield clients
    for client in clients.values():
        await client.aclose()


@pytest.fixture
async def refusals(server: GuardedServer) -> AsyncIterator[Any]:
    """`await refusals()`: what the server has refused to anybody in this test."""
    admin = connect(server.url, name="jitney-test")
    await admin.execute_command("ACL LOG RESET")

    async def read() -> list[tuple[str, str]]:
        entries = await admin.acl_log()
        found = [(_text(entry["username"]), _text(entry["object"])) for entry in entries]
        # redis-py says its name and version, and takes no for an answer; old servers do not know the command at all.
        return [(user, what) for user, what in found if what != "client|setinfo"]

    yield read
    await admin.aclose()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def allowed(role: str) -> set[str]:
    [line] = [line for line in ACL_FILE.read_text().splitlines() if line.startswith(f"user jitney-{role} ")]
    return {word[1:] for word in line.split() if word.startswith("+")}


@pytest.mark.parametrize("role", SCRIPTS)
def test_a_role_has_every_command_of_its_scripts(role: str) -> None:
    """Whoever changes a script hears of it here, and not from a server in production."""
    used = {
        command.lower() for name in SCRIPTS[role] for command in re.findall(r"p?call\(\s*'([A-Za-z]+)'", assemble(name))
    }
    assert len(used) > 20
    assert used - allowed(role) == set()


def test_every_script_is_somebodys() -> None:
    assert set(NAMES) == {name for names in SCRIPTS.values() for name in names} | {
        "requeue",
        "drop",
        "hook_retry",
        "hook_drop",
    }


async def test_as_shipped_the_file_lets_nobody_in(tmp_path: Path) -> None:
    """Until passwords are put into it: no role has one that somebody could guess from the repository."""

    class Shipped(EmbeddedServer):
        def _configuration(self) -> str:
            without = [line for line in super()._configuration().splitlines() if not line.startswith("requirepass")]
            return "\n".join([*without, f'aclfile "{ACL_FILE}"', ""])

    server = Shipped(tmp_path)
    server.launch()
    try:
        for user in ("default", *(f"jitney-{role}" for role in ROLES)):
            client = connect(f"redis://{user}:x@127.0.0.1:{server.port}/0")
            async with asyncio.timeout(LIVENESS_S):
                while True:
                    try:
                        await client.ping()
                        pytest.fail(f"{user} came in")
                    except ResponseError as error:
                        assert "WRONGPASS" in str(error) or "invalid username-password" in str(error)  # noqa: PT017
                        break
                    except RedisError as error:
                        if "invalid username-password" in str(error):
                            break
                        await asyncio.sleep(0.02)  # it is not up yet
            await client.aclose()
    finally:
        server.stop()


async def test_client_and_worker_do_all_their_work(
    server: GuardedServer, start_worker: StartWorker, queue_name: str, redis: Redis, refusals: Any
) -> None:
    """Enqueue, stream, repeat under a key, cancel while it runs, a late reader, a delayed job, a drain, the janitor."""
    turnstile = Turnstile(HashModel())
    async with AsyncClient(server.url_of("client"), queue=queue_name) as client:
        async with start_worker(turnstile, lease={"duration_s": 3.0}):
            job = await client.enqueue([1, 2], max_tokens=6, ignore_eos=True, idempotency_key="k", timeout_s=600)
            assert (
                await client.enqueue([1, 2], max_tokens=6, ignore_eos=True, idempotency_key="k", timeout_s=600)
            ).id == job.id
            doomed = await client.enqueue([3], max_tokens=400, ignore_eos=True, tenant="acme")
            later = await client.enqueue([4], max_tokens=2, ignore_eos=True, not_before=1.0)
            await turnstile.until_step()
            assert await doomed.cancel()
            turnstile.open()
            events = [event.type async for event in job.stream()]
            assert events[-1] == "finished"
            assert (await job.result(LIVENESS_S)).token_ids == expected([1, 2], 6)
            assert (await later.result(LIVENESS_S)).finish_reason == "length"
            assert (await job.status()).reason == "finished"
            queue = Queue(redis, queue_name)  # what else a worker does, now and then
            await queue.janitor(fingerprint="hash.1")
            await queue.sweep()
            await queue.fold(job.id)
        again = [event.type async for event in client.job(job.id).stream(1)]
        assert again[-1] == "finished"
        waiting = await client.enqueue([5], max_tokens=2)
        assert await waiting.cancel()
    assert await refusals() == []


async def test_the_api_does_all_its_work(
    server: GuardedServer,
    start_worker: StartWorker,
    queue_name: str,
    roles: dict[str, Redis],
    refusals: Any,
    tmp_path: Path,
) -> None:
    secret, key = make_key("tester", tenant="acme", scopes=["generate", "read", "admin", "metrics"])
    await add_key(roles["operator"], key)
    config = server_config(
        ApiSettings(
            redis_url=server.url_of("api"),
            port=0,
            access="keys",
            disconnect_grace_s=0.01,
            batch=BatchSettings(files=str(tmp_path)),
        ),
        log_level="critical",
    )
    serving = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        running = asyncio.create_task(serving.serve([listening]))
        try:
            await tour(port, secret, start_worker, queue_name)
        finally:
            serving.should_exit = True
            await asyncio.wait_for(running, LIVENESS_S)
            assert await revoke_key(roles["operator"], "tester")
    assert await refusals() == []


async def tour(port: int, secret: str, start_worker: StartWorker, queue_name: str) -> None:
    """Every route, in every way that asks something else of Redis."""
    sends = {"authorization": f"Bearer {secret}"}
    async with start_worker():
        body = {"model": queue_name, "prompt": [1, 2], "max_tokens": 4, "ignore_eos": True}
        for path in (
            "/v1/models",
            f"/v1/models/{queue_name}",
            f"/v1/queue?model={queue_name}",
            "/health",
            "/readyz",
        ):
            answer = await ask(port, "GET", path, **sends)
            assert answer.status == 200, path
            await answer.close()
        scraped = await ask(port, "GET", "/metrics", **sends)
        assert b"\njitney_redis_up 1.0\n" in await scraped.body()
        await scraped.close()
        for fields in ({}, {"stream": True}):
            answer = await ask(port, "POST", "/v1/completions", {**body, **fields}, **sends)
            assert answer.status == 200
            await answer.body()
            await answer.close()
        left = await ask(port, "POST", "/v1/completions", {**body, "max_tokens": 400, "stream": True}, **sends)
        await left.close()  # its grace asks who else listens, and its cancel ends the job
        answer = await ask(port, "POST", "/v1/jobs", {**body, "max_tokens": 300}, **sends)
        created = await answer.json()
        await answer.close()
        for method, tail in (("GET", ""), ("DELETE", ""), ("GET", "/events"), ("GET", "")):
            answer = await ask(port, method, f"/v1/jobs/{created['id']}{tail}", **sends)
            assert answer.status == 200
            await answer.body()
            await answer.close()
        await tour_of_batches(port, sends)


async def tour_of_batches(port: int, sends: dict[str, str]) -> None:
    form = (
        b'--XX\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--XX\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n{}\r\n--XX--\r\n'
    )

    async def asked(method: str, path: str, body: Any = None, **headers: str) -> Any:
        answer = await ask(port, method, path, body, **sends, **headers)
        assert answer.status == 200, (method, path)
        found = await answer.body()
        await answer.close()
        return found if path.endswith("/content") else json.loads(found)

    sent = await asked("POST", "/v1/files", form, content_type="multipart/form-data; boundary=XX")
    file = f"/v1/files/{sent['id']}"
    assert await asked("GET", f"{file}/content") == b"{}"
    await asked("GET", file)
    order = {"input_file_id": sent["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    for _ in range(2):
        batch = await asked("POST", "/v1/batches", order, idempotency_key="k")
    here = f"/v1/batches/{batch['id']}"
    for method, path in (("GET", here), ("POST", f"{here}/cancel")):
        assert (await asked(method, path))["id"] == batch["id"]
    for root in ("/v1/files", "/v1/batches"):
        for order_by in ("desc", "asc") if root == "/v1/files" else ("desc",):
            order_words = f"&order={order_by}" if root == "/v1/files" else ""
            found = await asked("GET", f"{root}?limit=1{order_words}")
            await asked("GET", f"{root}?after={found['last_id']}{order_words}")
    spare = await asked("POST", "/v1/files", form, content_type="multipart/form-data; boundary=XX")
    await asked("DELETE", f"/v1/files/{spare['id']}")


async def test_an_rq_worker_and_the_upkeep_of_batches_do_all_their_work(
    server: GuardedServer, roles: dict[str, Redis], refusals: Any, tmp_path: Path
) -> None:
    """As `jitney-bulk`: a batch from begin to end, its RQ job from the queue to its result, and a sweep over all."""
    bulk = roles["bulk"]
    ledger, catalog = Ledger(bulk), Catalog(bulk)
    file, output = (FileRecord(new_file_id(), "acme", "x", purpose, 1) for purpose in ("batch", "batch_output"))
    await catalog.expect(file.id)
    await catalog.keep(file, 3_600)
    batch = await ledger.create(Order("acme", "/v1/completions", file.id))
    held = await ledger.begin(batch.id)
    await ledger.accept(held, total=1, model="m")
    await ledger.commit(held, [Chunk("c", "output", [1], completed=1)])
    await ledger.progress(batch.id)
    await ledger.cancel(batch.id)
    queue = BatchQueue(server.url_of("bulk"))
    await sweep(bulk, DirectoryStore(tmp_path), queue, keep_s=3_600)
    serve_rq(server.url_of("bulk"))
    await sweep(bulk, DirectoryStore(tmp_path), queue, keep_s=3_600)
    await ledger.finalize(held)
    await ledger.end(held, "cancelled", output=output, error=None)
    other = await ledger.create(Order("acme", "/v1/completions", file.id))
    await ledger.refuse(await ledger.begin(other.id), [LineError("x", "y")])
    await ledger.forget(other.id)
    await catalog.drop(output.id)
    await sweep(bulk, DirectoryStore(tmp_path), queue, keep_s=3_600)
    await asyncio.to_thread(queue.close)
    assert await refusals() == []


def serve_rq(url: str) -> None:
    """What an RQ worker asks of Redis: jobs that succeed, fail, and are retried; its registries; its own channel."""
    with blocking_redis.Redis.from_url(url) as connection:
        queue = rq.Queue("jitney", connection=connection, serializer=JSONSerializer)
        queue.empty()
        good = queue.enqueue("builtins.len", [1, 2], result_ttl=60, meta={"a": 1})
        bad = queue.enqueue("builtins.int", "x", retry=Retry(max=1), failure_ttl=60)
        rq.SimpleWorker([queue], connection=connection, serializer=JSONSerializer).work(burst=True)
        assert good.return_value() == 2
        assert bad.get_status() is JobStatus.FAILED
        bad.delete()


async def test_the_operator_has_keys_dead_letters_and_the_doctor(
    server: GuardedServer, roles: dict[str, Redis], refusals: Any, write_queue_card: Any, queue_name: str
) -> None:
    await write_queue_card()
    operator = roles["operator"]
    _, key = make_key("own", tenant="-", scopes=["read"])
    await add_key(operator, key)
    assert [one.name for one in await list_keys(operator)] == ["own"]
    assert await revoke_key(operator, "own")
    findings = {finding.name: finding for finding in await examine(server.url_of("operator"), queue_name)}
    assert findings["rights"].verdict == "ok", findings["rights"]
    assert [user for user, _ in await refusals() if user != "jitney-operator"] == []


NOBODYS = [
    "FLUSHALL",
    "FLUSHDB",
    "KEYS *",
    "CONFIG SET maxmemory 1",
    "SHUTDOWN NOSAVE",
    "MONITOR",
    "ACL LIST",
    "ACL SETUSER eve on nopass ~* +@all",
    "CLIENT LIST",
    "CLIENT KILL TYPE normal",
    "REPLICAOF NO ONE",
    "SCRIPT FLUSH",
    "MIGRATE 127.0.0.1 1 x 0 1",
    "SWAPDB 0 1",
    "GET other:secret",
    "SET other:x 1",
    "DEL other:x",
    "SUBSCRIBE other",
    "PSUBSCRIBE *",
    "PUBLISH other x",
]
WORKING_ROLES = ("client", "api", "worker", "bulk")


async def test_the_janitor_does_its_work_as_operator_and_a_celery_worker_as_client(
    server: GuardedServer, roles: dict[str, Redis], queue_name: str, refusals: Any
) -> None:
    await write_card(roles["operator"], queue_name, QueueCard(model="m", max_model_len=8, vocab_size=8))
    async with AsyncClient(server.url_of("client"), queue=queue_name) as client:
        await client.enqueue("late", timeout_s=0.001)
        settlement = Settlement(roles["client"], "a-task")
        assert not await settlement.is_over(redelivered=True)
        assert await settlement.claim()
        await settlement.done()
        assert not await settlement.is_over(redelivered=False)
    async with AsyncClient(server.url_of("operator")) as operator:
        assert ((await keep_up(operator, []))["queues"] or {})["queues"] > 0
    assert await refusals() == []


@pytest.mark.parametrize("command", NOBODYS)
@pytest.mark.parametrize("role", WORKING_ROLES)
async def test_what_is_no_roles_work_is_refused(roles: dict[str, Redis], role: str, command: str) -> None:
    with pytest.raises(NoPermissionError):
        await roles[role].execute_command(*command.split())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("command", [one for one in NOBODYS if not one.startswith(("KEYS", "SCRIPT"))])
async def test_nor_is_it_the_operators(roles: dict[str, Redis], command: str) -> None:
    with pytest.raises(NoPermissionError):
        await roles["operator"].execute_command(*command.split())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("role", "command"),
    [
        *((role, f"HGETALL {API_KEYS}") for role in ("client", "worker", "bulk")),
        *((role, "HGETALL jitney:{batches}:batch:x") for role in ("client", "worker")),
        *((role, "HGETALL rq:job:x") for role in ("client", "api", "worker")),
        *((role, f"HSET {API_KEYS} x y") for role in WORKING_ROLES),
        *((role, f"HDEL {API_KEYS} x") for role in WORKING_ROLES),
        *((role, f"HSET {QUEUES} x y") for role in ("client", "api")),
        *((role, "HSET jitney:aliases x y") for role in WORKING_ROLES),
        *((role, command) for role in ("client", "api") for command in ("INFO", "SCAN 0", "BLPOP {jitney:q}:bell 1")),
        *((role, "CONFIG GET *") for role in WORKING_ROLES),
        *((role, "EVAL return 0") for role in WORKING_ROLES),
    ],
)
async def test_a_role_keeps_to_its_own_work(roles: dict[str, Redis], role: str, command: str) -> None:
    with pytest.raises(NoPermissionError):
        await roles[role].execute_command(*command.split())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("role", WORKING_ROLES)
@pytest.mark.parametrize(
    "body",
    ["redis.call('FLUSHALL')", "return redis.call('GET', 'other:secret')", "redis.call('PUBLISH', 'other', 'x')"],
)
async def test_a_script_of_its_own_gets_nobody_any_further(roles: dict[str, Redis], role: str, body: str) -> None:
    sha = await roles[role].script_load(body)
    with pytest.raises((NoPermissionError, ResponseError), match=r"ACL|permission|user executing the script can't"):
        await roles[role].evalsha(sha, 0)  # type: ignore[no-untyped-call]

"""A batch from its input to its end: cancelled, expired, refused, taken over, with Redis full or away."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.api.batch_work import PATIENCE_S, Echo, working
from tests.client.scripted_worker import ScriptedWorker, eventually

from jitney import AsyncClient
from jitney.cards import QueueCard, write_card
from jitney.connection import Redis
from jitney.embedded import EmbeddedServer
from jitney.keys import BatchKeys
from jitney.records import Limits
from jitney.webhooks.announcements import BATCHES, Announcements
from jitney.webhooks.settings import WebhookSettings
from jitney_api.batches.assembly import Assembler, InputChanged
from jitney_api.batches.catalog import Catalog
from jitney_api.batches.files import DirectoryStore
from jitney_api.batches.job import assemble
from jitney_api.batches.ledger import Ledger, Order
from jitney_api.batches.records import Batch, BatchTaken, FileRecord, FileUnknown, new_file_id
from jitney_api.batches.settings import BatchSettings
from jitney_api.tokenizers import Tokenizers

TENANT = "t"
DAY_S = 86_400


def completion(custom_id: str, model: str, **body: Any) -> bytes:
    asked = {"model": model, "prompt": custom_id} | body
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": asked}
    return orjson.dumps(line) + b"\n"


@dataclass
class Office:
    """Whatever it takes to make batches, and to assemble them."""

    client: AsyncClient
    store: DirectoryStore
    queue_name: str
    ledger: Ledger
    catalog: Catalog

    async def make(
        self, lines: bytes, *, window_s: int = DAY_S, endpoint: str = "/v1/completions", tenant: str = TENANT
    ) -> Batch:
        file = FileRecord(new_file_id(), tenant, "in.jsonl", "batch", len(lines))
        await self.store.put(file.id, _parts(lines))
        await self.catalog.keep(file, None)
        return await self.ledger.create(Order(tenant, endpoint, file.id, window_s=window_s))

    async def make_of(self, custom_ids: Iterable[str], **options: Any) -> Batch:
        return await self.make(b"".join(completion(one, self.queue_name) for one in custom_ids), **options)

    def assembler(
        self, *, shown: list[Batch] | None = None, window: int = 16, webhooks: WebhookSettings | None = None
    ) -> Assembler:
        async def show(batch: Batch) -> None:
            if shown is not None:
                shown.append(batch)

        tokenizers = Tokenizers(self.client.redis, max_loaded=1, num_threads=1)
        return Assembler(
            self.client,
            self.store,
            BatchSettings(window=window),
            tokenizers=tokenizers,
            webhooks=webhooks or WebhookSettings(),
            show=show,
        )

    async def assemble(self, batch: Batch, **options: Any) -> Batch:
        return await asyncio.wait_for(self.assembler(**options).assemble(batch.id), PATIENCE_S)

    async def lines_of(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        content = b"".join([piece async for piece in self.store.read(file_id)])
        assert (await self.catalog.find(file_id)).num_bytes == len(content)
        return [orjson.loads(line) for line in content.splitlines()]

    async def reaches(self, batch: Batch, num_completed: int) -> None:
        async def has_come() -> bool:
            return (await self.ledger.find(batch.id)).completed >= num_completed

        await eventually(has_come)


@pytest.fixture
async def office(redis_url: str, redis: Redis, queue_name: str, tmp_path: Path, write_queue_card: Any) -> Any:
    await write_queue_card()
    async with AsyncClient(redis_url) as client:
        yield Office(client, DirectoryStore(tmp_path / "files"), queue_name, Ledger(redis), Catalog(redis))


@pytest.fixture
def worker(redis: Redis, queue_name: str) -> ScriptedWorker:
    return ScriptedWorker(redis, queue_name)


async def test_a_batch_is_answered_line_by_line_and_its_counts_grow(office: Office, worker: ScriptedWorker) -> None:
    batch = await office.make_of([f"line {n}" for n in range(50)])
    shown: list[Batch] = []
    echo = Echo(worker, fails="line 7".__eq__)
    async with working(echo):
        ended = await office.assemble(batch, shown=shown)
    assert ended.state == "completed"
    assert (ended.total, ended.completed, ended.failed) == (50, 49, 1)
    assert ended.model == office.queue_name
    assert ended.usage.input_tokens == 49 * 3
    assert [one.state for one in shown][-2:] == ["finalizing", "completed"]
    assert ended == await office.ledger.find(batch.id)
    output = await office.lines_of(ended.output_file_id)
    assert Counter(line["custom_id"] for line in output) == Counter({f"line {n}" for n in range(50)} - {"line 7"})
    assert {line["response"]["body"]["choices"][0]["text"] for line in output} >= {"line 0!", "line 49!"}
    (error,) = await office.lines_of(ended.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("line 7", 400)
    assert await office.store.names(batch.id) == []
    assert await office.assemble(batch) == ended  # nothing is left to do


async def test_it_expires_by_the_clock_of_redis_and_not_by_its_assemblers(
    office: Office, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await office.make_of("ab")
    monkeypatch.setattr("time.time", lambda: batch.expires_at + 1)
    async with working(Echo(worker)):
        assert (await office.assemble(batch)).state == "completed"


@pytest.mark.parametrize("lines", [True, False])
async def test_its_end_is_announced_also_by_who_finds_it_ended(
    office: Office, worker: ScriptedWorker, redis: Redis, lines: bool
) -> None:
    """An assembler may die between the end of its batch and the announcement."""
    there = WebhookSettings(
        allowed_hosts=("hooks.example.com",), secret="whsec_" + "A" * 44, url="https://hooks.example.com/"
    )
    batch = await (office.make_of("ab") if lines else office.make(b"{}\n"))
    outbox = Announcements(redis, BATCHES)
    async with working(Echo(worker)):
        ended = await office.assemble(batch)
    assert batch.id not in {one.id for one in await outbox.kept(1_000)}  # nobody is to be told
    await office.assemble(batch, webhooks=there)
    (one,) = [one for one in await outbox.kept(1_000) if one.id == batch.id]
    assert (one.object, one.ending) == ("batch", "completed" if lines else "failed") == ("batch", ended.state)
    await outbox.drop(batch.id)


async def test_its_jobs_are_bulk_of_its_tenant_with_its_deadline(office: Office, worker: ScriptedWorker) -> None:
    own = completion("a", office.queue_name, priority=3, deadline=4e9, metadata={"k": "v"}, seed=1)
    batch = await office.make(own)
    running = asyncio.create_task(office.assemble(batch))
    turn = await _next(worker)
    spec = turn.spec
    assert (spec.band, spec.tenant, spec.deadline) == ("bulk", TENANT, batch.expires_at)
    assert (spec.priority, spec.metadata, spec.on_disconnect) == (3, {"k": "v"}, "continue")
    assert spec.result_ttl_s == 2 * DAY_S
    await turn.finish("x")
    assert (await running).state == "completed"


async def test_a_bad_input_fails_with_its_lines_and_nothing_is_enqueued(office: Office, worker: ScriptedWorker) -> None:
    batch = await office.make(completion("a", office.queue_name) + b"broken\n" + completion("a", "nobody"))
    ended = await office.assemble(batch)
    assert ended.state == "failed"
    assert [(one.line, one.code, one.param) for one in ended.errors] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
    ]
    assert (await worker.queue.backlog()).num_jobs == 0


async def test_an_input_whose_content_is_gone_fails(office: Office) -> None:
    batch = await office.make_of(["a"])
    await office.store.delete(batch.input_file_id)
    ended = await office.assemble(batch)
    assert (ended.state, ended.errors[0].code, ended.errors[0].param) == ("failed", "file_not_found", "input_file_id")


async def test_what_the_queue_refuses_goes_to_the_error_file_under_the_callers_names(office: Office) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nonsense"}}}
    batch = await office.make(completion("a", office.queue_name, response_format=schema))
    ended = await office.assemble(batch)
    assert (ended.state, ended.completed, ended.failed) == ("completed", 0, 1)
    assert ended.output_file_id is None
    (error,) = await office.lines_of(ended.error_file_id)
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "response_format.json_schema.schema"


async def test_an_embedding_of_several_inputs_is_one_line(
    office: Office, worker: ScriptedWorker, write_queue_card: Any
) -> None:
    await write_queue_card(hidden_size=4)
    body = {"model": office.queue_name, "input": ["x", "y"], "dimensions": 4}
    line = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": body}
    batch = await office.make(orjson.dumps(line), endpoint="/v1/embeddings")
    running = asyncio.create_task(office.assemble(batch))
    turn = await _next(worker)
    assert turn.spec.prompt == "x"
    await eventually(lambda: _waits(worker, 1))
    await turn.fail({"type": "server_error", "code": "internal_error", "message": "no"})
    ended = await running
    assert (ended.completed, ended.failed) == (0, 1)
    assert await _waits(worker, 0)  # nobody wants the other one any more


async def test_a_cancelled_batch_keeps_what_is_done(office: Office, worker: ScriptedWorker) -> None:
    custom_ids = [f"line {n}" for n in range(40)]
    batch = await office.make_of(custom_ids)
    running = asyncio.create_task(office.assemble(batch, window=8))
    first = [await _next(worker) for _ in range(5)]
    for turn in first:
        await turn.finish("done")
    await office.reaches(batch, 5)
    aboard = await _next(worker)
    await aboard.start()
    assert (await office.ledger.cancel(batch.id)).state == "cancelling"
    ended = await running
    assert ended.state == "cancelled"
    assert (ended.total, ended.completed, ended.failed) == (40, 5, 0)
    output = await office.lines_of(ended.output_file_id)
    errors = await office.lines_of(ended.error_file_id)
    assert sorted(line["custom_id"] for line in output + errors) == sorted(custom_ids)
    assert {line["custom_id"] for line in output} == {turn.spec.prompt for turn in first}
    assert {(line["response"], line["error"]["code"]) for line in errors} == {(None, "batch_cancelled")}
    assert (await office.client.job(aboard.id).status()).reason == "cancelled"
    assert (await worker.queue.backlog()).num_jobs == 0


async def test_an_expired_batch_keeps_what_is_done(office: Office, worker: ScriptedWorker) -> None:
    batch = await office.make_of([f"line {n}" for n in range(20)], window_s=6)
    running = asyncio.create_task(office.assemble(batch, window=4))
    turn = await _next(worker)
    await turn.finish("done")
    ended = await running
    assert ended.state == "expired"
    assert (ended.total, ended.completed, ended.failed) == (20, 1, 0)
    errors = await office.lines_of(ended.error_file_id)
    assert Counter(line["error"]["code"] for line in errors) == Counter(batch_expired=19)
    assert (await worker.queue.backlog()).num_jobs == 0


async def test_an_assembler_that_is_killed_is_followed_by_another_that_runs_nothing_twice(
    office: Office, worker: ScriptedWorker
) -> None:
    custom_ids = [f"line {n}" for n in range(120)]
    batch = await office.make_of(custom_ids)
    echo = Echo(worker)
    async with working(echo):
        for num_completed in (10, 50):
            echo.most = num_completed  # so that a window of jobs waits when it is killed
            running = asyncio.create_task(office.assemble(batch))
            await office.reaches(batch, num_completed)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        echo.most = 120
        ended = await office.assemble(batch)
    assert (ended.state, ended.completed) == ("completed", 120)
    assert Counter(line["custom_id"] for line in await office.lines_of(ended.output_file_id)) == Counter(custom_ids)
    assert Counter(echo.prompts) == Counter(custom_ids)


async def test_of_two_assemblers_at_once_the_newer_one_writes(office: Office, worker: ScriptedWorker) -> None:
    custom_ids = [f"line {n}" for n in range(60)]
    batch = await office.make_of(custom_ids)
    older = asyncio.create_task(office.assemble(batch))
    await asyncio.gather(*[(await _next(worker)).finish("done") for _ in range(5)])
    await office.reaches(batch, 5)
    newer = asyncio.create_task(office.assemble(batch))
    echo = Echo(worker)
    async with working(echo, at_once=4):
        ended = await newer
        with pytest.raises(BatchTaken):
            await older
    assert (ended.state, ended.completed, ended.fence) == ("completed", 60, 2)
    assert Counter(line["custom_id"] for line in await office.lines_of(ended.output_file_id)) == Counter(custom_ids)
    assert len(echo.prompts) == 55


async def test_a_cancelled_batch_whose_assembler_died_still_has_the_answers_of_its_jobs(
    office: Office, worker: ScriptedWorker
) -> None:
    batch = await office.make_of([f"line {n}" for n in range(30)])
    running = asyncio.create_task(office.assemble(batch, window=4))
    done, aboard = await _next(worker), await _next(worker)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await done.finish("in time")
    await office.ledger.cancel(batch.id)
    ended = await office.assemble(batch)
    assert (ended.state, ended.completed) == ("cancelled", 1)
    (line,) = await office.lines_of(ended.output_file_id)
    assert line["custom_id"] == done.spec.prompt
    assert (await office.client.job(aboard.id).status()).reason == "cancelled"


async def test_a_full_queue_is_waited_for(redis_url: str, office: Office, worker: ScriptedWorker) -> None:
    batch = await office.make_of([f"line {n}" for n in range(12)])
    async with AsyncClient(redis_url, limits=Limits(max_waiting_jobs=2)) as client:
        office.client = client
        running = asyncio.create_task(office.assemble(batch))
        first = await _next(worker)
        await eventually(lambda: _waits(worker, 2))
        await first.finish("x")
        echo = Echo(worker)
        async with working(echo):
            ended = await running
    assert (ended.state, ended.completed) == ("completed", 12)
    assert echo.most_waiting <= 2


async def test_a_job_that_redis_has_lost_is_asked_for_again(office: Office, worker: ScriptedWorker) -> None:
    batch = await office.make_of(["a"])
    running = asyncio.create_task(office.assemble(batch))
    lost = await _next(worker)
    keys = worker.queue.keys
    await office.client.redis.delete(keys.job(lost.id), keys.tokens(lost.id), keys.body(lost.id))
    echo = Echo(worker)
    async with working(echo):
        ended = await running
    assert (ended.completed, echo.prompts) == (1, ["a"])


async def test_redis_may_be_away_in_the_middle(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "valkey", tethered=True) as server:
        async with AsyncClient(server.url) as client:
            redis, name = client.redis, "q"
            await write_card(redis, name, QueueCard(model="m", max_model_len=64, vocab_size=100))
            office = Office(client, DirectoryStore(tmp_path / "files"), name, Ledger(redis), Catalog(redis))
            worker = ScriptedWorker(redis, name)
            batch = await office.make_of([f"line {n}" for n in range(20)])
            running = asyncio.create_task(office.assemble(batch, window=4))
            await (await _next(worker)).finish("x")
            await office.reaches(batch, 1)
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(0.5)
            assert not running.done()
            await asyncio.to_thread(server.start)
            echo = Echo(worker)
            async with working(echo):
                ended = await running
    assert (ended.state, ended.completed) == ("completed", 20)


async def test_chunks_that_a_rolled_back_server_has_forgotten_are_written_again(
    office: Office, worker: ScriptedWorker, redis: Redis
) -> None:
    """As after a failover to a replica that was a little behind, while the assembler lived on."""
    custom_ids = [f"line {n}" for n in range(30)]
    batch = await office.make_of(custom_ids)
    running = asyncio.create_task(office.assemble(batch, window=4))
    await (await _next(worker)).finish("first")
    await office.reaches(batch, 1)
    await redis.delete(BatchKeys.done(batch.id), BatchKeys.chunks(batch.id))
    await redis.hset(BatchKeys.batch(batch.id), mapping={"completed": 0, "input_tokens": 0, "output_tokens": 0})
    async with working(Echo(worker)):
        ended = await running
    assert (ended.state, ended.completed, ended.fence) == ("completed", 30, 2)
    output = await office.lines_of(ended.output_file_id)
    assert sorted(line["custom_id"] for line in output) == sorted(custom_ids)
    assert [line["response"]["body"]["choices"][0]["text"] for line in output].count("first") == 1


@pytest.mark.parametrize("content", [None, b"cut off\n", b"cut\noff\n"])
async def test_an_input_that_is_lost_on_the_way_ends_its_batch_when_it_is_cancelled_and_not_before(
    office: Office, worker: ScriptedWorker, content: bytes | None
) -> None:
    batch = await office.make_of([f"line {n}" for n in range(20)])
    running = asyncio.create_task(office.assemble(batch, window=4))
    await (await _next(worker)).finish("done")
    await office.reaches(batch, 1)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await office.store.delete(batch.input_file_id)
    if content is not None:
        await office.store.put(batch.input_file_id, _parts(content))
    with pytest.raises((FileUnknown, InputChanged)):  # another worker may still see it
        await office.assemble(batch)
    await office.ledger.cancel(batch.id)
    ended = await office.assemble(batch)
    assert (ended.state, ended.total, ended.completed) == ("cancelled", 20, 1)
    (line,) = await office.lines_of(ended.output_file_id)
    assert line["response"]["body"]["choices"][0]["text"] == "done"


async def test_the_held_job_tells_its_counts_and_its_end(
    office: Office, worker: ScriptedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITNEY_BATCH__FILES", str(tmp_path / "files"))
    batch = await office.make_of(["a", "b"])

    @dataclass
    class Held:
        client: AsyncClient
        meta: dict[str, Any]

        async def save_meta(self, **fields: Any) -> None:
            self.meta |= fields

    held = Held(office.client, {})
    async with working(Echo(worker)):
        result = await asyncio.wait_for(assemble(held, batch.id), PATIENCE_S)
    assert held.meta == {"total": 2, "completed": 2, "failed": 0}
    assert result == {"status": "completed", "total": 2, "completed": 2, "failed": 0}
    assert await assemble(held, "batch_" + "0" * 22) is None


async def _parts(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def _next(worker: ScriptedWorker) -> Any:
    """The next job, as soon as there is one."""
    turns: list[Any] = []

    async def claims() -> bool:
        turns.extend(await worker.claim())
        return bool(turns)

    await eventually(claims)
    await turns[0].start()
    return turns[0]


async def _waits(worker: ScriptedWorker, num_jobs: int) -> bool:
    return (await worker.queue.backlog()).num_jobs == num_jobs

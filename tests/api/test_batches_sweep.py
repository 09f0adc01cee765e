"""What is looked after: expired files, content that is nobody's, batches whose RQ job is gone."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis as BlockingRedis
from rq import Queue, SimpleWorker
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.keys import BatchKeys
from jitney_api.batches.catalog import Catalog
from jitney_api.batches.files import DirectoryStore
from jitney_api.batches.ledger import Ledger, Order
from jitney_api.batches.queueing import BatchQueue, rq_url
from jitney_api.batches.records import Batch, FileRecord, FileUnknown, new_file_id
from jitney_api.batches.sweeping import sweep, upkeep

DAY_MS = 86_400_000


async def parts(content: bytes) -> AsyncIterator[bytes]:
    yield content


class Corner:
    """A store, RQ's queue, and files and batches of a tenant of its own."""

    def __init__(self, redis: Redis, redis_url: str, root: Path) -> None:
        self.redis = redis
        self.store = DirectoryStore(root)
        self.connection = BlockingRedis.from_url(redis_url)
        self.batch_queue = BatchQueue(redis_url)
        self.queue = Queue("jitney", connection=self.connection, serializer=JSONSerializer)
        self.ledger = Ledger(redis)
        self.catalog = Catalog(redis)
        self.tenant = f"t{secrets.token_hex(4)}"

    async def file(self, life_s: int | None = 3_600) -> FileRecord:
        record = FileRecord(new_file_id(), self.tenant, "in.jsonl", "batch", 1)
        await self.catalog.expect(record.id)
        await self.store.put(record.id, parts(b"x"))
        return await self.catalog.keep(record, life_s)

    async def batch(self) -> Batch:
        """With its RQ job."""
        made = await self.ledger.create(Order(self.tenant, "/v1/completions", (await self.file()).id))
        assert await asyncio.to_thread(self.batch_queue.enqueue, made.id)
        return made

    async def sweep(self, keep_s: int = 3_600) -> dict[str, int]:
        return await sweep(self.redis, self.store, self.batch_queue, keep_s=keep_s)

    async def has_content(self, name: str) -> bool:
        try:
            return bool([piece async for piece in self.store.read(name)])
        except FileUnknown:
            return False

    def job(self, batch: Batch) -> Job:
        return Job.fetch(batch.id, connection=self.connection, serializer=JSONSerializer)

    def waits(self, batch: Batch) -> bool:
        return batch.id in self.queue.get_job_ids()


@pytest.fixture
async def corner(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Corner]:
    # One server for the whole run: batches that other tests left are none of this one's.
    await redis.delete(BatchKeys.active, BatchKeys.ended, BatchKeys.expiring, BatchKeys.loose, BatchKeys.restoring)
    made = Corner(redis, redis_url, tmp_path)
    made.queue.empty()
    yield made
    made.connection.close()
    made.batch_queue.close()


async def test_batches_files_go_when_their_time_is_over_but_not_from_under_a_batch(corner: Corner) -> None:
    old, kept, used = await corner.file(), await corner.file(), await corner.batch()
    for file_id in (old.id, used.input_file_id):
        await corner.redis.zadd(BatchKeys.expiring, {file_id: 1})
    done = await corner.sweep()
    assert (done["expired_files"], done["deleted_contents"]) == (1, 1)
    assert [await corner.has_content(name) for name in (old.id, kept.id, used.input_file_id)] == [False, True, True]
    with pytest.raises(FileUnknown):
        await corner.catalog.find(old.id)
    assert (await corner.sweep())["deleted_contents"] == 0


async def test_batches_uploads_that_were_given_up_are_deleted_a_day_later(corner: Corner) -> None:
    file_id = new_file_id()
    await corner.catalog.expect(file_id)
    await corner.store.put(file_id, parts(b"x"))
    await corner.sweep()
    assert await corner.has_content(file_id)
    await corner.redis.zincrby(BatchKeys.loose, -DAY_MS, file_id)
    await corner.sweep()
    assert not await corner.has_content(file_id)


async def test_batches_chunks_go_with_the_end_and_records_some_time_after_it(corner: Corner) -> None:
    batch = await corner.batch()
    held = await corner.ledger.begin(batch.id)
    await corner.store.put(f"{batch.id}/1-0.jsonl", parts(b"x"))
    await corner.sweep()
    assert await corner.store.names(batch.id) != []
    await corner.ledger.end(held, "completed", output=None, error=None)
    assert (await corner.sweep())["forgotten_batches"] == 0
    assert await corner.store.names(batch.id) == []
    await corner.redis.zincrby(BatchKeys.ended, -3_700_000, batch.id)
    assert (await corner.sweep())["forgotten_batches"] == 1


async def test_batches_that_wait_or_run_are_left_alone(corner: Corner) -> None:
    batch = await corner.batch()
    for _ in range(2):
        assert (await corner.sweep())["restored_batches"] == 0
    assert corner.queue.get_job_ids().count(batch.id) == 1
    assert not corner.batch_queue.enqueue(batch.id)


async def test_batches_whose_job_never_came_or_was_lost_are_enqueued(corner: Corner) -> None:
    """A dead API, a flushed RQ, and a rollback that kept one of RQ's two writes."""
    never, deleted, unlisted, ended = [await corner.batch() for _ in range(4)]
    for batch in (never, ended):
        corner.job(batch).delete()
    corner.connection.delete(f"rq:job:{deleted.id}")
    corner.connection.lrem("rq:queue:jitney", 0, unlisted.id)
    await corner.ledger.end(await corner.ledger.begin(ended.id), "completed", output=None, error=None)
    assert (await corner.sweep())["restored_batches"] == 3
    assert [corner.waits(one) for one in (never, deleted, unlisted, ended)] == [True, True, True, False]


@pytest.mark.parametrize("status", [JobStatus.FAILED, JobStatus.FINISHED, JobStatus.STARTED])
async def test_batches_whose_job_ended_without_them_are_enqueued_again(corner: Corner, status: JobStatus) -> None:
    """STARTED: at nobody's, for no registry has it."""
    batch = await corner.batch()
    corner.connection.lrem("rq:queue:jitney", 0, batch.id)
    corner.job(batch).set_status(status)
    assert (await corner.sweep())["restored_batches"] == 1
    assert corner.waits(batch)
    assert corner.job(batch).get_status() == JobStatus.QUEUED
    assert (await corner.ledger.find(batch.id)).state == "validating"


async def test_batches_whose_job_an_operator_cancelled_are_cancelled(corner: Corner) -> None:
    batch = await corner.batch()
    corner.job(batch).cancel()
    assert (await corner.sweep())["restored_batches"] == 1
    assert corner.waits(batch)
    assert (await corner.ledger.find(batch.id)).state == "cancelling"


async def test_batches_whose_worker_died_are_enqueued_again_and_those_of_others_are_left_to_rq(corner: Corner) -> None:
    """As soon as the dead worker's last sign of life is over: RQ itself would look in ten minutes."""
    batch = await corner.batch()
    theirs = corner.queue.enqueue("builtins.len", [1])
    worker = SimpleWorker([corner.queue], connection=corner.connection, serializer=JSONSerializer)
    worker.register_birth()
    for _ in range(2):
        taken = Queue.dequeue_any([corner.queue], None, connection=corner.connection, serializer=JSONSerializer)
        assert taken is not None
        worker.prepare_execution(taken[0])
        worker.prepare_job_execution(taken[0], remove_from_intermediate_queue=True)
    assert corner.job(batch).get_status() == JobStatus.STARTED
    assert (await corner.sweep())["restored_batches"] == 0
    entries = corner.connection.zrange("rq:wip:jitney", 0, -1)
    corner.connection.zadd("rq:wip:jitney", dict.fromkeys(entries, 1))
    for entry in entries:
        corner.connection.delete(f"rq:execution:{entry.decode()}")  # which expires with the entry
    assert (await corner.sweep())["restored_batches"] == 1
    assert corner.queue.get_job_ids() == [batch.id]
    assert [entry.decode().partition(":")[0] for entry in corner.connection.zrange("rq:wip:jitney", 0, -1)] == [
        theirs.id
    ]
    assert theirs.get_status() == JobStatus.STARTED
    worker.register_death()
    corner.connection.delete("rq:wip:jitney")


def test_batches_are_enqueued_where_rqs_workers_look(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rq_url("redis://ours") == "redis://ours"
    monkeypatch.setenv("RQ_REDIS_URL", "redis://theirs")
    assert rq_url("redis://ours") == "redis://theirs"
    monkeypatch.setenv("JITNEY_RQ__URL", "redis://named")
    assert rq_url("redis://ours") == "redis://named"


async def test_batches_are_restored_by_one_sweep_at_a_time(corner: Corner) -> None:
    batches = [await corner.batch() for _ in range(4)]
    for batch in batches:
        corner.job(batch).delete()
    done = await asyncio.gather(*(corner.sweep() for _ in range(4)))
    assert sum(one["restored_batches"] for one in done) == 4
    ids = corner.queue.get_job_ids()
    assert sorted(ids) == sorted(batch.id for batch in batches)


async def test_batches_are_looked_after_by_the_upkeep(
    corner: Corner, redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As `jitney janitor` and Celery's beat call it, by its entry point."""
    monkeypatch.setenv("JITNEY_BATCH__FILES", str(tmp_path))
    file = await corner.file()
    await corner.redis.zadd(BatchKeys.expiring, {file.id: 1})
    async with AsyncClient(redis_url) as client:
        context: Any = SimpleNamespace(client=client)
        done = await upkeep(context)
    assert done["expired_files"] == 1
    assert not await corner.has_content(file.id)

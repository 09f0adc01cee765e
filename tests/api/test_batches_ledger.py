"""The batches in Redis: who holds the fence writes, nobody else; what is committed counts once."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest

from jitney.connection import Redis
from jitney.errors import IdempotencyConflict, JitneyError
from jitney.keys import BATCHES, BatchKeys
from jitney_api.batches.catalog import Catalog
from jitney_api.batches.ledger import Chunk, Ledger, Order
from jitney_api.batches.records import (
    Batch,
    BatchTaken,
    BatchUnknown,
    FileInUse,
    FileRecord,
    FileUnknown,
    LineError,
    Usage,
    new_batch_id,
    new_file_id,
)


@pytest.fixture
async def ledger(redis: Redis) -> Ledger:
    return Ledger(redis)


@pytest.fixture
async def catalog(redis: Redis) -> Catalog:
    return Catalog(redis)


@pytest.fixture
async def order(catalog: Catalog) -> Order:
    tenant = f"t{secrets.token_hex(4)}"
    file = await catalog.keep(FileRecord(new_file_id(), tenant, "in.jsonl", "batch", 10), life_s=3_600)
    return Order(tenant, "/v1/completions", file.id)


@pytest.fixture
async def batch(ledger: Ledger, order: Order) -> Batch:
    return await ledger.create(order)


async def test_batches_are_taken_by_the_newest_fence_and_written_by_nobody_else(ledger: Ledger, batch: Batch) -> None:
    first, second = [await ledger.begin(batch.id) for _ in range(2)]
    assert (first.fence, second.fence) == (1, 2)
    output = FileRecord(new_file_id(), batch.tenant, "x", "batch_output", 1)
    late = [
        ledger.accept(first, total=9, model="old"),
        ledger.commit(first, [Chunk("c", "output", [1], completed=1)]),
        ledger.finalize(first),
        ledger.refuse(first, [LineError("x", "y")]),
        ledger.end(first, "completed", output=output, error=None),
    ]
    for write in late:
        with pytest.raises(BatchTaken):
            await write
    assert await ledger.find(batch.id) == second
    assert (await ledger.progress(batch.id)).chunks == ()
    assert (await ledger.accept(second, total=9, model=None)).state == "in_progress"


async def test_batches_that_have_ended_are_written_by_nobody(ledger: Ledger, catalog: Catalog, batch: Batch) -> None:
    held = await ledger.begin(batch.id)
    output = FileRecord(new_file_id(), batch.tenant, "x", "batch_output", 1)
    ended = await ledger.end(held, "completed", output=output, error=None)
    with pytest.raises(BatchTaken):
        await ledger.commit(held, [Chunk("c", "output", [1], completed=1)])
    with pytest.raises(BatchTaken):
        await ledger.end(held, "cancelled", output=None, error=None)
    assert await ledger.begin(batch.id) == ended
    assert (await catalog.find(output.id)).purpose == "batch_output"


async def test_batches_lines_that_are_committed_are_done_and_counted_once(ledger: Ledger, batch: Batch) -> None:
    held = await ledger.begin(batch.id)
    await ledger.accept(held, total=20, model="m")
    usage = Usage(3, 1, 2)
    await ledger.commit(held, [Chunk("b/1-0", "output", [1, 8], completed=2, usage=usage)])
    told = await ledger.commit(
        held,
        [Chunk("b/1-1", "output", [7], completed=1, usage=usage), Chunk("b/1-2", "error", [20], failed=1)],
    )
    assert (told.completed, told.failed, told.usage) == (3, 1, Usage(6, 2, 4))
    with pytest.raises(JitneyError, match=r"line 8 .* twice"):
        await ledger.commit(held, [Chunk("b/1-3", "output", [2, 8], completed=2)])
    progress = await ledger.progress(batch.id)
    assert progress.chunks == (("output", "b/1-0"), ("output", "b/1-1"), ("error", "b/1-2"))
    assert [line for line in range(1, 60) if progress.is_done(line)] == [1, 7, 8, 20]
    assert (await ledger.find(batch.id)).completed == 3


@pytest.mark.parametrize("state", ["completed", "expired", "cancelled", "failed"])
async def test_batches_that_end_leave_nothing_but_their_record_and_files(
    ledger: Ledger, catalog: Catalog, redis: Redis, batch: Batch, state: str
) -> None:
    held = await ledger.begin(batch.id)
    with pytest.raises(FileInUse):
        await catalog.drop(batch.input_file_id)
    await ledger.commit(held, [Chunk("c", "output", [1], completed=1)])
    assert await redis.zscore(BatchKeys.active, batch.id) is not None
    if state == "failed":
        ended = await ledger.refuse(held, [LineError("x", "y", 3, "body")])
        assert ended.errors == (LineError("x", "y", 3, "body"),)
    else:
        ended = await ledger.end(held, state, output=None, error=None)  # type: ignore[arg-type]
    assert (ended.state, ended.is_ended) == (state, True)
    assert getattr(ended, f"{state}_at") >= ended.created_at
    assert await redis.zscore(BatchKeys.active, batch.id) is None
    assert await redis.exists(BatchKeys.done(batch.id), BatchKeys.chunks(batch.id)) == 0
    assert await redis.zscore(BatchKeys.loose, f"{batch.id}/") is not None
    await catalog.drop(batch.input_file_id)
    await ledger.forget(batch.id)
    with pytest.raises(BatchUnknown):
        await ledger.find(batch.id)
    assert await catalog.batches.page(batch.tenant, after=None, limit=5) == ([], False)


async def test_batches_nobody_knows_are_unknown_everywhere(ledger: Ledger, batch: Batch) -> None:
    for batch_id in (new_batch_id(), "batch_x", "", "a:b", "batch_" + "x" * 500):
        for ask in (ledger.find, ledger.begin, ledger.cancel):
            with pytest.raises(BatchUnknown):
                await ask(batch_id)
    with pytest.raises(FileUnknown):
        await ledger.create(Order("t", "/v1/completions", new_file_id()))


async def test_batches_under_one_key_are_one_also_when_they_are_asked_for_at_once(ledger: Ledger, order: Order) -> None:
    keyed = replace(order, idempotency_key="night 1")
    first = await ledger.create(keyed)
    assert await ledger.create(keyed) == first
    with pytest.raises(IdempotencyConflict):
        await ledger.create(replace(keyed, metadata={"x": "y"}))
    other = await ledger.create(replace(keyed, idempotency_key="night 2"))
    assert other.id != first.id


async def test_batches_keys_lie_in_one_slot_and_hold_no_text_of_a_user(
    ledger: Ledger, redis: Redis, order: Order
) -> None:
    await ledger.create(replace(order, idempotency_key="my secret key", metadata={"words": "secret"}))
    names = [name.decode() async for name in redis.scan_iter("*batches*")]
    assert names
    assert all(name.startswith(f"{BATCHES}:") for name in names)
    assert not [name for name in names if "secret" in name]

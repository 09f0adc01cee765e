"""What has to be looked after now and then: files whose time is over, content that is nobody's, batches left alone.

Any process may do it at any time, several at once too: each step is one that may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, Protocol, TypeVar, cast

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.keys import BatchKeys
from jitney.logs import logger
from jitney.redis_link import answering
from jitney_api.batches.catalog import Catalog
from jitney_api.batches.files import FileStore, open_store
from jitney_api.batches.ledger import Ledger
from jitney_api.batches.queueing import BatchQueue, rq_url
from jitney_api.batches.records import BatchUnknown, FileInUse, FileUnknown
from jitney_api.batches.settings import BatchSettings

MAX_AT_ONCE: Final = 500
"""Of each kind: what is left waits for the next sweep."""

RESTORING_S: Final = 60

P = ParamSpec("P")
T = TypeVar("T")

_log = logger()


class Upkeep(Protocol):
    """What the callers of `jitney.upkeep` hand over."""

    @property
    def client(self) -> AsyncClient: ...


async def upkeep(context: Upkeep) -> dict[str, int]:
    """Entry point of `jitney.upkeep`: one sweep, with the store that the settings name."""
    settings = BatchSettings.load()
    queue = BatchQueue(rq_url(context.client.redis_url))
    try:
        return await sweep(context.client.redis, open_store(settings), queue, keep_s=settings.keep_s)
    finally:
        await asyncio.to_thread(queue.close)


async def sweep(redis: Redis, store: FileStore, queue: BatchQueue, *, keep_s: int) -> dict[str, int]:
    """Look after everything once; how many of each kind there was something to do about.

    keep_s: how long the records of ended batches stay. Raises QueueUnavailable, StoreUnavailable.
    """
    sweeper = _Sweeper(redis, store, queue)
    return {
        "expired_files": await sweeper.expire_files(),
        "deleted_contents": await sweeper.delete_contents(),
        "forgotten_batches": await sweeper.forget_batches(keep_s),
        "restored_batches": await sweeper.restore_batches(),
    }


class _Sweeper:
    def __init__(self, redis: Redis, store: FileStore, queue: BatchQueue) -> None:
        self._redis = redis
        self._store = store
        self._queue = queue
        self._ledger = Ledger(redis)
        self._catalog = Catalog(redis)

    async def expire_files(self) -> int:
        num_expired = 0
        for file_id in await self._due(BatchKeys.expiring):
            try:
                await self._catalog.drop(file_id)
                num_expired += 1
            except (FileInUse, FileUnknown):  # its batch goes on, and reads it; or another sweep was faster
                continue
        return num_expired

    async def delete_contents(self) -> int:
        """Of deleted files, of uploads that were given up, and the chunks of ended batches."""
        names = await self._due(BatchKeys.loose)
        for name in names:
            folder = name.removesuffix("/")
            for one in await self._store.names(folder) if folder != name else [name]:
                await self._store.delete(one)
            async with answering():
                await self._redis.zrem(BatchKeys.loose, name)
        return len(names)

    async def forget_batches(self, keep_s: int) -> int:
        ended = await self._due(BatchKeys.ended, keep_s)
        for batch_id in ended:
            await self._ledger.forget(batch_id)
        return len(ended)

    async def restore_batches(self) -> int:
        """Batches that have not ended, and whose RQ job is gone, given up on, or was stopped: back into the queue."""
        async with answering():
            # Two that restore at once could delete the job that the other one has just made.
            is_alone = await self._redis.set(BatchKeys.restoring, b"1", nx=True, ex=RESTORING_S)
            active = await self._redis.zrange(BatchKeys.active, 0, -1) if is_alone else []
        num_restored = 0
        for batch_id in map(_text, active):
            standing = await self._blocking(self._queue.standing, batch_id)
            if standing == "held":
                continue
            if standing == "stopped":
                await self._cancel(batch_id)
            await self._blocking(self._queue.enqueue_anew, batch_id)
            _log.warning("batch_restored", batch=batch_id, was=standing)
            num_restored += 1
        if is_alone:
            async with answering():
                await self._redis.delete(BatchKeys.restoring)
        return num_restored

    async def _cancel(self, batch_id: str) -> None:
        """Whoever stopped its RQ job wanted an end of it: it is ended in good order, with what it has."""
        try:
            await self._ledger.cancel(batch_id)
        except BatchUnknown:
            return

    async def _due(self, key: str, after_s: int = 0) -> list[str]:
        """Members whose time, in milliseconds, was more than `after_s` ago."""
        async with answering():
            now_s, microseconds = await self._redis.time()
            until = (now_s - after_s) * 1_000 + microseconds // 1_000
            found = await self._redis.zrangebyscore(key, 0, until, start=0, num=MAX_AT_ONCE)
        return [_text(one) for one in found]

    async def _blocking(self, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        async with answering():
            return await asyncio.to_thread(work, *arguments, **options)


def _text(value: object) -> str:
    return cast(bytes, value).decode()

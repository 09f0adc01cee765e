"""The records of files in Redis, and the lists of files and batches that each tenant has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, Generic, Literal, TypeVar, cast

from jitney.calls import slices
from jitney.connection import Redis
from jitney.errors import InvalidJob
from jitney.keys import BatchKeys
from jitney.redis_link import answering
from jitney_api.batches.ledger import call, file_arguments
from jitney_api.batches.records import Batch, FileInUse, FileRecord, FileUnknown, is_file_id

Record = TypeVar("Record", FileRecord, Batch)
Direction = Literal["asc", "desc"]

SLICE: Final = 500
"""Records that are read at once."""


class Catalog:
    """Every method raises QueueUnavailable when Redis does not answer."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.files = Shelf(redis, BatchKeys.files_of, BatchKeys.file, FileRecord.decode)
        self.batches = Shelf(redis, BatchKeys.batches_of, BatchKeys.batch, Batch.decode)

    async def expect(self, file_id: str) -> None:
        """Before content is put into the store: without a record within a day it is swept."""
        await call(self._redis, "expect_file", [BatchKeys.loose], [file_id])

    async def keep(self, file: FileRecord, life_s: int | None) -> FileRecord:
        """The file is there from now on. life_s: None = until it is deleted. Returns it dated."""
        _, flat = await call(self._redis, "keep_file", [BatchKeys.file(file.id)], file_arguments(file, life_s))
        return FileRecord.decode(file.id, dict(zip(flat[::2], flat[1::2], strict=True)))

    async def find(self, file_id: str) -> FileRecord:
        """Raises FileUnknown, also for one that has expired and is not swept yet."""
        if not is_file_id(file_id):
            raise FileUnknown(file_id)
        async with answering():
            stored = await self._redis.hgetall(BatchKeys.file(file_id))
            seconds, microseconds = await self._redis.time()
        if b"tenant" not in stored:
            raise FileUnknown(file_id)
        found = FileRecord.decode(file_id, cast(Mapping[bytes, bytes], stored))
        if found.expires_at is not None and found.expires_at <= seconds + microseconds / 1e6:
            raise FileUnknown(file_id)
        return found

    async def drop(self, file_id: str) -> None:
        """Its record goes; its content is swept. Raises FileUnknown, FileInUse."""
        word, *_ = await call(self._redis, "drop_file", [BatchKeys.file(file_id)], [file_id])
        if word == b"unknown":
            raise FileUnknown(file_id)
        if word == b"in_use":
            raise FileInUse(file_id)


class Shelf(Generic[Record]):
    """What each tenant has of one kind, by the time of its creation."""

    def __init__(
        self,
        redis: Redis,
        list_of: Callable[[str], str],
        key_of: Callable[[str], str],
        decode: Callable[[str, Mapping[bytes, bytes]], Record],
    ) -> None:
        self._redis = redis
        self._list_of = list_of
        self._key_of = key_of
        self._decode: Callable[[str, Mapping[bytes, bytes]], Record] = decode

    async def page(
        self,
        tenant: str,
        *,
        after: str | None,
        limit: int,
        order: Direction = "desc",
        wanted: Callable[[Record], bool] = lambda _: True,
    ) -> tuple[list[Record], bool]:
        """At most `limit` of the tenant's that are wanted, behind the one called `after`; and whether there are more.

        Raises InvalidJob when the tenant has nothing called `after`.
        """
        start = await self._rank(tenant, after, order)
        page: list[Record] = []
        async for one in self._walk(tenant, start, order):
            if wanted(one):
                if len(page) == limit:
                    return page, True
                page.append(one)
        return page, False

    async def _rank(self, tenant: str, after: str | None, order: Direction) -> int:
        if after is None:
            return 0
        key = self._list_of(tenant)
        async with answering():
            rank = await (self._redis.zrank(key, after) if order == "asc" else self._redis.zrevrank(key, after))
        if rank is None:
            raise InvalidJob(f"after: nothing in this list is called {after[:64]!r}", param="after")
        return int(cast(int, rank)) + 1

    async def _walk(self, tenant: str, start: int, order: Direction) -> AsyncIterator[Record]:
        while True:
            async with answering():
                ids = await self._redis.zrange(self._list_of(tenant), start, start + SLICE - 1, desc=order == "desc")
                stored = await self._read([cast(bytes, one).decode() for one in ids])
            for one in stored:
                yield one
            if len(ids) < SLICE:
                return
            start += SLICE

    async def _read(self, ids: Sequence[str]) -> list[Record]:
        found: list[Record] = []
        for some in slices(ids, SLICE):
            pipeline = self._redis.pipeline(transaction=False)
            for one in some:
                pipeline.hgetall(self._key_of(one))
            replies = await pipeline.execute()
            found += [self._decode(one, fields) for one, fields in zip(some, replies, strict=True) if fields]
        return found

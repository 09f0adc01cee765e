"""What one API process does about files and batches, for callers who see those of their own tenant alone."""

from __future__ import annotations

import asyncio

from redis.exceptions import RedisError

from jitney.connection import Redis
from jitney.errors import InvalidJob
from jitney.logs import logger
from jitney.submission import check_idempotency_key
from jitney_api.batches.catalog import Catalog
from jitney_api.batches.files import FileStore, open_store
from jitney_api.batches.ledger import Ledger, Order
from jitney_api.batches.queueing import BatchQueue, rq_url
from jitney_api.batches.records import Batch, BatchUnknown, FileRecord, FileUnknown, new_file_id
from jitney_api.batches.schemas import BatchRequest
from jitney_api.batches.settings import BatchSettings
from jitney_api.batches.upload import Upload
from jitney_api.callers import Caller

_log = logger()


class Desk:
    """Nothing is opened before it is needed: neither the store of files nor the connection of RQ's queue."""

    def __init__(self, redis: Redis, url: str, settings: BatchSettings) -> None:
        self.settings = settings
        self.catalog = Catalog(redis)
        self._ledger = Ledger(redis)
        self._queue = BatchQueue(rq_url(url))
        self._store: FileStore | None = None

    async def aclose(self) -> None:
        await asyncio.to_thread(self._queue.close)

    @property
    def store(self) -> FileStore:
        """Raises SettingsError where the place that is named cannot be used."""
        if self._store is None:
            self._store = open_store(self.settings)
        return self._store

    async def add_file(self, caller: Caller, upload: Upload) -> FileRecord:
        """Keep an upload. Raises StoreUnavailable, QueueUnavailable; then there is no file."""
        file = FileRecord(new_file_id(), caller.tenant, upload.filename, "batch", upload.num_bytes)
        await self.catalog.expect(file.id)
        await self.store.put(file.id, upload.parts())
        return await self.catalog.keep(file, upload.life_s or self.settings.keep_s)

    async def file(self, caller: Caller, file_id: str) -> FileRecord:
        """Raises FileUnknown, in the same words for what is no id, for no file, and for another tenant's."""
        found = await self.catalog.find(file_id)
        if caller.key and found.tenant != caller.tenant:
            raise FileUnknown(file_id)
        return found

    async def drop_file(self, caller: Caller, file_id: str) -> None:
        """Its content is swept. Raises FileUnknown, FileInUse."""
        await self.file(caller, file_id)
        await self.catalog.drop(file_id)

    async def create(self, caller: Caller, asked: BatchRequest) -> Batch:
        """A batch and its RQ job. Raises FileUnknown, InvalidJob, IdempotencyConflict, SettingsError."""
        file = await self.file(caller, asked.input_file_id)
        if file.purpose != "batch":
            raise InvalidJob(
                f"input_file_id: {file.id} has the purpose {file.purpose}, not batch", param="input_file_id"
            )
        expiry = asked.output_expires_after
        batch = await self._ledger.create(
            Order(
                tenant=file.tenant,
                endpoint=asked.endpoint,
                input_file_id=file.id,
                completion_window=asked.completion_window,
                metadata=asked.metadata,
                output_expires_s=None if expiry is None else expiry.seconds,
                idempotency_key=check_idempotency_key(asked.idempotency_key),
            )
        )
        try:
            await asyncio.to_thread(self._queue.enqueue, batch.id)
        except (RedisError, OSError) as error:
            # The batch is there all the same, and a second one would be if this were refused: the upkeep enqueues it.
            _log.warning("batch_not_enqueued", batch=batch.id, error=str(error))
        return batch

    async def batch(self, caller: Caller, batch_id: str) -> Batch:
        """Raises BatchUnknown, in the same words whatever it is."""
        found = await self._ledger.find(batch_id)
        if caller.key and found.tenant != caller.tenant:
            raise BatchUnknown(batch_id)
        return found

    async def cancel(self, caller: Caller, batch_id: str) -> Batch:
        """May be repeated; a batch that is being put together, or has ended, stays as it is. Raises BatchUnknown."""
        await self.batch(caller, batch_id)
        return await self._ledger.cancel(batch_id)

"""A batch as a held job of RQ: awaited beside others, given to another worker when its own dies."""

from __future__ import annotations

from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from jitney import AsyncClient
from jitney.logs import logger
from jitney.webhooks.settings import WebhookSettings
from jitney_api.batches.assembly import Assembler
from jitney_api.batches.files import open_store
from jitney_api.batches.records import Batch, BatchTaken, BatchUnknown
from jitney_api.batches.settings import BatchSettings
from jitney_api.tokenizers import Tokenizers

MAX_TOKENIZERS: Final = 4
_TOKENIZERS: Final[WeakKeyDictionary[AsyncClient, Tokenizers]] = WeakKeyDictionary()


class Held(Protocol):
    """What is asked of `jitney.rq.held.Held`."""

    @property
    def client(self) -> AsyncClient: ...

    async def save_meta(self, **fields: Any) -> None: ...


async def assemble(held: Held, batch_id: str) -> dict[str, Any] | None:
    """Entry point of `jitney.held_jobs`. The RQ job's `meta` holds the batch's counts, its result how it ended.

    None: there is nothing to do, because another assembler has taken the batch, or its record is gone. Raises
    SettingsError where the settings name a place of files that cannot be used, or an endpoint that may not be called.
    """
    settings = BatchSettings.load()

    async def show(batch: Batch) -> None:
        await held.save_meta(**_counts(batch))

    try:
        store, tokenizers = open_store(settings), _tokenizers_of(held.client)
        assembler = Assembler(
            held.client, store, settings, tokenizers=tokenizers, webhooks=WebhookSettings.load(), show=show
        )
        batch = await assembler.assemble(batch_id)
    except (BatchTaken, BatchUnknown) as error:
        logger().info("batch_left", batch=batch_id, reason=str(error))
        return None
    return {"status": batch.state, **_counts(batch)}


def _tokenizers_of(client: AsyncClient) -> Tokenizers:
    """One for all batches of a process: each tokenizer takes some 60 MB."""
    if client not in _TOKENIZERS:
        _TOKENIZERS[client] = Tokenizers(client.redis, max_loaded=MAX_TOKENIZERS, num_threads=1)
    return _TOKENIZERS[client]


def _counts(batch: Batch) -> dict[str, int]:
    return {"total": batch.total, "completed": batch.completed, "failed": batch.failed}

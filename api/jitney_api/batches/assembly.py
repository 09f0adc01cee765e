"""One batch, from wherever it stands to its end.

Validate the input, answer its lines, commit what is done chunk by chunk, put the files together, end. An assembler may
be killed anywhere: the next one begins with the lines that no committed chunk holds, and finds the jobs of the others
by their keys. Of two at once the ledger lets the newer one write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import BinaryIO, Final, Literal

from jitney import AsyncClient
from jitney.connection import pause_s
from jitney.errors import JitneyError, QueueUnavailable
from jitney.tasks import end_tasks
from jitney.webhooks.settings import WebhookSettings
from jitney_api.batches.catalog import Catalog
from jitney_api.batches.checking import find_errors
from jitney_api.batches.endings import announce_end, note_end
from jitney_api.batches.files import FileStore
from jitney_api.batches.ledger import Chunk, Ledger, Progress
from jitney_api.batches.lines import Line, LineReader, in_blocks
from jitney_api.batches.output import NO_USAGE, Outcome
from jitney_api.batches.patience import patiently
from jitney_api.batches.records import (
    MAX_ERRORS,
    Batch,
    BatchTaken,
    FileRecord,
    FileUnknown,
    Kind,
    LineError,
    new_file_id,
)
from jitney_api.batches.settings import BatchSettings
from jitney_api.batches.terms import terms_of
from jitney_api.batches.window import Window
from jitney_api.tokenizers import Tokenizers

LOOK_EVERY_S: Final = 1.0
MAX_HOLD_S: Final = 30.0

Show = Callable[[Batch], Awaitable[None]]
"""Tells somebody how far the batch is."""


class InputChanged(JitneyError):
    """Lines that were valid are so no more: the content is another one, or this version of the program."""

    type = "invalid_request_error"  # to RQ: another attempt ends the same way
    code = "input_changed"

    def __init__(self, batch: Batch, what: str) -> None:
        super().__init__(f"the input of batch {batch.id} has changed: {what}")


class Assembler:
    """Belongs to one event loop; may assemble several batches beside each other."""

    def __init__(
        self,
        client: AsyncClient,
        store: FileStore,
        settings: BatchSettings,
        *,
        tokenizers: Tokenizers,
        webhooks: WebhookSettings,
        show: Show,
    ) -> None:
        self._client = client
        self._tokenizers = tokenizers
        self._ledger = Ledger(client.redis)
        self._catalog = Catalog(client.redis)
        self._store = store
        self._settings = settings
        self._webhooks = webhooks
        self._show = show

    async def assemble(self, batch_id: str) -> Batch:
        """Work on the batch until it has ended. Raises BatchTaken when it is another assembler's, BatchUnknown."""
        batch = await patiently(lambda: self._ledger.begin(batch_id))
        if not batch.is_ended and not batch.total:
            batch = await self._validate(batch)
        while not batch.is_ended:
            batch = await self._answer(batch)
            if await self._is_answered(batch):
                batch = await self._end(batch)
            else:  # the server was rolled back, and has forgotten chunks: their names must not come again
                batch = await patiently(lambda: self._ledger.begin(batch_id))
        await announce_end(self._client.redis, self._webhooks, batch)
        await self._show(batch)
        return batch

    # --- validating ----------------------------------------------------------------------------

    async def _validate(self, batch: Batch) -> Batch:
        """The whole input is read before any of it is enqueued."""
        models: set[str] = set()
        num_lines = 0
        try:
            async with self._input(batch) as file:
                reader = LineReader(file, endpoint=batch.endpoint, max_lines=self._settings.max_lines)
                errors = await find_errors(
                    self._client, reader, good=lambda line: models.add(line.request.model), most=MAX_ERRORS
                )
                num_lines = reader.num_lines
        except FileUnknown as error:
            errors = [LineError(error.code, str(error), param="input_file_id")]
        if errors:
            refused = await self._surely(batch, lambda: self._ledger.refuse(batch, errors))
            note_end(refused)
            return refused
        model = models.pop() if len(models) == 1 else None
        return await patiently(lambda: self._ledger.accept(batch, total=num_lines, model=model))

    @contextlib.asynccontextmanager
    async def _input(self, batch: Batch) -> AsyncIterator[BinaryIO]:
        file = await patiently(lambda: asyncio.to_thread(self._store.open_read, batch.input_file_id))
        try:
            yield file
        finally:
            await asyncio.to_thread(file.close)

    # --- answering -----------------------------------------------------------------------------

    async def _answer(self, batch: Batch) -> Batch:
        """Every line has its outcome in a committed chunk."""
        progress = await patiently(lambda: self._ledger.progress(batch.id))
        window = Window(
            self._client, self._tokenizers, terms_of(batch), size=self._settings.window, max_hold_s=MAX_HOLD_S
        )
        newest, num_chunks = batch, 0

        async def keep(outcomes: Sequence[Outcome]) -> None:
            nonlocal newest, num_chunks
            chunks = []
            for kind, some in _by_kind(outcomes):
                num_chunks += 1
                name = f"{batch.id}/{batch.fence}-{num_chunks}.jsonl"
                text = b"".join(outcome.text for outcome in some)
                await patiently(lambda name=name, text=text: self._store.put(name, _one(text)))  # type: ignore[misc]
                chunks.append(_chunk(name, kind, some))
            newest = await self._commit(batch, chunks)
            await self._look(newest, window)
            await self._show(newest)

        await self._look(batch, window)
        watching = asyncio.create_task(self._watch(batch, window))
        try:
            await window.run(self._lines_left(batch, progress), keep)
        except (FileUnknown, InputChanged):
            if not window.is_stopped:
                raise
            # Nobody will ever read those lines: without this the batch would be taken up again for ever.
        finally:
            await end_tasks([watching])
        return newest

    async def _is_answered(self, batch: Batch) -> bool:
        if batch.state == "cancelling" or await self._is_over(batch):
            return True
        return (await patiently(lambda: self._ledger.progress(batch.id))).num_done >= batch.total

    async def _watch(self, batch: Batch, window: Window) -> None:
        """Whether the batch is cancelled, or its time is over."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._look(await patiently(lambda: self._ledger.find(batch.id)), window)

    async def _look(self, batch: Batch, window: Window) -> None:
        if batch.state == "cancelling":
            window.stop("batch_cancelled")
        elif await self._is_over(batch):
            window.stop("batch_expired")

    async def _is_over(self, batch: Batch) -> bool:
        return await patiently(self._ledger.now) >= batch.expires_at

    async def _lines_left(self, batch: Batch, progress: Progress) -> AsyncGenerator[Line, None]:
        async with self._input(batch) as file:
            reader = LineReader(file, endpoint=batch.endpoint, is_done=progress.is_done)
            async with contextlib.aclosing(in_blocks(reader)) as ones:
                async for one in ones:
                    if isinstance(one, LineError):
                        raise InputChanged(batch, f"line {one.line}: {one.message}")
                    yield one
        if reader.num_lines != batch.total:
            raise InputChanged(batch, f"it had {batch.total} lines, and has {reader.num_lines}")

    async def _commit(self, batch: Batch, chunks: Sequence[Chunk]) -> Batch:
        """Once, though Redis may have done it without our hearing of it."""
        num_failures = 0
        while True:
            try:
                return await self._ledger.commit(batch, chunks)
            except QueueUnavailable:
                await asyncio.sleep(pause_s(num_failures))
                num_failures += 1
            known = await patiently(lambda: self._ledger.progress(batch.id))
            if (chunks[0].kind, chunks[0].name) in known.chunks:
                return await patiently(lambda: self._ledger.find(batch.id))

    # --- ending --------------------------------------------------------------------------------

    async def _end(self, batch: Batch) -> Batch:
        """The files are put together of the chunks, and the batch has ended with them."""
        batch = await patiently(lambda: self._ledger.finalize(batch))
        await self._show(batch)
        progress = await patiently(lambda: self._ledger.progress(batch.id))
        output = await self._put_together(batch, "output", progress)
        error = await self._put_together(batch, "error", progress)
        ended = await self._surely(
            batch,
            lambda: self._ledger.end(batch, ending_of(batch), output=output, error=error, keep_s=self._settings.keep_s),
        )
        note_end(ended)
        with contextlib.suppress(JitneyError):  # what stays is swept
            for _, name in progress.chunks:
                await self._store.delete(name)
        return ended

    async def _put_together(self, batch: Batch, kind: Kind, progress: Progress) -> FileRecord | None:
        names = [name for one, name in progress.chunks if one == kind]
        if not names:
            return None

        async def parts() -> AsyncIterator[bytes]:
            for name in names:
                async for piece in self._store.read(name):
                    yield piece

        file_id = new_file_id()
        await patiently(lambda: self._catalog.expect(file_id))
        num_bytes = await patiently(lambda: self._store.put(file_id, parts()))
        return FileRecord(file_id, batch.tenant, f"{batch.id}_{kind}.jsonl", "batch_output", num_bytes)

    async def _surely(self, batch: Batch, end: Callable[[], Awaitable[Batch]]) -> Batch:
        """An end that Redis may have written without our hearing of it: asked again, it answers BatchTaken."""
        num_failures = 0
        while True:
            try:
                return await end()
            except QueueUnavailable:
                await asyncio.sleep(pause_s(num_failures))
                num_failures += 1
            except BatchTaken:
                found = await patiently(lambda: self._ledger.find(batch.id))
                if num_failures and found.is_ended and found.fence == batch.fence:
                    return found
                raise


def ending_of(batch: Batch) -> Literal["completed", "expired", "cancelled"]:
    """How a batch ends of whose lines each has its outcome. Lines that were not run count as neither."""
    if batch.state == "cancelling":
        return "cancelled"
    return "completed" if batch.completed + batch.failed == batch.total else "expired"


def _by_kind(outcomes: Sequence[Outcome]) -> list[tuple[Kind, list[Outcome]]]:
    good = [outcome for outcome in outcomes if outcome.ending == "answered"]
    bad = [outcome for outcome in outcomes if outcome.ending != "answered"]
    parts: list[tuple[Kind, list[Outcome]]] = [("output", good), ("error", bad)]
    return [(kind, some) for kind, some in parts if some]


def _chunk(name: str, kind: Kind, outcomes: Sequence[Outcome]) -> Chunk:
    return Chunk(
        name,
        kind,
        [outcome.number for outcome in outcomes],
        completed=sum(outcome.ending == "answered" for outcome in outcomes),
        failed=sum(outcome.ending == "failed" for outcome in outcomes),
        usage=sum((outcome.usage for outcome in outcomes), NO_USAGE),
    )


async def _one(text: bytes) -> AsyncIterator[bytes]:
    yield text

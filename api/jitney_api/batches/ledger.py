"""The batches in Redis: one typed method per script. Every script does one guarded, atomic thing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, cast

import orjson

from jitney import scripts
from jitney.connection import Redis
from jitney.errors import IdempotencyConflict, JitneyError
from jitney.keys import BATCHES, BatchKeys
from jitney.redis_link import answering
from jitney_api.batches.records import (
    MAX_ERRORS,
    NOTHING,
    Batch,
    BatchTaken,
    BatchUnknown,
    FileRecord,
    FileUnknown,
    Kind,
    LineError,
    Usage,
    is_batch_id,
    new_batch_id,
)

ROOM: Final = "jitney_api.batches"
IDEMPOTENCY_S: Final = 24 * 3_600


@dataclass(frozen=True, slots=True)
class Order:
    """A batch as it was asked for. window_s: the time until it expires, of which `completion_window` is the name."""

    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    window_s: int = 24 * 3_600
    metadata: Mapping[str, str] | None = None
    output_expires_s: int | None = None
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some lines that are done, written into the store under `name`. lines: their numbers, from 1.

    completed, failed: how many of them were answered, and how many got an error.
    """

    name: str
    kind: Kind
    lines: Sequence[int]
    completed: int = 0
    failed: int = 0
    usage: Usage = NOTHING


@dataclass(frozen=True, slots=True)
class Progress:
    """What is done of a batch. done: a bitmap, the bit of line 1 is 1. chunks: in the order of their commits."""

    done: bytes = b""
    chunks: tuple[tuple[Kind, str], ...] = ()

    def is_done(self, line: int) -> bool:
        index, bit = divmod(line, 8)
        return index < len(self.done) and bool(self.done[index] & (0x80 >> bit))

    @property
    def num_done(self) -> int:
        return int.from_bytes(self.done).bit_count()


class Ledger:
    """Whoever assembles a batch takes its fence with `begin`; what it does after another one's `begin` is BatchTaken.

    Every method raises QueueUnavailable when Redis does not answer, and BatchUnknown for a record that is gone.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def create(self, order: Order) -> Batch:
        """Under an idempotency key that is known: the batch that exists.

        Raises FileUnknown where the input file has just been deleted, IdempotencyConflict.
        """
        batch_id, key = new_batch_id(), order.idempotency_key
        idem = BatchKeys.idempotency(order.tenant, key) if key else ""
        own = {
            "endpoint": order.endpoint,
            "completion_window": order.completion_window,
            "metadata": None if order.metadata is None else orjson.dumps(order.metadata),
            "output_expires_s": order.output_expires_s,
        }
        pairs = [part for name, value in own.items() if value is not None for part in (name, value)]
        said: list[scripts.Argument] = [
            batch_id,
            order.tenant,
            order.input_file_id,
            order.window_s,
            idem,
            _digest(order),
            IDEMPOTENCY_S,
        ]
        word, *rest = await self._call("create_batch", [BatchKeys.batch(batch_id)], [*said, *pairs])
        if word == b"conflict":
            raise IdempotencyConflict("this idempotency key belongs to a batch that was asked for with another body")
        if word == b"no_file":
            raise FileUnknown(order.input_file_id)
        return Batch.decode(rest[1].decode(), _mapping(rest[0]))

    async def find(self, batch_id: str) -> Batch:
        if not is_batch_id(batch_id):
            raise BatchUnknown(batch_id)
        async with answering():
            stored = await self._redis.hgetall(BatchKeys.batch(batch_id))
        if b"state" not in stored:
            raise BatchUnknown(batch_id)
        return Batch.decode(batch_id, cast(Mapping[bytes, bytes], stored))

    async def now(self) -> float:
        """The clock by which batches expire, Unix time: those of APIs and assemblers may differ."""
        async with answering():
            seconds, microseconds = await self._redis.time()
        return seconds + microseconds / 1e6

    async def cancel(self, batch_id: str) -> Batch:
        """validating or in_progress -> cancelling; any other state stays as it is."""
        return await self._batch("cancel_batch", batch_id, [])

    async def begin(self, batch_id: str) -> Batch:
        """Take the batch: `Batch.fence` is the caller's from now on. One that has ended is only told."""
        return await self._batch("begin_batch", batch_id, [])

    async def accept(self, batch: Batch, *, total: int, model: str | None) -> Batch:
        """The input file is valid: validating -> in_progress. Raises BatchTaken."""
        return await self._fenced("accept_batch", batch, [total, model or ""])

    async def refuse(self, batch: Batch, errors: Sequence[LineError]) -> Batch:
        """The input file is not valid: -> failed, with the first MAX_ERRORS reasons. Raises BatchTaken."""
        told = orjson.dumps([asdict(error) for error in errors[:MAX_ERRORS]])
        return await self._fenced("refuse_batch", batch, [batch.id, told])

    async def commit(self, batch: Batch, chunks: Sequence[Chunk]) -> Batch:
        """Chunks that lie in the store count from now on, all of them or none. Raises BatchTaken.

        The batch comes back as it stands, so that its assembler hears of a cancel.
        """
        usage = sum((chunk.usage for chunk in chunks), NOTHING)
        counts = [sum(chunk.completed for chunk in chunks), sum(chunk.failed for chunk in chunks)]
        tokens = [getattr(usage, field.name) for field in fields(Usage)]
        names = [f"{chunk.kind} {chunk.name}" for chunk in chunks]
        lines = [line for chunk in chunks for line in chunk.lines]
        keys = [BatchKeys.done(batch.id), BatchKeys.chunks(batch.id)]
        return await self._fenced("commit_chunks", batch, [*counts, *tokens, len(names), *names, *lines], keys)

    async def progress(self, batch_id: str) -> Progress:
        """What is committed."""
        async with answering():
            done = await self._redis.get(BatchKeys.done(batch_id))
            names = await self._redis.lrange(BatchKeys.chunks(batch_id), 0, -1)
        chunks = [_text(name).split(" ", 1) for name in names]
        return Progress(cast(bytes, done or b""), tuple((cast(Kind, kind), name) for kind, name in chunks))

    async def finalize(self, batch: Batch) -> Batch:
        """No line is left: in_progress -> finalizing. One that is being cancelled stays so. Raises BatchTaken."""
        return await self._fenced("finalize_batch", batch, [])

    async def end(
        self,
        batch: Batch,
        state: Literal["completed", "expired", "cancelled"],
        *,
        output: FileRecord | None,
        error: FileRecord | None,
        keep_s: int | None = None,
    ) -> Batch:
        """The batch has ended, and its files are there: their content lies in the store already. Raises BatchTaken.

        keep_s: the life of its files where the batch asks for none.
        """
        life_s = batch.output_expires_s or keep_s
        files = [("output_file_id", output), ("error_file_id", error)]
        told = [part for field, file in files if file is not None for part in (field, *file_arguments(file, life_s))]
        return await self._fenced("end_batch", batch, [batch.id, state, *told])

    async def forget(self, batch_id: str) -> None:
        """Drop the record of a batch that has ended."""
        await self._call("forget_batch", [BatchKeys.batch(batch_id)], [batch_id])

    async def _fenced(
        self, name: str, batch: Batch, arguments: Sequence[scripts.Argument], keys: Sequence[str] = ()
    ) -> Batch:
        return await self._batch(name, batch.id, [batch.fence, *arguments], keys)

    async def _batch(
        self, name: str, batch_id: str, arguments: Sequence[scripts.Argument], keys: Sequence[str] = ()
    ) -> Batch:
        if not is_batch_id(batch_id):
            raise BatchUnknown(batch_id)
        word, *rest = await self._call(name, [BatchKeys.batch(batch_id), *keys], arguments)
        if word == b"unknown":
            raise BatchUnknown(batch_id)
        if word == b"taken":
            raise BatchTaken(batch_id)
        if word == b"repeated":
            raise JitneyError(f"line {_text(rest[0])} of batch {batch_id} would be written twice")
        return Batch.decode(batch_id, _mapping(rest[0]))

    async def _call(self, name: str, keys: Sequence[str], arguments: Sequence[scripts.Argument]) -> list[Any]:
        return await call(self._redis, name, keys, arguments)


async def call(redis: Redis, name: str, keys: Sequence[str], arguments: Sequence[scripts.Argument]) -> list[Any]:
    """Run a script of batches. Raises QueueUnavailable."""
    async with answering():
        reply = await scripts.run(redis, scripts.load(name, room=ROOM), scripts.Call(keys, [BATCHES, *arguments]))
    return cast(list[Any], reply)


def file_arguments(file: FileRecord, life_s: int | None) -> list[scripts.Argument]:
    """What the scripts take of a file."""
    return [file.id, file.tenant, file.filename, file.purpose, file.num_bytes, "" if life_s is None else life_s]


def _digest(order: Order) -> str:
    asked = {name: value for name, value in asdict(order).items() if name != "idempotency_key"}
    return hashlib.sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)).hexdigest()[:40]


def _mapping(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value

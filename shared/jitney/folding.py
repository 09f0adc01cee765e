"""Reading a job's log, whether it is still a stream or already folded to one compressed string."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from jitney.connection import Redis
from jitney.keys import JobId, Keys

PAGE = 256


def pack_log(payloads: Sequence[bytes]) -> bytes:
    """The whole log: its events in order, one a line (JSON has no raw newline), compressed."""
    return zlib.compress(b"\n".join(payloads))


def unpack_log(packed: bytes) -> list[bytes]:
    """The inverse of `pack_log`. Event number i has seq i + 1."""
    return zlib.decompress(packed).split(b"\n")


async def read_stream(redis: Redis, keys: Keys, id: JobId) -> list[bytes]:
    """All events of a log that is a stream, in pages, so that no call holds up the server."""
    payloads: list[bytes] = []
    start = b"-"
    while True:
        entries: Any = await redis.xrange(keys.tokens(id), min=start, count=PAGE)
        payloads += _payloads(entries)
        if len(entries) < PAGE:
            return payloads
        start = b"(" + entries[-1][0]


async def read_log(redis: Redis, keys: Keys, id: JobId, after_seq: int, count: int) -> list[bytes] | None:
    """At most `count` events after `after_seq`; None if nothing of the job is left.

    The stream is read first: folding replaces it by the string in one step, so what is not in
    the one is then in the other.
    """
    pipeline = redis.pipeline(transaction=False)
    pipeline.xrange(keys.tokens(id), min=f"({after_seq}-0", count=count)
    pipeline.exists(keys.job(id), keys.tokens(id))
    pipeline.get(keys.result(id))
    entries, num_known, packed = await pipeline.execute()
    if entries:
        return _payloads(entries)
    if packed is not None:
        return unpack_log(packed)[after_seq : after_seq + count]
    return [] if num_known else None


def _payloads(entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[bytes]:
    """Entries without our field are not ours."""
    return [fields[b"e"] for _, fields in entries if b"e" in fields]

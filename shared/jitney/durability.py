"""`durability="strict"`: an accepted job is on disk, and that is checked, not hoped for.

Two proofs, both in the round trip of the enqueue itself. `always`: with appendfsync always the server
answers only after the disk has, so it is enough that the setting still holds. `waitaof`: WAITAOF after the
write, on the same connection.

WAITAOF alone is not trusted. Since redis/redis#12622 servers with appendfsync everysec may answer it before
the data is on disk (redis/redis#13793 mends it; Valkey 9.1 still does it), so it has to prove itself once:
under everysec two confirmations in a row cannot both come at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from redis.asyncio.client import Pipeline
from redis.exceptions import ResponseError

from jitney.calls import or_unavailable
from jitney.connection import Redis
from jitney.errors import NotDurable, SettingsError
from jitney.keys import Keys

Durability = Literal["default", "strict"]
Proof = Literal["always", "waitaof"]

WAIT_MS: Final = 3_000
"""Below the socket's timeout: what is late is told as such, not as a lost connection."""

SYNC_KEY_MS: Final = 60_000
HONEST_S: Final = 0.4
"""Under everysec a disk is flushed once a second; a second confirmation this soon after the first is none."""

ALWAYS: Final = "set appendonly yes and appendfsync always"


async def find_proof(redis: Redis, keys: Keys) -> Proof:
    """How this server can confirm that a job is on disk. Takes up to two seconds under everysec.

    Raises SettingsError that says what to change where it cannot; nothing but a short-lived key was written.
    """
    with or_unavailable():
        settings = await _settings(redis)
        if settings.get("appendonly") == "no":
            raise SettingsError(f"durability=strict, but Redis keeps no append-only file: {ALWAYS}")
        if settings.get("appendfsync") == "always":
            return "always"
        if settings.get("appendfsync") == "no":
            raise SettingsError(f"durability=strict, but Redis has appendfsync no and never flushes: {ALWAYS}")
        await _confirm(redis, keys)
        began = time.monotonic()
        await _confirm(redis, keys)
        if time.monotonic() - began >= HONEST_S:
            return "waitaof"
    if settings:
        why = "its WAITAOF answers before the data is on disk (redis/redis#13793)"
    else:
        why = "whether its WAITAOF waits for the disk cannot be told, because CONFIG GET is not allowed"
    raise SettingsError(f"durability=strict cannot be kept by this server: {why}; {ALWAYS}, or use durability=default")


async def _settings(redis: Redis) -> Mapping[str | None, str | None]:
    """Empty where the server does not say."""
    try:
        return await redis.config_get("appendonly", "appendfsync")
    except ResponseError:
        return {}


async def _confirm(redis: Redis, keys: Keys) -> None:
    pipeline = redis.pipeline(transaction=False)
    add_proof(pipeline, keys, "waitaof")
    answer = (await pipeline.execute(raise_on_error=False))[-1]
    if isinstance(answer, ResponseError):
        raise SettingsError(
            f"durability=strict, but this server cannot confirm a write (WAITAOF: {answer}): {ALWAYS}, or use a "
            "server that knows WAITAOF (Redis 7.2, Valkey 8), or use durability=default"
        )
    if isinstance(answer, Exception):
        raise answer
    if not _is_confirmed(answer):
        raise SettingsError(f"durability=strict, but Redis did not reach its disk within {WAIT_MS / 1e3:g} s: {ALWAYS}")


def add_proof(pipeline: Pipeline, keys: Keys, proof: Proof) -> None:
    """The commands that show whether what was written before them is on disk."""
    if proof == "always":
        pipeline.config_get("appendonly", "appendfsync")
        return
    # A write of this connection's own: after an enqueue that only found its job there, WAITAOF would wait
    # for nothing. The file is one sequence, so what lies before this lies on disk with it.
    pipeline.set(keys.sync, "1", px=SYNC_KEY_MS)
    pipeline.execute_command("WAITAOF", 1, 0, WAIT_MS)


def check_proof(proof: Proof, answers: Sequence[Any], job_id: str) -> None:
    """Raises NotDurable unless the answers to `add_proof`'s commands confirm the job."""
    last = answers[-1]
    if isinstance(last, Exception):
        raise NotDurable(f"job {job_id} was written, but is not known to be on disk: {last}", job_id=job_id)
    if proof == "waitaof":
        if not _is_confirmed(last):
            late = f"job {job_id} was written, but was not on disk within {WAIT_MS / 1e3:g} s"
            raise NotDurable(late, job_id=job_id)
    elif (last.get("appendonly"), last.get("appendfsync")) != ("yes", "always"):
        raise NotDurable(
            f"job {job_id} was written, but Redis now has appendonly {last.get('appendonly')} and "
            f"appendfsync {last.get('appendfsync')}: {ALWAYS}",
            job_id=job_id,
        )


def _is_confirmed(answer: Sequence[int]) -> bool:
    return int(answer[0]) >= 1

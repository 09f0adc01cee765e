"""What each queue held, over the last day: one sample for each span of some seconds, whoever takes it.

`{jitney:<queue>}:history`, a stream. Ids: `<span's beginning, Unix milliseconds>-0`. Fields, whole numbers:
`waiting` (jobs), `waiting_tokens` (of their prompts), `running` (jobs), `workers`, `generated_tokens` (by the workers
that live now, since each of them began: a rate is a difference, and one below 0 is a worker that has left).
"""

from __future__ import annotations

from typing import Any, Final

from redis.exceptions import ResponseError

from jitney.connection import Redis
from jitney.keys import BANDS, Keys
from jitney.queue import Queue
from jitney.workers import list_workers

SPAN_S: Final = 15
MAX_SAMPLES: Final = 24 * 3_600 // SPAN_S
KEEP_MS: Final = 2 * 24 * 3_600 * 1_000
"""A queue that nobody looks after any more is forgotten."""


async def take_sample(redis: Redis, queue: Queue) -> bool:
    """Write this span's sample. False if somebody has."""
    keys = queue.keys
    seconds, _ = await redis.time()
    fields = await _measure(redis, queue)
    try:
        await redis.xadd(
            keys.history, fields, id=f"{seconds // SPAN_S * SPAN_S * 1_000}-0", maxlen=MAX_SAMPLES, approximate=True
        )
    except ResponseError as error:
        if "equal or smaller" not in str(error):
            raise
        return False
    await redis.pexpire(keys.history, KEEP_MS)
    return True


async def _measure(redis: Redis, queue: Queue) -> dict[Any, Any]:
    keys: Keys = queue.keys
    num_waiting, num_tokens = await queue.counts()
    pipeline = redis.pipeline(transaction=False)
    for band in BANDS:
        pipeline.zcard(keys.leases(band))
    running = await pipeline.execute()
    workers = await list_workers(redis, queue.name)
    return {
        "waiting": num_waiting,
        "waiting_tokens": num_tokens,
        "running": sum(running),
        "workers": len(workers),
        "generated_tokens": sum(worker.num_generated_tokens for worker in workers),
    }

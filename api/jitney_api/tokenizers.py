"""The queues' tokenizers, as their workers published them: loaded once, used on threads, a bounded number of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from redis.exceptions import RedisError

from jitney.connection import Redis
from jitney.errors import JitneyError, ModelError
from jitney.logs import logger
from jitney.published import fetch_tokenizer
from jitney.single_flight import SingleFlight
from jitney.text.files import TokenizerFiles
from jitney.text.tokenizer import Tokenizer, refusing_damage

MISSING_FOR_S: Final = 5.0
"""As long as a queue's card is kept: a worker that publishes now is seen as soon."""

MAX_KNOWN_MISSING: Final = 1_000

MAX_WAITING: Final = 64
"""Calls that wait for a thread. Beyond it a job goes on with an estimate rather than later."""

Made = TypeVar("Made")
_log = logger(part="tokenizers")


class TokenizersBusy(JitneyError):
    """Every thread has more to encode than it should keep anybody waiting for."""

    type = "service_unavailable_error"
    code = "tokenizer_busy"


class NoTokenizer(JitneyError):
    """No worker has published the tokenizer of a queue."""

    type = "service_unavailable_error"
    code = "tokenizer_unavailable"

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"the tokenizer of {queue} is not published: no worker of this version has served it, or it is too large"
        )


class Tokenizers:
    """By digest. The least recently used one is forgotten when there are more than `max_loaded`."""

    def __init__(self, redis: Redis, *, max_loaded: int, num_threads: int) -> None:
        self._redis = redis
        self._max_loaded = max_loaded
        self._pool = ThreadPoolExecutor(num_threads, "jitney-tokenizer")
        self._num_waiting = 0
        self._loaded: OrderedDict[str, Tokenizer] = OrderedDict()
        self._missing: dict[str, float] = {}
        self._loading = SingleFlight[Tokenizer | None]()

    async def find(self, digest: str) -> Tokenizer | None:
        """The tokenizer with this digest; None where there is none to be had, which is asked again after a while."""
        known = self._loaded.get(digest)
        if known is not None:
            self._loaded.move_to_end(digest)
            return known
        now = asyncio.get_running_loop().time()
        if not digest or self._missing.get(digest, 0.0) > now:
            return None
        return await self._loading.ask(digest, lambda: self._load(digest))

    async def run(self, call: Callable[..., Made], *args: Any, **options: Any) -> Made:
        """`call` on a thread. Raises TokenizersBusy when too many wait for one already, and what `call` raises."""
        if self._num_waiting >= MAX_WAITING:
            raise TokenizersBusy("too many texts wait to be encoded; try again")
        self._num_waiting += 1
        running = asyncio.get_running_loop().run_in_executor(self._pool, partial(call, *args, **options))
        # Counted until the thread is done with it, also when nobody waits for it any more.
        running.add_done_callback(self._done)
        return await running

    def _done(self, _: object) -> None:
        self._num_waiting -= 1

    async def aclose(self) -> None:
        """End what is being loaded. What a thread is at is not waited for."""
        await self._loading.aclose()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _load(self, digest: str) -> Tokenizer | None:
        try:
            packed = await fetch_tokenizer(self._redis, digest)
            tokenizer = None if packed is None else await self.run(_unpacked, packed, digest)
        except TokenizersBusy:
            return None
        except (RedisError, OSError, ModelError) as error:
            # Whoever asked goes on without, and hears of a Redis that is away when the job is to be written.
            _log.warning("tokenizer_not_loaded", digest=digest, error=str(error))
            tokenizer = None
        if tokenizer is None:
            self._forget(digest)
            return None
        self._loaded[digest] = tokenizer
        while len(self._loaded) > self._max_loaded:
            self._loaded.popitem(last=False)
        return tokenizer

    def _forget(self, digest: str) -> None:
        if len(self._missing) >= MAX_KNOWN_MISSING:
            self._missing.clear()
        self._missing[digest] = asyncio.get_running_loop().time() + MISSING_FOR_S


def _unpacked(packed: bytes, digest: str) -> Tokenizer:
    with refusing_damage(f"published tokenizer {digest[:12]}"):
        files = TokenizerFiles.unpack(packed)
        if files.digest != digest:
            raise ModelError(f"what is published as {digest[:12]} is another tokenizer, {files.digest[:12]}")
        return Tokenizer(files)

"""Does this server keep what it has accepted? Asked at start and with every round of the janitor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import redis.exceptions

from jitney.checks import Finding
from jitney.connection import Redis
from jitney.errors import SettingsError
from jitney.logs import logger
from jitney.server_checks import Seen, check_eviction, check_persistence

_Check = Callable[[Seen], Finding]

CHECKS: Final[tuple[tuple[_Check, str], ...]] = (
    (check_eviction, "server_may_evict_jobs"),
    (check_persistence, "server_may_lose_jobs"),
)
"""Each with the event that says what is wrong."""


class ServerWatch:
    """Says each finding once, and again when it has changed: somebody may have typed CONFIG SET."""

    def __init__(self, redis_client: Redis, *, queue: str) -> None:
        self._redis = redis_client
        self._said: dict[str, Finding] = {}
        self._log = logger(part="server", queue=queue)

    async def look(self) -> Seen:
        """Ask, and say what is new. What may not be asked is unknown. Raises the errors of a server that is away."""
        seen = await self._see()
        for check, event in CHECKS:
            finding, before = check(seen), self._said.get(event)
            if finding != before:
                self._said[event] = finding
                self._say(event, finding, before)
        return seen

    async def admit(self, *, allow_evicting: bool) -> None:
        """The first look. Raises SettingsError for a server that throws accepted jobs away when its memory is full."""
        try:
            seen = await self.look()
        except (redis.exceptions.RedisError, OSError):
            return  # it is not there yet; the janitor looks again
        if evicts_any_key(seen) and not allow_evicting:
            raise SettingsError(
                f"maxmemory-policy {seen.info['maxmemory_policy']} lets the server throw accepted jobs away when its "
                "memory is full: set maxmemory-policy noeviction, or accept the loss with "
                "worker.allow_evicting_server=true"
            )

    async def _see(self) -> Seen:
        info: dict[str, Any] = {}
        with contextlib.suppress(redis.exceptions.ResponseError):  # this user may not ask
            info = dict(await self._redis.info())
        return Seen(info=info, settings={}, commands={})

    def _say(self, event: str, finding: Finding, before: Finding | None) -> None:
        fields = {"found": finding.found, "advice": finding.advice}
        if finding.verdict == "fail":
            self._log.error(event, **fields)
        elif finding.verdict == "warn":
            self._log.warning(event, **fields)
        elif finding.verdict == "unknown":
            self._log.info("server_hides_setting", setting=finding.name, **fields)
        elif before is not None:
            self._log.info("server_setting_mended", setting=finding.name, **fields)


def evicts_any_key(seen: Seen) -> bool:
    """True if waiting and running jobs may be evicted: their keys have no time to live, so volatile-* spares them."""
    return str(seen.info.get("maxmemory_policy", "")).startswith("allkeys") and seen.info.get("maxmemory", 0) != 0

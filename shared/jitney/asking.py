"""Requests to an API that may be restarting just now: what is sent again, how often, and when it is enough."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import httpx2
import orjson

from jitney.connection import pause_s
from jitney.errors import JitneyError, QueueUnavailable, first_line
from jitney.http_errors import error_of_answer, retry_after_s

CONNECT_TIMEOUT_S: Final = 5.0
CALL_TIMEOUT_S: Final = 10.0
"""Of one attempt. An API whose Redis hangs answers 503 after half of it."""

MAX_CALL_OUTAGE_S: Final = 15.0
MAX_CALLS_AT_ONCE: Final = 32
LOST: Final = (httpx2.TransportError, httpx2.DecodingError)
"""No answer, or none to its end: nobody knows whether the request was carried out."""


class Outage:
    """How long nobody has answered, and the pauses between attempts.

    began_at: of a call, whose whole time is bounded; absent: the first failure.
    """

    def __init__(self, max_s: float, *, began_at: float | None = None) -> None:
        self._max_s = max_s
        self._began_at = began_at
        self._num_failures = 0

    def end(self) -> None:
        """Somebody has answered."""
        self._began_at, self._num_failures = None, 0

    async def wait_out(self, error: JitneyError, *, at_least_s: float = 0.0) -> None:
        """Pause before the next attempt. Raises `error` when there is no time for another one."""
        now = asyncio.get_running_loop().time()
        if self._began_at is None:
            self._began_at = now
        self._num_failures += 1
        wait_s = max(at_least_s, pause_s(self._num_failures))
        if now + wait_s - self._began_at > self._max_s:
            raise error
        await asyncio.sleep(wait_s)


class Api:
    """One API: its address, its key, its connections. The key is in none of its errors, and not in its repr.

    agent: what the API's log may call us. is_near: it runs on this machine. call_timeout_s: of one attempt.
    max_outage_s: of all attempts of a call together.
    """

    def __init__(
        self, url: str, *, api_key: str | None, agent: str, is_near: bool, call_timeout_s: float, max_outage_s: float
    ) -> None:
        headers = {"user-agent": agent, "accept-encoding": "identity"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers=headers,
            # Every open stream holds a connection: a bound would be a bound on streams, and those beyond it would hang.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=MAX_CALLS_AT_ONCE),
            timeout=httpx2.Timeout(call_timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            # What stays on this machine goes through no proxy of the environment.
            trust_env=not is_near,
            follow_redirects=False,
        )
        self._max_outage_s = max_outage_s
        self._slots = asyncio.Semaphore(MAX_CALLS_AT_ONCE)
        self.is_closed = False

    async def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[dict[str, Any], int]:
        """The answer's object, and how often it was asked for. Only for what may be carried out twice.

        Raises what the API raised; QueueUnavailable when nobody answered for `max_outage_s`.
        """
        outage = Outage(self._max_outage_s, began_at=asyncio.get_running_loop().time())
        headers = {} if body is None else {"content-type": "application/json"}
        num_asked = 0
        while True:
            num_asked += 1
            wait_s = 0.0
            self.check_open()
            try:
                async with self._slots:
                    answer = await self._http.request(method, path, content=body, headers=headers)
            except LOST as lost:
                error: JitneyError = self.silence(lost)
            else:
                if answer.is_success:
                    return _object(answer.content), num_asked
                error = error_of_answer(answer.status_code, answer.headers, answer.content)
                if not passes(error, answer.headers):
                    raise error
                wait_s = retry_after_s(answer.headers)
            await outage.wait_out(error, at_least_s=wait_s)

    def stream(
        self, path: str, headers: dict[str, str], *, read_timeout_s: float
    ) -> AbstractAsyncContextManager[httpx2.Response]:
        """`async with` it: the answer to a GET whose body comes bit by bit, within `read_timeout_s` of each other."""
        timeout = httpx2.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
        return self._http.stream("GET", path, headers=headers, timeout=timeout)

    def silence(self, lost: Exception) -> QueueUnavailable:
        """What a lost connection is to a caller."""
        self.check_open()
        error = QueueUnavailable(f"the API does not answer: {type(lost).__name__}: {first_line(lost)}")
        error.__cause__ = lost
        return error

    def check_open(self) -> None:
        if self.is_closed:
            raise QueueUnavailable("the client was closed")

    async def aclose(self) -> None:
        self.is_closed = True
        await self._http.aclose()


def passes(error: JitneyError, headers: Mapping[str, str]) -> bool:
    """Whether a later attempt may be answered otherwise: an API that starts, a Redis that comes back."""
    return isinstance(error, QueueUnavailable) and headers.get("x-should-retry") != "false"


def _object(body: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise JitneyError("the answer is not that of a jitney API: is this its address?")
    return answer

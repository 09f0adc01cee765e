"""The link by the API: `/v1/jobs`, for those who must not hold the Redis URL."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import orjson

from jitney.asking import CALL_TIMEOUT_S, MAX_CALL_OUTAGE_S, Api
from jitney.channel import MAX_OUTAGE_S
from jitney.errors import InvalidJob, JitneyError
from jitney.http_reading import READ_TIMEOUT_S, HttpReader
from jitney.keys import JobId, queue_of
from jitney.messages import JobSpec
from jitney.position import Message
from jitney.records import JobStatus
from jitney.settings import is_loopback
from jitney.submission import check_idempotency_key


class HttpLink:
    """Jobs of one API, as the tenant of its key. See `jitney.link.Link`.

    Every job goes under an idempotency key, drawn here when the caller has none: a request whose answer was lost is
    sent again, and is then the same job. (`on_disconnect` does not change: nobody waits in the request for the job.)
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        destination: str | None,
        name: str,
        read_timeout_s: float = READ_TIMEOUT_S,
        max_outage_s: float = MAX_OUTAGE_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
        max_call_outage_s: float = MAX_CALL_OUTAGE_S,
    ) -> None:
        self._destination = destination
        self._api = Api(
            url,
            api_key=api_key,
            agent=f"{name}/{version('jitney')}",
            is_near=is_loopback(urlsplit(url).hostname or ""),
            call_timeout_s=call_timeout_s,
            max_outage_s=max_call_outage_s,
        )
        self._reader = HttpReader(self._api, read_timeout_s=read_timeout_s, max_outage_s=max_outage_s)

    async def enqueue(
        self,
        spec: JobSpec,
        *,
        queue: str | None,
        idempotency_key: str | None,
        num_prompt_tokens: int | None = None,
    ) -> JobId:
        """num_prompt_tokens: not sent, the API counts for itself."""
        key = check_idempotency_key(idempotency_key) or f"once-{secrets.token_urlsafe(16)}"
        body = _body(spec, model=queue or self._destination, idempotency_key=key)
        answer, _ = await self._api.ask("POST", "/v1/jobs", body)
        return JobId(_member(answer, "id"))

    def follow(
        self, job_id: str, cursor: int = 0
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[list[Message]]]:
        """See `HttpReader.follow`."""
        return self._reader.follow(job_id, cursor)

    async def cancel(self, job_id: JobId) -> bool:
        """False if it had already ended. Raises JobNotFound."""
        answer, num_asked = await self._api.ask("DELETE", _path(job_id))
        # Asked again because an answer was lost: who else would have cancelled it just then?
        return bool(_member(answer, "cancelled")) or (num_asked > 1 and _member(answer, "status") == "cancelled")

    async def status(self, job_id: JobId) -> JobStatus:
        """Raises JobNotFound."""
        answer, _ = await self._api.ask("GET", _path(job_id))
        told = {name: _member(answer, name) for name in _TOLD}
        return JobStatus(**told, tries=_member(answer, "attempts"), owner="")

    async def aclose(self) -> None:
        await self._api.aclose()


_TOLD = tuple(name for name in JobStatus.__dataclass_fields__ if name not in ("tries", "owner"))


def _path(job_id: JobId) -> str:
    queue_of(job_id)  # or a made-up id could be another path
    return f"/v1/jobs/{job_id}"


def _body(spec: JobSpec, *, model: str | None, idempotency_key: str) -> bytes:
    """The request of `/v1/jobs`: one flat object. Raises InvalidJob."""
    spec.encode()  # the same limits as by Redis, said before anything is sent
    if spec.tenant != "-":
        raise InvalidJob(f"tenant={spec.tenant!r}: over HTTP the tenant is that of the API key", param="tenant")
    fields = spec.model_dump(mode="json", exclude_defaults=True)
    sampling = fields.pop("sampling", {})
    named = {} if model is None else {"model": model}
    try:
        return orjson.dumps({**fields, **sampling, **named, "idempotency_key": idempotency_key})
    except TypeError as error:
        what = "model or idempotency_key"  # the rest was encoded above
        raise InvalidJob(f"{what} is not valid JSON: {error}", param="idempotency_key") from None


def _member(answer: dict[str, Any], name: str) -> Any:
    try:
        return answer[name]
    except KeyError:
        raise JitneyError(f"the API's answer has no {name}: it is of an older version than this client") from None

"""How a client reaches its jobs: by Redis, or by the API for those who must not hold the Redis URL."""

from __future__ import annotations

from typing import Protocol, TypedDict, get_args

from jitney.durability import Durability
from jitney.errors import InvalidJob, SettingsError
from jitney.keys import JobId
from jitney.messages import JobSpec
from jitney.reading import Reader
from jitney.records import JobStatus, Limits
from jitney.redis_link import RedisLink
from jitney.settings import client_settings, is_http, usable_api_url, usable_key, usable_url


class Link(Reader, Protocol):
    """What every client is made of. Belongs to one event loop."""

    async def enqueue(
        self, spec: JobSpec, *, queue: str | None, idempotency_key: str | None, num_prompt_tokens: int | None
    ) -> JobId:
        """The id of the job, an earlier one's if the idempotency key is known. queue: absent = the link's own.

        num_prompt_tokens: for the queue's bounds, where somebody has counted them.
        """
        ...

    async def cancel(self, job_id: JobId) -> bool:
        """End the job now. False if it had already ended. Raises JobNotFound."""
        ...

    async def status(self, job_id: JobId) -> JobStatus:
        """Where the job stands. Raises JobNotFound."""
        ...

    async def aclose(self) -> None:
        """Close the connections; what is still read raises QueueUnavailable."""
        ...


class ClientOptions(TypedDict, total=False):
    """What a client may be told besides its server's address.

    api_key: for the API; absent: `JITNEY_API_KEY`. allow_plain_http: let the key go over http:// to another machine,
    where everybody on the way can read it. queue, model: where jobs go; absent: the only queue there is.
    limits: bounds on what may wait. durability: `default` = as safe as the server is set up to be; `strict` = an
    accepted job is on disk, or `enqueue` raises (SettingsError where the server cannot confirm that, NotDurable where
    it does not in time). Both of these are the API's own over HTTP, and refused here. name: in the server's lists.
    """

    api_key: str | None
    allow_plain_http: bool
    queue: str | None
    model: str | None
    limits: Limits | None
    durability: Durability | None
    name: str


def link_to(
    url: str | None = None,
    *,
    api_key: str | None = None,
    allow_plain_http: bool = False,
    queue: str | None = None,
    model: str | None = None,
    limits: Limits | None = None,
    durability: Durability | None = None,
    name: str = "jitney-client",
) -> Link:
    """The link to a server. Opens no connection yet. Raises SettingsError, InvalidJob.

    url: `redis://…`, `rediss://…` or `unix://…`; `http://…` or `https://…`; absent: as `ClientSettings` finds it.
    """
    settings = client_settings()
    if queue is not None and model is not None:
        raise InvalidJob("give queue or model, not both", param="queue")
    destination = queue or model or settings.queue or settings.model
    durability = durability or settings.durability
    if durability not in get_args(Durability):
        raise SettingsError(f"durability={durability!r} must be one of {', '.join(get_args(Durability))}")
    address = url or settings.address
    if not is_http(address):
        if api_key is not None:
            raise SettingsError("api_key opens an API, and the url is none: give http://… or https://…, or no api_key")
        return RedisLink(
            usable_url(address), destination=destination, limits=limits or Limits(), durability=durability, name=name
        )
    if limits is not None:
        raise SettingsError("limits: over HTTP the API has its own (JITNEY_API__MAX_WAITING_JOBS and its kin)")
    if durability == "strict":
        raise SettingsError(
            "durability=strict: over HTTP it is the API's to promise (JITNEY_DURABILITY, where it runs)"
        )
    address = usable_api_url(address)
    if api_key is None and settings.api_key is not None:
        api_key = settings.api_key.get_secret_value()
    key = (
        None if api_key is None else usable_key(address, api_key, allowed=allow_plain_http or settings.allow_plain_http)
    )
    return _http_link(address, key, destination, name)


def _http_link(url: str, api_key: str | None, destination: str | None, name: str) -> Link:
    """Imported only now: most clients need no HTTP."""
    try:
        from jitney.http_link import HttpLink
    except ModuleNotFoundError as error:
        if error.name != "httpx2":
            raise
        raise SettingsError(
            "a client over HTTP needs httpx2, which is not installed: pip install 'jitney[http]'"
        ) from None
    return HttpLink(url, api_key=api_key, destination=destination, name=name)

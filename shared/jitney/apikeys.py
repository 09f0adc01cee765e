"""API keys: who may ask over HTTP, on whose behalf, and for what. The keys themselves are kept nowhere."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Final, Literal, get_args

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from redis.exceptions import WatchError

from jitney.connection import Redis
from jitney.errors import InvalidJob
from jitney.keys import API_KEYS, check_tenant
from jitney.sampling import explain

Scope = Literal["generate", "read", "admin", "metrics"]
"""generate: start and cancel jobs. read: models, jobs and their answers. admin: what all tenants do to the service.
metrics: the numbers of it, for Prometheus."""

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
SECRET_PREFIX: Final = "jitney_"
SECRET_BYTES: Final = 32


class ApiKey(BaseModel):
    """What is known of a key. name: for people and logs. sha256: of the key itself, in hex digits.

    tenant: whose jobs its holder starts and sees; several keys may have one. created: Unix seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str = "-"
    scopes: tuple[Scope, ...] = Field(("generate", "read"), min_length=1)
    created: float = 0.0

    @field_validator("tenant")
    @classmethod
    def _tenant(cls, value: str) -> str:
        try:
            return check_tenant(value)
        except InvalidJob as error:
            raise ValueError(str(error)) from None

    def encode(self) -> bytes:
        return orjson.dumps(self.model_dump(exclude={"sha256"}))

    @classmethod
    def decode(cls, sha256: str, stored: bytes) -> ApiKey | None:
        """None for bytes that are no key. A field that is not known here may be a limit: it makes none, too."""
        try:
            fields = orjson.loads(stored)
            return cls(**{**fields, "sha256": sha256})
        except (orjson.JSONDecodeError, TypeError, ValidationError):
            return None


def new_secret() -> str:
    """A new key: 256 random bits. The prefix is what scanners for leaked secrets look for."""
    return SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def digest_of_secret(secret: bytes) -> str:
    """What is kept of a key. Plain SHA-256: nobody can try 2^256 keys, so no slow hash has to hold them up."""
    return hashlib.sha256(secret).hexdigest()


def make_key(name: str, *, tenant: str, scopes: Sequence[str]) -> tuple[str, ApiKey]:
    """A new key and what is kept of it. Raises InvalidJob that names the field."""
    secret = new_secret()
    fields = {"name": name, "tenant": tenant, "scopes": tuple(scopes)}
    try:
        return secret, ApiKey.model_validate({**fields, "sha256": digest_of_secret(secret.encode())})
    except ValidationError as error:
        raise explain(error) from None


async def add_key(redis: Redis, key: ApiKey) -> ApiKey:
    """Let the key in, dated by the server's clock. Raises InvalidJob when one of that name is there."""
    now, _ = await redis.time()
    dated = key.model_copy(update={"created": float(now)})
    async with redis.pipeline(transaction=True) as pipeline:
        while True:
            try:
                await pipeline.watch(API_KEYS)
                if any(other.name == key.name for other in await list_keys(redis)):
                    taken = f"there is a key {key.name!r} already: revoke it first, or take another name"
                    raise InvalidJob(taken, param="name", code="name_taken")
                pipeline.multi()  # type: ignore[no-untyped-call]
                pipeline.hset(API_KEYS, dated.sha256, dated.encode())
                await pipeline.execute()
                return dated
            except WatchError:
                continue


async def find_key(redis: Redis, sha256: str) -> ApiKey | None:
    """The key with this digest."""
    stored = await redis.hget(API_KEYS, sha256)
    return None if stored is None else ApiKey.decode(sha256, _bytes(stored))


async def list_keys(redis: Redis) -> list[ApiKey]:
    """Every key, in order of name. What is none is left out: nobody gets in with it."""
    stored = await redis.hgetall(API_KEYS)
    found = [ApiKey.decode(_bytes(sha256).decode("utf-8", "replace"), _bytes(one)) for sha256, one in stored.items()]
    return sorted((key for key in found if key is not None), key=lambda key: key.name)


async def revoke_key(redis: Redis, name: str) -> bool:
    """Forget the key of that name. False if there is none."""
    digests = [key.sha256 for key in await list_keys(redis) if key.name == name]
    return bool(digests) and await redis.hdel(API_KEYS, *digests) > 0


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()

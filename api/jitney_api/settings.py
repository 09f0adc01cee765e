"""Settings of the HTTP side. Frozen: nobody changes them after the process has started."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import pydantic_settings
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from jitney.apikeys import ApiKey
from jitney.errors import SettingsError
from jitney.messages import MAX_BODY_BYTES
from jitney.queue import Limits
from jitney.sampling import explain
from jitney.settings import is_loopback
from jitney_api.batches.settings import BatchSettings

_LIMITS: Final = Limits()
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+|null|\*")


class ApiSettings(BaseSettings):
    """How the API listens, waits and refuses. Environment: `JITNEY_API__<NAME>`.

    A Kubernetes service called `jitney` sets `JITNEY_PORT=tcp://...` in every pod: that is why the
    section's name stands between prefix and setting.

    redis_url: absent: as every client finds it (`JITNEY_REDIS_URL`, the local stack, localhost).
    headers_hold_s: how long a stream waits for its first event before it answers 200; until then a refusal
    still gets its own status. keep_alive_s: silence after which a stream says a comment, so that proxies
    keep it open. write_timeout_s: a reader that takes nothing for so long is cut off (it can resume).
    header_timeout_s, body_timeout_s: the head of a request, and then its body, must have arrived within it.
    disconnect_grace_s: how long a job whose reader went away waits for somebody to come back before it is
    cancelled. drain_timeout_s: how long open streams may go on after SIGTERM. max_waiting_jobs,
    max_waiting_tokens, max_later_jobs: bounds of each queue, beyond which a request is told to come back later
    (429); 0 = no bound. num_tokenizer_threads: for counting prompts. max_tokenizers: kept in memory, some 60 MB
    each.

    access: `keys` = every route but those of docs/API_KEYS.md needs a key, one of `keys` or of `jitney keys add`;
    `open` = nobody is asked. Absent: `keys` where `keys` holds any, `open` on a loopback address, and a refusal to
    start elsewhere. key_cache_s: a revoked key may work for so long. cors_origins: whose web pages may read answers.
    batch: of files and batches, `JITNEY_BATCH__<NAME>`.
    """

    model_config = SettingsConfigDict(
        env_prefix="JITNEY_API__",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
    )

    redis_url: SecretStr | None = None
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65_535)
    headers_hold_s: float = Field(2.0, ge=0.0, le=600.0)
    keep_alive_s: float = Field(15.0, gt=0.0, le=600.0)
    write_timeout_s: float = Field(60.0, gt=0.0, le=3_600.0)
    header_timeout_s: float = Field(10.0, gt=0.0, le=3_600.0)
    body_timeout_s: float = Field(30.0, gt=0.0, le=3_600.0)
    disconnect_grace_s: float = Field(0.0, ge=0.0, le=3_600.0)
    drain_timeout_s: float = Field(20.0, ge=0.0, le=3_600.0)
    max_body_bytes: int = Field(MAX_BODY_BYTES, ge=1_024, le=MAX_BODY_BYTES)
    max_header_bytes: int = Field(65_536, ge=1_024)
    max_headers: int = Field(200, ge=16)
    max_waiting_jobs: int = Field(_LIMITS.max_waiting_jobs, ge=0)
    max_waiting_tokens: int = Field(_LIMITS.max_waiting_tokens, ge=0)
    max_later_jobs: int = Field(_LIMITS.max_later_jobs, ge=0)
    num_tokenizer_threads: int = Field(2, ge=1, le=64)
    max_tokenizers: int = Field(4, ge=1, le=1_000)
    access: Literal["open", "keys"] | None = None
    keys: tuple[ApiKey, ...] = ()
    key_cache_s: float = Field(5.0, ge=0.0, le=300.0)
    cors_origins: tuple[str, ...] = ()
    batch: BatchSettings = Field(default_factory=BatchSettings.load)

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin[:64]!r} is no origin: write it as https://host or https://host:port")
        return value

    @model_validator(mode="after")
    def _somebody_is_meant_to_come_in(self) -> ApiSettings:
        if self.access == "open" and self.keys:
            raise ValueError(f"access=open asks for no key, but keys holds {len(self.keys)}: leave one of them out")
        if self.access is None and not self.keys and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host} lets others in, and nobody is asked for a key. Ask them: "
                "JITNEY_API__ACCESS=keys, and `jitney keys add --name NAME` for each; or let everybody in who can "
                "reach it: JITNEY_API__ACCESS=open"
            )
        if "*" in self.cors_origins and not self.asks_for_keys:
            raise ValueError(
                "cors_origins=* lets every web page use an API that asks for no key: name the origins, or access=keys"
            )
        return self

    @property
    def asks_for_keys(self) -> bool:
        """Whether a request needs a key."""
        return self.access == "keys" or bool(self.keys)

    @property
    def limits(self) -> Limits:
        """What may wait in a queue, for `enqueue`."""
        return Limits(
            max_waiting_jobs=self.max_waiting_jobs,
            max_waiting_tokens=self.max_waiting_tokens,
            max_later_jobs=self.max_later_jobs,
        )

    @classmethod
    def load(cls, **given: Any) -> ApiSettings:
        """Settings from the environment, `given` ones first (None = not given). Raises SettingsError."""
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            raise SettingsError(_words_of(error)) from None
        except pydantic_settings.SettingsError as error:  # JSON was expected, and something else stands there
            field = re.search(r'field "(\w+)"', str(error))
            name = f"JITNEY_API__{field[1].upper()}" if field else "a setting of JITNEY_API__"
            raise SettingsError(f"{name} must be a list in JSON, such as {_EXAMPLES.get(name, '[]')}") from None


_EXAMPLES: Final = {
    "JITNEY_API__KEYS": "what `jitney keys add --for-settings` prints, between [ and ]",
    "JITNEY_API__CORS_ORIGINS": '["https://app.example"]',
}


def _words_of(error: ValidationError) -> str:
    """The first complaint. What was given for a key is not shown: it may be the key itself."""
    first = error.errors(include_url=False, include_input=False)[0]
    if not first["loc"]:
        return f"api: {first['msg'].removeprefix('Value error, ')}"
    if first["loc"][0] == "keys":
        where = ".".join(map(str, first["loc"]))
        return f"api.{where}: {first['msg'].removeprefix('Value error, ')} (`jitney keys add --for-settings` makes one)"
    return str(explain(error, prefix="api."))

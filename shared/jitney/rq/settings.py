"""Settings of `jitney rq-worker`. Frozen: nobody changes them after the process has started."""

from __future__ import annotations

import os
from typing import Any, Final

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from jitney.errors import SettingsError
from jitney.settings import check_url, client_settings

DEFAULT_QUEUE: Final = "jitney"


class RqSettings(BaseSettings):
    """How many jobs are held, and how the worker leaves. Environment: `JITNEY_RQ__<NAME>`.

    url: RQ's Redis. Absent: RQ's own `RQ_REDIS_URL`, else the one of every client (`JITNEY_REDIS_URL`, the local stack,
    localhost). concurrency: jobs held at once. drain_timeout_s: how long they may go on after SIGTERM; what has not
    ended then is given back. heartbeat_s: between two signs of life of every job; RQ takes one for abandoned that gave
    none for 60 s longer.
    """

    model_config = SettingsConfigDict(
        env_prefix="JITNEY_RQ__",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    url: SecretStr | None = None
    concurrency: int = Field(512, ge=1, le=10_000)
    drain_timeout_s: float = Field(20.0, ge=0.0, le=3_600.0)
    heartbeat_s: int = Field(30, ge=1, le=600)

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_url(value.get_secret_value())
        return value

    @classmethod
    def load(cls, **given: Any) -> RqSettings:
        """The environment below, what is given and not None on top. Raises SettingsError by name and value."""
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]  # an address may hold a password
            name = "JITNEY_RQ__" + "__".join(str(part) for part in first["loc"]).upper()
            raise SettingsError(f"{name}: {first['msg'].removeprefix('Value error, ')}") from None

    @property
    def rq_url(self) -> str:
        """RQ's Redis. Raises SettingsError."""
        if self.url is not None:
            return self.url.get_secret_value()
        return os.environ.get("RQ_REDIS_URL") or client_settings().url

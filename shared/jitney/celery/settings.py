"""Settings of the Celery side: `JITNEY_CELERY__<NAME>`."""

from __future__ import annotations

from typing import Final

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from jitney.errors import SettingsError

PREFIX: Final = "JITNEY_CELERY__"


class CelerySettings(BaseSettings):
    """How the ready-made application is reached, and how its consumer holds tasks.

    broker_url, result_backend: absent: the server where the jobs are (Celery's own `CELERY_BROKER_URL` and
    `CELERY_RESULT_BACKEND` come first). queue: the Celery queue of the ready-made application. max_held: tasks that
    one process holds at once; more stay with the broker. tell_every_s: partial text is written no more often.
    drain_s: how long a warm shutdown waits for held tasks before it gives them back. visibility_timeout_s: after
    which a Redis broker hands out again what a process that is gone had taken; held tasks are kept from it.
    upkeep_every_s: between two rounds of upkeep. num_threads: for results, callbacks and partial texts.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    broker_url: SecretStr | None = None
    result_backend: SecretStr | None = None
    queue: str = "jitney"
    max_held: int = Field(1_000, ge=1, le=100_000)
    tell_every_s: float = Field(1.0, ge=0.05, le=600.0)
    drain_s: float = Field(10.0, ge=0.0, le=3_600.0)
    visibility_timeout_s: float = Field(3_600.0, ge=1.0, le=7 * 86_400.0)
    upkeep_every_s: float = Field(15.0, ge=1.0, le=60.0)
    num_threads: int = Field(4, ge=1, le=64)


def celery_settings() -> CelerySettings:
    """The settings as they are now. Raises SettingsError that names what is wrong."""
    try:
        return CelerySettings()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = PREFIX + "__".join(str(part) for part in first["loc"]).upper()
        raise SettingsError(f"{name}: {first['msg'].removeprefix('Value error, ')}") from None

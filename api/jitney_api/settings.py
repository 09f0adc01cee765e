"""Settings of the HTTP side. Frozen: nobody changes them after the process has started."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from jitney.errors import SettingsError
from jitney.messages import MAX_BODY_BYTES
from jitney.queue import Limits
from jitney.sampling import explain

_LIMITS: Final = Limits()


class ApiSettings(BaseSettings):
    """How the API listens, waits and refuses. Environment: `JITNEY_API__<NAME>`.

    A Kubernetes service called `jitney` sets `JITNEY_PORT=tcp://...` in every pod: that is why the
    section's name stands between prefix and setting.

    redis_url: absent: as every client finds it (`JITNEY_REDIS_URL`, the local stack, localhost).
    headers_hold_s: how long a stream waits for its first event before it answers 200; until then a refusal
    still gets its own status. keep_alive_s: silence after which a stream says a comment, so that proxies
    keep it open. write_timeout_s: a reader that takes nothing for so long is cut off (it can resume).
    body_timeout_s: a body must have arrived within it. disconnect_grace_s: how long a job whose reader went
    away waits for somebody to come back before it is cancelled. drain_timeout_s: how
    long open streams may go on after SIGTERM. max_waiting_jobs, max_waiting_tokens, max_later_jobs: bounds of
    each queue, beyond which a request is told to come back later (429); 0 = no bound. num_tokenizer_threads: for
    counting prompts. max_tokenizers: kept in memory, some 60 MB each.
    """

    model_config = SettingsConfigDict(
        env_prefix="JITNEY_API__", env_file=".env", extra="ignore", frozen=True, allow_inf_nan=False
    )

    redis_url: SecretStr | None = None
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65_535)
    headers_hold_s: float = Field(2.0, ge=0.0, le=600.0)
    keep_alive_s: float = Field(15.0, gt=0.0, le=600.0)
    write_timeout_s: float = Field(60.0, gt=0.0, le=3_600.0)
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
            raise SettingsError(str(explain(error, prefix="api."))) from None

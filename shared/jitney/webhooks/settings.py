"""Whether endpoints are told at all, which ones, and how often: one value, read at the door and at every attempt."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from jitney.errors import InvalidJob, SettingsError
from jitney.sampling import explain
from jitney.webhooks.endpoints import Endpoint, RefusedEndpoint, allowed_host, split_port
from jitney.webhooks.wish import Webhook

SECRET_PREFIX: Final = "whsec_"
SECRET_BYTES: Final = (24, 64)
"""What Standard Webhooks 1.0 asks of a secret for HMAC-SHA256."""

Words = Annotated[tuple[str, ...], NoDecode]
"""In the environment: words with commas or blanks between them."""


class WebhookSettings(BaseSettings):
    """Webhooks: `JITNEY_WEBHOOKS__<NAME>` in the environment or in `.env`. Off until hosts and a secret are named.

    allowed_hosts: the only hosts that are called: `example.com`, or `*.example.com` for all below it (not itself); with
    `:port` where it is not the usual one. private_hosts: of these, by name, the ones that lie in a private network or
    on this machine. secret: `whsec_` and 24 to 64 bytes in base64, as Standard Webhooks has it; several, blanks
    between them, while they are exchanged: each signs. url: the deployment's own endpoint, for batches, responses in
    the background and jobs that name no other. allow_http: endpoints without TLS. ca_file: certificates (PEM) to trust
    instead of the system's.
    deliver: API processes deliver what is due; off where others do (docs/WEBHOOKS.md). poll_s: how often they look.
    max_at_once: announcements that one process tells at once. timeout_s: of one attempt, from the look-up of the name
    to the answer's first line. max_attempts, backoff_s, max_backoff_s: after each failure the wait grows fourfold;
    with the defaults the last attempt is made a day and some hours after the first.
    """

    model_config = SettingsConfigDict(
        env_prefix="JITNEY_WEBHOOKS__",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    allowed_hosts: Words = ()
    private_hosts: Words = ()
    secret: SecretStr | None = None
    url: str | None = None
    allow_http: bool = False
    ca_file: Path | None = None
    deliver: bool = True
    poll_s: float = Field(1.0, gt=0.0, le=60.0)
    max_at_once: int = Field(32, ge=1, le=1_000)
    timeout_s: float = Field(10.0, gt=0.0, le=60.0)
    max_attempts: int = Field(10, ge=1, le=100)
    backoff_s: float = Field(5.0, gt=0.0, le=3_600.0)
    max_backoff_s: float = Field(36_000.0, gt=0.0, le=7 * 86_400.0)

    @field_validator("allowed_hosts", "private_hosts", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        return value.replace(",", " ").split() if isinstance(value, str) else value

    @field_validator("allowed_hosts", "private_hosts")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(allowed_host, value))

    @field_validator("secret")
    @classmethod
    def _secrets(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            _keys_of(value)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> WebhookSettings:
        if self.allowed_hosts and self.secret is None:
            raise ValueError(
                "allowed_hosts needs secret: receivers could not tell our words from others' (`jitney webhooks secret`)"
            )
        if self.secret is not None and not self.allowed_hosts:
            raise ValueError("secret needs allowed_hosts: name the hosts that may be called, such as hooks.example.com")
        named = {split_port(entry)[0] for entry in self.allowed_hosts}
        for host in self.private_hosts:
            if host not in named:
                raise ValueError(f"private_hosts names {host}, which allowed_hosts does not: name it there, too")
        if self.max_backoff_s < self.backoff_s:
            raise ValueError(f"max_backoff_s={self.max_backoff_s} is less than backoff_s={self.backoff_s}")
        if self.url is not None:
            try:
                Endpoint.parse(self.url, self)
            except RefusedEndpoint as error:
                raise ValueError(str(error).replace("webhook.url", "url")) from None
        return self

    @property
    def is_on(self) -> bool:
        """Whether anybody may be told anything."""
        return self.secret is not None

    @property
    def keys(self) -> tuple[bytes, ...]:
        """What to sign with; the first is the newest."""
        return () if self.secret is None else _keys_of(self.secret)

    @property
    def lease_s(self) -> float:
        """How long nobody else takes up an announcement that somebody tells."""
        return self.timeout_s + 30.0

    def permitted(self, wish: Webhook) -> Webhook:
        """The wish with its endpoint, which may be called. Raises InvalidJob."""
        if not self.is_on:
            raise InvalidJob(
                "webhook: this deployment calls nobody. Leave it out, or set JITNEY_WEBHOOKS__ALLOWED_HOSTS and "
                "JITNEY_WEBHOOKS__SECRET where jobs are taken in and where webhooks are delivered",
                param="webhook",
                code="webhooks_off",
            )
        url = wish.url or self.url
        if url is None:
            raise InvalidJob(
                "webhook.url is absent, and the deployment has no endpoint of its own (JITNEY_WEBHOOKS__URL): name one",
                param="webhook.url",
            )
        Endpoint.parse(url, self)
        return wish.model_copy(update={"url": url})

    @classmethod
    def load(cls, **given: Any) -> WebhookSettings:
        """The settings as they are now, `given` ones first. Raises SettingsError, which shows no secret."""
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            if not first["loc"] or first["type"] == "value_error":
                name = f".{first['loc'][0]}" if first["loc"] else ""
                raise SettingsError(f"webhooks{name}: {first['msg'].removeprefix('Value error, ')}") from None
            raise SettingsError(str(explain(error, prefix="webhooks."))) from None


def _keys_of(secret: SecretStr) -> tuple[bytes, ...]:
    """ValueError for what is no secret; nothing of it is shown."""
    words = secret.get_secret_value().split()
    if not words:
        raise ValueError("is empty: `jitney webhooks secret` makes one")
    return tuple(map(_key, words))


def _key(word: str) -> bytes:
    least, most = SECRET_BYTES
    wrong = f"must be {SECRET_PREFIX} and {least} to {most} bytes in base64 (`jitney webhooks secret` makes one)"
    if not word.startswith(SECRET_PREFIX):
        raise ValueError(wrong)
    try:
        key = base64.b64decode(word.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        raise ValueError(wrong) from None
    if not least <= len(key) <= most:
        raise ValueError(wrong)
    return key

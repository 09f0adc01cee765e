"""Where a client finds its server: keyword, then environment, then `.env`, then the local stack, then localhost."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from jitney.durability import Durability
from jitney.errors import SettingsError

DEFAULT_URL = "redis://127.0.0.1:6379/0"
URL_FILE = "redis.url"


def default_data_dir() -> Path:
    """`$XDG_STATE_HOME/jitney`, or `~/.local/state/jitney`."""
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state_home) / "jitney"


class ClientSettings(BaseSettings):
    """Settings of every process that talks to Redis: `JITNEY_<NAME>` in the environment or in `.env`.

    redis_url: kept as a secret, because it may hold a password. data_dir: where `jitney up` keeps its files.
    durability: `strict` = an accepted job is on disk, see docs/DURABILITY.md.
    """

    model_config = SettingsConfigDict(
        env_prefix="JITNEY_",
        env_nested_delimiter="__",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    redis_url: SecretStr | None = None
    queue: str | None = None
    model: str | None = None
    durability: Durability = "default"
    data_dir: Path = Field(default_factory=default_data_dir)

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_url(value.get_secret_value())
        return value

    @property
    def url(self) -> str:
        """The server's address: the setting, else that of the local stack, else localhost."""
        if self.redis_url is not None:
            return self.redis_url.get_secret_value()
        return local_url(self.data_dir) or DEFAULT_URL


def client_settings() -> ClientSettings:
    """The settings as they are now. Raises SettingsError that names what is wrong."""
    try:
        return ClientSettings()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = "JITNEY_" + "__".join(str(part) for part in first["loc"]).upper()
        raise SettingsError(f"{name}: {first['msg'].removeprefix('Value error, ')}") from None


def local_url(data_dir: Path) -> str | None:
    """The address that an embedded server left in its data directory."""
    try:
        return (data_dir / URL_FILE).read_text().strip() or None
    except OSError:
        return None


def check_url(url: str) -> str:
    """`url`, or ValueError. Nothing of a wrong address is shown: a password may stand anywhere in it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    is_socket = parts.scheme == "unix" and bool(parts.path)
    is_tcp = parts.scheme in ("redis", "rediss") and bool(parts.hostname) and port != 0
    if not (is_socket or is_tcp):
        raise ValueError(
            "not a Redis address; expected redis://[user:password@]host[:port][/number], rediss://… or unix://…"
        )
    return url


def usable_url(url: str) -> str:
    """`url`, or SettingsError."""
    try:
        return check_url(url)
    except ValueError as error:
        raise SettingsError(f"redis_url: {error}") from None

"""Where a client finds its server: keyword, then environment, then `.env`, then the local stack, then localhost."""

from __future__ import annotations

import ipaddress
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
    """Settings of every process that talks to Redis, or to the API: `JITNEY_<NAME>` in the environment or in `.env`.

    redis_url: kept as a secret, because it may hold a password. api_url, api_key: of the API, for clients that must not
    hold the Redis URL. allow_plain_http: let the key go over http:// to another machine. data_dir: where `jitney up`
    keeps its files. durability: `strict` = an accepted job is on disk, see docs/DURABILITY.md.
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
    api_url: str | None = None
    api_key: SecretStr | None = None
    allow_plain_http: bool = False
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

    @field_validator("api_url")
    @classmethod
    def _of_an_api(cls, value: str | None) -> str | None:
        return None if value is None else check_api_url(value)

    @property
    def address(self) -> str:
        """Where a client goes that was told no url: the API if one is named, else Redis. Raises SettingsError."""
        if self.api_url is None:
            return self.url
        if self.redis_url is not None:
            raise SettingsError("JITNEY_REDIS_URL and JITNEY_API_URL are both set: leave one out, or give the url")
        return self.api_url

    @property
    def url(self) -> str:
        """The Redis server's address: the setting, else that of the local stack, else localhost."""
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


def is_http(url: str) -> bool:
    """Whether it is an API's address rather than Redis'."""
    return url.partition("://")[0].lower() in ("http", "https")


def check_api_url(url: str) -> str:
    """`url` as paths can be put behind it, or ValueError. Nothing of a wrong address is shown."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
    if not (is_http(url) and parts.hostname and port != 0 and is_plain and url.isascii() and url.isprintable()):
        raise ValueError("not the address of an API; expected http://host[:port] or https://host[:port], without user")
    # Other clients of the same API are told the address with its version.
    return url.rstrip("/").removesuffix("/v1")


def usable_api_url(url: str) -> str:
    """`url` as `check_api_url` has it, or SettingsError."""
    try:
        return check_api_url(url)
    except ValueError as error:
        raise SettingsError(f"url: {error}") from None


def usable_key(url: str, key: str, *, allowed: bool) -> str:
    """`key` as a header can carry it, or SettingsError that does not show it.

    allowed: it may go over http:// to another machine.
    """
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise SettingsError("api_key is empty, or holds characters that no header can carry (it is not shown)")
    parts = urlsplit(url)
    if parts.scheme.lower() == "http" and not allowed and not is_loopback(parts.hostname or ""):
        raise SettingsError(
            f"the API key would go to {parts.hostname} over http://, for everybody on the way to read: use https://, "
            "or allow_plain_http=True (JITNEY_ALLOW_PLAIN_HTTP=1) where the network itself is trusted"
        )
    return key


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

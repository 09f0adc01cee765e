"""Where a client looks for its server, and that it keeps a password to itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitney.errors import SettingsError
from jitney.settings import DEFAULT_URL, ClientSettings, client_settings


def test_without_anything_it_is_localhost() -> None:
    assert client_settings().url == DEFAULT_URL


def test_the_local_stack_comes_before_localhost(tmp_path: Path) -> None:
    (tmp_path / "jitney").mkdir()
    (tmp_path / "jitney" / "redis.url").write_text("redis://:pw@127.0.0.1:7001/0\n")
    assert client_settings().url == "redis://:pw@127.0.0.1:7001/0"


def test_another_data_directory_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis.url").write_text("redis://127.0.0.1:7002/0")
    monkeypatch.setenv("JITNEY_DATA_DIR", str(tmp_path))
    assert client_settings().url == "redis://127.0.0.1:7002/0"


def test_the_dotenv_file_comes_before_the_local_stack_and_the_environment_before_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jitney").mkdir()
    (tmp_path / "jitney" / "redis.url").write_text("redis://local:1/0")
    (tmp_path / ".env").write_text("JITNEY_REDIS_URL=redis://dotenv:1/0\nJITNEY_QUEUE=q1\nOTHER=x\n")
    assert (client_settings().url, client_settings().queue) == ("redis://dotenv:1/0", "q1")
    monkeypatch.setenv("JITNEY_REDIS_URL", "redis://environment:1/0")
    assert client_settings().url == "redis://environment:1/0"


def test_an_empty_variable_is_an_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_REDIS_URL", "")
    assert client_settings().url == DEFAULT_URL


def test_a_password_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_REDIS_URL", "redis://:hunter2@h:1/0")
    settings = client_settings()
    assert "hunter2" not in f"{settings} {settings!r} {settings.model_dump()} {settings.model_dump_json()}"
    assert "hunter2" in settings.url


@pytest.mark.parametrize("url", ["http://:hunter2@h", "redis://:hunter2@h:1x/0", "redis://:hunter2@", ":hunter2@h"])
def test_a_wrong_address_is_refused_by_name_without_its_value(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_REDIS_URL", url)
    with pytest.raises(SettingsError, match=r"^JITNEY_REDIS_URL: not a Redis address") as raised:
        client_settings()
    assert "hunter2" not in str(raised.value)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ClientSettings().queue = "other"  # type: ignore[misc]

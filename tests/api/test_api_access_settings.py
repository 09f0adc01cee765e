"""Who is meant to come in: what the settings accept, and what keeps the API from starting."""

from __future__ import annotations

import asyncio
import sys

import pytest
from tests.api.api_wire import PATIENCE_S

from jitney.apikeys import ApiKey, digest_of_secret
from jitney.errors import SettingsError
from jitney_api.settings import ApiSettings

KEY = ApiKey(name="web", sha256=digest_of_secret(b"secret"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_on_a_loopback_address_nobody_is_asked_unless_it_is_said(host):
    assert not ApiSettings.load(host=host).asks_for_keys
    assert ApiSettings.load(host=host, access="keys").asks_for_keys
    assert ApiSettings.load(host=host, keys=(KEY,)).asks_for_keys


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", ""])
def test_on_any_other_address_it_must_be_said_who_may_come_in(host):
    with pytest.raises(SettingsError) as refused:
        ApiSettings.load(host=host)
    for word in (f"host={host} ", "JITNEY_API__ACCESS=keys", "jitney keys add", "JITNEY_API__ACCESS=open"):
        assert word in str(refused.value)
    assert ApiSettings.load(host=host, keys=(KEY,)).asks_for_keys
    assert ApiSettings.load(host=host, access="keys").asks_for_keys
    assert not ApiSettings.load(host=host, access="open").asks_for_keys


def test_open_and_keys_at_once_is_a_contradiction():
    with pytest.raises(SettingsError, match="access=open asks for no key, but keys holds 1"):
        ApiSettings.load(access="open", keys=(KEY,))


def test_keys_stand_in_the_environment_as_hashes(monkeypatch):
    entry = '{"name":"web","sha256":"' + "0a" * 32 + '","tenant":"acme","scopes":["read"]}'
    monkeypatch.setenv("JITNEY_API__KEYS", f"[{entry}]")
    [key] = ApiSettings.load().keys
    assert (key.name, key.tenant, key.scopes) == ("web", "acme", ("read",))


@pytest.mark.parametrize(
    "given", ["hunter2hunter2", '["hunter2hunter2"]', '[{"name":"web","sha256":"hunter2hunter2"}]']
)
def test_a_plain_key_in_the_environment_is_refused_and_not_shown(monkeypatch, given):
    monkeypatch.setenv("JITNEY_API__KEYS", given)
    with pytest.raises(SettingsError) as refused:
        ApiSettings.load()
    assert "hunter2" not in str(refused.value)
    assert "jitney keys add --for-settings" in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"), [("tenant", "a:b"), ("tenant", "{x}"), ("scopes", []), ("scopes", ["root"]), ("name", "a b")]
)
def test_a_key_with_an_impossible_field_is_refused_by_its_place(field, value):
    fields = {"name": "web", "sha256": "0" * 64, field: value}
    with pytest.raises(SettingsError, match=rf"^api\.keys\.0\.{field}"):
        ApiSettings.load(keys=[fields])


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch):
    for name in ("KEYS", "ACCESS", "CORS_ORIGINS", "PORT"):
        monkeypatch.setenv(f"JITNEY_API__{name}", "")
    settings = ApiSettings.load()
    assert (settings.keys, settings.access, settings.cors_origins, settings.port) == ((), None, (), 8000)


@pytest.mark.parametrize("origin", ["example.org", "https://a.example/", "https://a.example/x", "", "https://a b"])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(SettingsError, match="is no origin: write it as https://host"):
        ApiSettings.load(cors_origins=[origin])


def test_every_web_page_is_let_in_only_where_it_must_have_a_key():
    with pytest.raises(SettingsError, match=r"cors_origins=\* .* access=keys"):
        ApiSettings.load(cors_origins=["*"])
    assert ApiSettings.load(cors_origins=["*"], access="keys").cors_origins == ("*",)


def test_a_list_that_is_no_json_is_refused_with_an_example(monkeypatch):
    monkeypatch.setenv("JITNEY_API__CORS_ORIGINS", "https://a.example,https://b.example")
    with pytest.raises(SettingsError, match=r'JITNEY_API__CORS_ORIGINS must be a list in JSON, such as \["https://'):
        ApiSettings.load()


async def test_the_program_refuses_to_start_for_everybody_and_says_what_to_do(redis_url):
    command = ("-m", "jitney", "api", "--host", "0.0.0.0", "--port", "0", "--redis-url", redis_url)
    program = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    _, said = await asyncio.wait_for(program.communicate(), PATIENCE_S)
    assert program.returncode == 1
    assert said.startswith(b"error: api: host=0.0.0.0 lets others in, and nobody is asked for a key.")
    assert said.count(b"\n") == 1

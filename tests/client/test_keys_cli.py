"""`jitney keys`, as typed in a shell."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator

import pytest
from typer.testing import CliRunner

from jitney.apikeys import digest_of_secret, list_keys, revoke_key
from jitney.cli import app
from jitney.keys import API_KEYS

run = CliRunner().invoke


@pytest.fixture
async def name(redis) -> AsyncIterator[str]:
    name = f"k-{secrets.token_hex(6)}"
    yield name
    await revoke_key(redis, name)


def keys(redis_url: str, *words: str):
    return run(app, ["keys", *words, "--redis-url", redis_url])


def test_a_key_is_printed_once_and_only_its_hash_is_kept(redis_url, name):
    answer = keys(redis_url, "add", "--name", name, "--tenant", "acme", "--scope", "read", "--scope", "admin")
    assert answer.exit_code == 0
    secret = answer.stdout.strip()
    assert re.fullmatch(r"jitney_[A-Za-z0-9_-]{43}", secret)
    assert "cannot be shown again" in answer.stderr
    [shown] = [
        one for one in map(json.loads, keys(redis_url, "list", "--json").stdout.splitlines()) if one["name"] == name
    ]
    assert (shown["tenant"], shown["scopes"]) == ("acme", ["read", "admin"])
    assert shown["sha256"] == digest_of_secret(secret.encode())
    assert shown["created"] > 1e9
    assert secret not in keys(redis_url, "list").stdout


def test_two_keys_are_never_the_same(redis_url, name):
    first = keys(redis_url, "add", "--name", name, "--for-settings").stdout.splitlines()[0]
    second = keys(redis_url, "add", "--name", name, "--for-settings").stdout.splitlines()[0]
    assert first != second


def test_without_a_scope_it_may_generate_and_read_as_nobodys_tenant(redis_url, name):
    keys(redis_url, "add", "--name", name)
    [line] = [line for line in keys(redis_url, "list").stdout.splitlines() if line.startswith(name)]
    assert line.split()[1:3] == ["-", "generate,read"]


async def test_for_the_settings_nothing_is_written(redis_url, redis, name):
    secret, entry = keys(redis_url, "add", "--name", name, "--for-settings").stdout.splitlines()
    assert json.loads(entry) == {
        "name": name,
        "sha256": digest_of_secret(secret.encode()),
        "tenant": "-",
        "scopes": ["generate", "read"],
    }
    assert name not in [key.name for key in await list_keys(redis)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tenant", "a:b"), "error: tenant: tenant 'a:b' must match"),
        (
            ("--scope", "root"),
            "error: scopes.0: Input should be 'generate', 'read', 'admin' or 'metrics' (given: 'root')",
        ),
    ],
)
def test_an_impossible_field_is_refused_by_name_and_no_key_is_shown(redis_url, name, words, said):
    answer = keys(redis_url, "add", "--name", name, *words)
    assert (answer.exit_code, answer.stdout) == (1, "")
    assert answer.stderr.startswith(said)


def test_an_impossible_name_is_refused(redis_url):
    answer = keys(redis_url, "add", "--name", "a b")
    assert (answer.exit_code, answer.stdout) == (1, "")
    assert answer.stderr.startswith("error: name: ")


def test_a_name_is_taken_until_its_key_is_revoked(redis_url, name):
    assert keys(redis_url, "add", "--name", name).exit_code == 0
    again = keys(redis_url, "add", "--name", name)
    assert (again.exit_code, again.stdout) == (1, "")
    assert f"there is a key '{name}' already" in again.stderr
    assert keys(redis_url, "revoke", name).stdout == f"{name} revoked\n"
    assert keys(redis_url, "add", "--name", name).exit_code == 0


def test_revoking_what_is_not_there_says_so(redis_url, name):
    answer = keys(redis_url, "revoke", name)
    assert (answer.exit_code, answer.stderr) == (1, f"error: no key is called '{name}'\n")


async def test_what_somebody_else_wrote_is_no_key_and_stops_no_list(redis_url, redis, name):
    await asyncio.to_thread(keys, redis_url, "add", "--name", name)
    await redis.hset(API_KEYS, mapping={b"\xff": b"\xfe", "0" * 64: b"{}"})
    try:
        answer = await asyncio.to_thread(keys, redis_url, "list", "--json")
        assert answer.exit_code == 0
        names = [json.loads(line)["name"] for line in answer.stdout.splitlines()]
        assert name in names
        assert "" not in names
    finally:
        await redis.hdel(API_KEYS, b"\xff", "0" * 64)


def test_without_redis_one_line_says_so(name):
    answer = keys("redis://127.0.0.1:1/0", "add", "--name", name)
    assert (answer.exit_code, answer.stdout) == (1, "")
    assert answer.stderr.startswith("error: Redis does not answer")

"""`jitney api` as a program."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import sys

import pytest
from tests.api.api_wire import PATIENCE_S, ask

from jitney.errors import SettingsError
from jitney_api.cli import MAX_CONNECTIONS
from jitney_api.settings import ApiSettings


async def start(*arguments: str, few_files: int | None = None, **environment: str) -> asyncio.subprocess.Process:
    """few_files: how many a shell would let it open, unless it asks for more."""

    def limit() -> None:
        if few_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (few_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "jitney",
        "api",
        *arguments,
        env={**os.environ, **environment},
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=limit,
    )


async def ready_port(program: asyncio.subprocess.Process) -> int:
    line = (await asyncio.wait_for(program.stderr.readline(), PATIENCE_S)).decode()
    ready = re.fullmatch(r"ready api=http://127\.0\.0\.1:(\d+)\n", line)
    assert ready, line
    return int(ready[1])


async def test_it_says_one_line_when_it_serves_and_ends_with_0_on_sigterm(redis_url, write_queue_card):
    await write_queue_card()
    program = await start("--port", "0", JITNEY_REDIS_URL=redis_url)
    port = await ready_port(program)
    answer = await ask(port, "GET", "/readyz")
    assert answer.status == 200
    await answer.close()
    program.send_signal(signal.SIGTERM)
    _, rest = await asyncio.wait_for(program.communicate(), PATIENCE_S)
    assert (program.returncode, rest) == (0, b"")


async def test_on_sigterm_an_open_stream_may_end_in_peace(redis_url, write_queue_card, worker, queue_name):
    await write_queue_card()
    program = await start("--port", "0", "--redis-url", redis_url)
    port = await ready_port(program)
    body = {"model": queue_name, "prompt": "hello", "stream": True}
    asking = asyncio.create_task(ask(port, "POST", "/v1/completions", body))
    job = await worker.claim()
    await job.say("Half")
    answer = await asking
    program.send_signal(signal.SIGTERM)
    await job.finish(" and half")
    said = await answer.body()
    assert b'" and half"' in said
    assert said.endswith(b"data: [DONE]\n\n")
    await answer.close()
    assert await asyncio.wait_for(program.wait(), PATIENCE_S) == 0


async def test_a_port_that_is_taken_ends_it_with_an_error_and_no_ready_line(redis_url, shared_server):
    _, port = shared_server
    program = await start("--port", str(port), JITNEY_REDIS_URL=redis_url)
    _, said = await asyncio.wait_for(program.communicate(), PATIENCE_S)
    assert program.returncode != 0
    assert b"ready api" not in said


async def test_a_wrong_setting_ends_it_with_one_line(redis_url):
    program = await start(JITNEY_REDIS_URL=redis_url, JITNEY_API__KEEP_ALIVE_S="0")
    _, said = await asyncio.wait_for(program.communicate(), PATIENCE_S)
    assert program.returncode == 1
    assert said == b"error: api.keep_alive_s: Input should be greater than 0 (given: '0')\n"


def test_settings_come_from_their_own_section_of_the_environment(monkeypatch):
    monkeypatch.setenv("JITNEY_PORT", "tcp://10.0.0.1:80")  # what Kubernetes sets for a service called jitney
    monkeypatch.setenv("JITNEY_API__PORT", "8123")
    monkeypatch.setenv("JITNEY_API__HEADERS_HOLD_S", "0.5")
    settings = ApiSettings.load(host="::1")
    assert (settings.port, settings.headers_hold_s, settings.host) == (8123, 0.5, "::1")


def test_a_wrong_setting_is_refused_by_name_and_value(monkeypatch):
    monkeypatch.setenv("JITNEY_API__KEEP_ALIVE_S", "0")
    with pytest.raises(SettingsError, match=r"api\.keep_alive_s: .*greater than 0.*\(given: '0'\)"):
        ApiSettings.load()


def test_importing_the_api_pulls_in_neither_torch_nor_the_worker():
    import subprocess

    code = (
        "import sys, jitney_api.app, jitney_api.cli;"
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'transformers', 'jitney_worker')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


async def test_it_may_have_more_connections_than_a_shell_gives_it(redis_url):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    program = await start("--port", "0", "--redis-url", redis_url, few_files=256)
    await ready_port(program)
    soft, _ = resource.prlimit(program.pid, resource.RLIMIT_NOFILE)
    program.terminate()
    await asyncio.wait_for(program.communicate(), PATIENCE_S)
    assert soft == (MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, MAX_CONNECTIONS))

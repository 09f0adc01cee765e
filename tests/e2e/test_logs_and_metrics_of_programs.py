"""`jitney worker` and `jitney api` as programs, at their most talkative: lines for machines, and no words."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.e2e.programs import LIVENESS_S, Program, program, words

from jitney import Client
from jitney.apikeys import add_key, make_key
from jitney.connection import Redis

SAID = "zebrafish"
"""In whatever is sent; and so in nothing that is logged."""


@dataclass
class Running:
    api: Program
    worker: Program
    base: str
    metrics: str
    queue: str
    redis_url: str
    keys: dict[str, str]

    def ask(self, path: str, body: Any = None, *, scope: str = "", key: str = "") -> tuple[int, bytes]:
        headers = {"content-type": "application/json"}
        if scope or key:
            headers["authorization"] = f"Bearer {key or self.keys[scope]}"
        content = None if body is None else orjson.dumps(body)
        request = urllib.request.Request(self.base + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=LIVENESS_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def stop(self) -> list[dict[str, Any]]:
        """End both; all that they logged."""
        for one in (self.worker, self.api):
            one.terminate()
            assert one.wait() == 0
        lines = [line for one in (self.worker, self.api) for line in one.lines if not line.startswith("ready ")]
        return [orjson.loads(line) for line in lines]


@pytest.fixture
async def keys(redis: Redis, queue_name: str) -> dict[str, str]:
    """One for each scope, of the same tenant."""
    secrets = {}
    for scope in ("generate", "read", "metrics"):
        secrets[scope], key = make_key(f"{queue_name}-{scope}", tenant="acme", scopes=[scope])
        await add_key(redis, key)
    return secrets


@pytest.fixture
def stack(redis_url: str, queue_name: str, tiny_model: Path, keys: dict[str, str]) -> Iterator[Running]:
    environment = {"JITNEY_LOG_LEVEL": "debug", "JITNEY_REDIS_URL": redis_url, "JITNEY_API__ACCESS": "keys"}
    flags = ("--num-kv-blocks", "64", "--max-num-seqs", "4", "--num-threads", "1", "--metrics-port", "0")
    with (
        program("worker", "--model", str(tiny_model), "--queue", queue_name, *flags, environment=environment) as worker,
        program("api", "--port", "0", environment=environment) as api,
    ):
        base = words(api.until_line("ready "))["api"]
        metrics = words(worker.until_line("ready "))["metrics"]
        yield Running(api, worker, base, metrics, queue_name, redis_url, keys)


def page_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=LIVENESS_S) as answer:
        page: str = answer.read().decode()
    return page


def test_logs_and_metrics_of_real_programs(stack: Running) -> None:
    chat = {"model": stack.queue, "messages": [{"role": "user", "content": f"The {SAID} swims. " * 20}]}
    status, answer = stack.ask("/v1/chat/completions", {**chat, "max_tokens": 12, "ignore_eos": True}, scope="generate")
    assert status == 200
    answered = orjson.loads(answer)
    for body in (
        {**chat, "max_tokens": SAID},
        {**chat, "stop": [SAID] * 50},
        {"model": SAID, "messages": chat["messages"]},
        {"model": stack.queue, "messages": [{"role": SAID, "content": [SAID]}]},
    ):
        assert 400 <= stack.ask("/v1/chat/completions", body, scope="generate")[0] < 500
    assert stack.ask(f"/v1/{SAID}", scope="read")[0] == 404
    assert stack.ask("/v1/models", key=f"jitney_{SAID}")[0] == 401
    with Client(stack.redis_url, queue=stack.queue) as client:
        refused = client.enqueue(f"{SAID} " * 2_000, max_tokens=4)
        assert [event.type for event in refused.stream()] == ["failed"]
        doomed = client.enqueue(SAID, max_tokens=500, ignore_eos=True)
        assert next(iter(doomed.stream())).type == "started"
        doomed.cancel()
        num_said = sum(len(event.token_ids) for event in doomed.stream())
    # Both pages, and who may see the API's.
    num_tokens = answered["usage"]["completion_tokens"] + num_said
    wanted = re.compile(rf'^jitney_generation_tokens_total{{.*queue="{stack.queue}".*}} {num_tokens}\.0$', re.MULTILINE)
    deadline = time.monotonic() + LIVENESS_S
    while not wanted.search(
        own := page_of(stack.metrics)
    ):  # a reader hears of tokens before their writer's reply comes
        assert time.monotonic() < deadline, own
    status, shared = stack.ask("/metrics", scope="metrics")
    assert status == 200
    assert b'jitney_http_requests_total{method="POST",route="/v1/chat/completions",status="200"} 1.0' in shared
    assert [stack.ask("/metrics", scope=scope)[0] for scope in ("read", "generate")] == [403, 403]
    assert stack.ask("/metrics")[0] == 401
    for secret in (SAID, "acme", *stack.keys.values()):
        assert secret not in own
        assert secret.encode() not in shared

    events = stack.stop()
    text = "\n".join([*stack.api.lines, *stack.worker.lines])
    password = stack.redis_url.split("@")[0].rpartition(":")[2]
    for secret in (SAID, password, *stack.keys.values(), answered["choices"][0]["message"]["content"]):
        assert secret
        assert secret not in text
    assert all({"event", "level", "timestamp"} <= event.keys() for event in events)
    ended = {event["job"]: event for event in events if event["event"] == "job_ended"}
    (job,) = [event for id, event in ended.items() if id == answered["id"] or id in answered["id"]]
    assert (job["outcome"], job["num_tokens"]) == ("finished", 12)
    assert [event["job"] for event in events if event["event"] == "job_refused"] == [refused.id]
    assert doomed.id in {event["job"] for event in events if event["event"] in ("job_cancelled", "job_lost")}

"""What the API's page says of queues, and of those who are gone."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api.conftest import Api, StartApi

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.embedded import EmbeddedServer
from jitney.keys import QUEUES, Keys
from jitney.metrics.readings import Readings
from jitney.metrics.table import TOKENS
from jitney.queue import Queue
from jitney.workers import WorkerView, list_readings, write_worker
from jitney_api.server_logs import hear_the_server


async def values(api: Api, **labels: str) -> dict[tuple[str, ...], float]:
    """By name and the values of the other labels, for the series that carry these."""
    answer = await api.get("/metrics")
    assert answer.status == 200
    found = {}
    for family in text_string_to_metric_families((await answer.body()).decode()):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                others = {name: value for name, value in sorted(sample.labels.items()) if name not in labels}
                others.pop("model_name", None)
                found[(sample.name.removeprefix("jitney_"), *others.values())] = sample.value
    return found


def view(queue: str, id: str, state: str = "ready") -> WorkerView:
    return WorkerView(
        id=id,
        queue=queue,
        model="m",
        fingerprint="f",
        host="h",
        pid=1,
        state=state,
        started_at=1.0,
        written_at=1.0,
    )


async def test_metrics_of_a_queue_tell_where_its_jobs_are(
    api: Api, redis: Redis, redis_url: str, queue_name: str
) -> None:
    queue, far = Queue(redis, queue_name), 4_000_000_000.0
    async with AsyncClient(redis_url, queue=queue_name) as client:
        for tenant in ("a", "b", "b"):
            await client.enqueue([1, 2, 3], tenant=tenant, band="bulk")
        await client.enqueue([1, 2], not_before=far)
        held = await client.enqueue([1])
        (delivery,) = (await queue.claim("w", "n1", credit=1, fingerprint="f", lease_s=60)).deliveries
        assert delivery.id == held.id
        await client.enqueue([1, 2], band="standard")
        (late,) = (await queue.claim("w", "n2", credit=1, fingerprint="f", lease_s=60)).deliveries
        await redis.zadd(queue.keys.leases("standard"), {late.id: 1})
    await redis.xadd(queue.keys.dead, {"id": "x"})
    for number, state in enumerate(("ready", "ready", "draining")):
        await write_worker(redis, view(queue_name, f"w{number}", state), ttl_s=60)
    seen = await values(api, queue=queue_name)
    oldest = {band: seen.pop(("queue_oldest_seconds", band)) for band in ("interactive", "standard", "bulk")}
    assert oldest["interactive"] == oldest["standard"] == 0
    assert oldest["bulk"] > 0
    assert seen.pop(("queue_drain_seconds",)) > 0
    assert seen == {
        ("queue_lag", "interactive"): 0,
        ("queue_lag", "standard"): 0,
        ("queue_lag", "bulk"): 3,
        ("queue_running", "interactive"): 1,
        ("queue_running", "standard"): 0,
        ("queue_running", "bulk"): 0,
        ("queue_returned", "interactive"): 0,
        ("queue_returned", "standard"): 1,
        ("queue_returned", "bulk"): 0,
        ("queue_later",): 1,
        ("queue_tokens",): 9,
        ("dead_letters",): 1,
        ("workers", "ready"): 2,
        ("workers", "draining"): 1,
        ("workers", "stuck"): 0,
    }


async def test_metrics_of_a_worker_end_with_it_and_what_is_none_is_passed_over(
    api: Api, redis: Redis, queue_name: str
) -> None:
    readings = Readings()
    readings.add("jitney_dead_total", by=3)
    readings.histogram("jitney_iteration_tokens_total").observe(5)
    for id in ("w1", "w2"):
        await write_worker(redis, view(queue_name, id), 60, readings)
    for id, junk in (("w3", b"no JSON"), ("w4", b'{"numbers":{"jitney_dead_total":[["x",1]]},"histograms":{}}')):
        await write_worker(redis, view(queue_name, id), 60)
        await redis.hset(Keys(queue_name).worker(id), "metrics", junk)
    seen = await values(api, queue=queue_name)
    assert {key[1]: value for key, value in seen.items() if key[0] == "dead_total"} == {"w1": 3, "w2": 3}
    assert seen[("iteration_tokens_total_count", "w1")] == 1
    await redis.delete(Keys(queue_name).worker("w2"))  # as when its lease is over
    seen = await values(api, queue=queue_name)
    assert {key[1] for key in seen if key[0] == "dead_total"} == {"w1"}
    told = {view.id: readings is not None for view, readings in await list_readings(redis, queue_name)}
    assert told == {"w1": True, "w3": False, "w4": False}


async def test_metrics_of_others_are_there_though_a_queues_keys_hold_something_else(
    api: Api, redis: Redis, queue_name: str, write_queue_card: Any
) -> None:
    """Whoever may write to Redis could otherwise silence the page, and wake somebody for a Redis that is well."""
    other = f"{queue_name}-other"
    await write_queue_card(other)
    try:
        for key in (Keys(queue_name).dead, Keys(queue_name).fair("bulk"), Keys(queue_name).workers):
            await redis.set(key, "x")
            assert (await values(api))[("redis_up",)] == 1
            assert ("queue_tokens",) in await values(api, queue=other)
            await redis.delete(key)
            assert ("queue_tokens",) in await values(api, queue=queue_name)
    finally:
        await redis.hdel(QUEUES, other)


async def test_metrics_of_the_api_are_there_when_redis_is_not(start_api: StartApi, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "server") as server:
        api = await start_api(redis_url=server.url)
        assert (await values(api))[("redis_up",)] == 1
        server.stop()
        away = await values(api)
    assert away[("redis_up",)] == 0
    assert away[("http_requests_open",)] == 1, "the scrape itself"
    assert away[("http_requests_total", "GET", "/metrics", "200")] == 1
    assert away[("http_requests_total", "GET", "/livez", "200")] == 1


async def test_metrics_count_requests_by_pattern_status_and_open_streams(
    api: Api, start_api: StartApi, worker: Any
) -> None:
    own = await start_api()
    own.model = api.model
    stream = await own.complete(stream=True)
    job = await worker.claim()
    await job.say("a")
    await own.get("/v1/jobs/nobody.0000000000000000000000")
    await own.ask("PROPFIND", "/coffee")
    seen = await values(own)
    assert seen[("sse_clients",)] == 1
    assert seen[("http_requests_open",)] == 2
    assert seen[("http_requests_total", "GET", "/v1/jobs/{job_id}", "404")] == 1
    assert ("http_requests_total", "other", "other", "404") in seen
    await job.finish()
    await stream.body()
    async with asyncio.timeout(20):
        while (seen := await values(own))[("sse_clients",)]:
            pass
    assert seen[("http_requests_total", "POST", "/v1/completions", "200")] == 1


def test_metrics_of_another_version_are_left_out_or_refused_whole() -> None:
    readings = Readings()
    readings.set("jitney_max_num_seqs", 4)
    readings.observe("jitney_redis_step_seconds", 0.2, "append")
    stored = orjson.loads(readings.encode())
    stored["numbers"]["jitney_of_tomorrow"] = [[1]]
    read = Readings.decode(orjson.dumps(stored))
    assert read is not None
    assert read.value("jitney_max_num_seqs") == 4
    assert "jitney_of_tomorrow" not in read.numbers
    assert read.histogram("jitney_redis_step_seconds", "append").count == 1
    for wrong in ([["nan"]], [[True]], [[None]], [["a", 1]], 3):
        assert Readings.decode(orjson.dumps({"numbers": {"jitney_max_num_seqs": wrong}, "histograms": {}})) is None
    counts = [0] * len(TOKENS)  # one too few
    buckets = {"jitney_iteration_tokens_total": [[1.0, counts]]}
    assert Readings.decode(orjson.dumps({"numbers": {}, "histograms": buckets})) is None


@pytest.mark.parametrize("level", ["error", "warning"])
def test_logs_of_the_http_server_are_events_and_are_not_said_twice(
    capsys: pytest.CaptureFixture[str], level: str
) -> None:
    said, log = logging.getLogger("uvicorn"), logging.getLogger("uvicorn.error")
    before = (said.handlers, said.propagate, log.level)
    try:
        hear_the_server()
        log.setLevel(logging.WARNING)
        getattr(log, level)("no more %s", "files")
        log.error("Exception in ASGI application\n")
    finally:
        said.handlers, said.propagate, _ = before
        log.setLevel(before[2])
    (line,) = capsys.readouterr().err.splitlines()
    fields = orjson.loads(line)
    assert (fields["event"], fields["said"], fields["level"]) == ("server_said", "no more files", level)

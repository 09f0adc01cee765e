"""Liveness, readiness, and who works for it."""

from __future__ import annotations

from pathlib import Path

from jitney.embedded import EmbeddedServer
from jitney.workers import WorkerView, unix_now, write_worker


async def test_health_shows_queues_what_waits_and_living_workers(api, redis):
    view = WorkerView(
        id="w1",
        queue=api.model,
        model="m",
        fingerprint="fp",
        host="h",
        pid=1,
        state="ready",
        started_at=unix_now(),
        written_at=unix_now(),
        num_running=3,
        max_num_seqs=4,
    )
    await write_worker(redis, view, ttl_s=60)
    await api.create_job()
    answer = await api.get("/health")
    queue = (await answer.json())["queues"][api.model]
    assert answer.status == 200
    assert (queue["model"], queue["num_waiting_jobs"]) == (f"model-of-{api.model}", 1)
    [worker] = queue["workers"]
    assert (worker["id"], worker["state"], worker["num_running"], worker["max_num_seqs"]) == ("w1", "ready", 3, 4)


async def test_readiness_needs_a_queue_but_no_worker(tmp_path: Path, start_api, queue_name):
    from jitney.cards import QueueCard, write_card
    from jitney.connection import connect

    with EmbeddedServer(tmp_path) as own:
        api = await start_api(redis_url=own.url)
        answer = await api.get("/readyz")
        assert answer.status == 503
        assert (await answer.json())["reason"] == "no queue is known yet: start a worker"
        client = connect(own.url)
        await write_card(client, queue_name, QueueCard(model="m", max_model_len=8, vocab_size=8))
        await client.aclose()
        assert (await api.get("/readyz")).status == 200
        assert (await (await api.get("/health")).json())["queues"][queue_name]["workers"] == []


async def test_the_queue_tells_an_autoscaler_what_waits_and_who_works(api, redis):
    before = await (await api.get(f"/v1/queue?model={api.model}")).json()
    for _ in range(3):
        await api.create_job()
    answer = await api.get(f"/v1/queue?model={api.model}")
    now = await answer.json()
    assert answer.status == 200
    assert (before["num_waiting_jobs"], before["drain_seconds"], before["num_workers"]) == (0, 0.0, 0)
    assert (now["queue"], now["model"], now["num_waiting_jobs"]) == (api.model, f"model-of-{api.model}", 3)
    assert now["num_waiting_tokens"] >= 3
    assert now["drain_seconds"] > 0
    assert now["tokens_per_second"] is None  # nothing has ended yet


async def test_the_queue_of_an_unknown_model_is_a_404(api):
    answer = await api.get("/v1/queue?model=nobody")
    assert answer.status == 404
    assert (await answer.json())["error"]["code"] == "model_not_found"

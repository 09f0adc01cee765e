"""`/v1/jobs`: enqueue and leave, come back, cancel."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.api.api_wire import until


async def test_a_job_is_accepted_with_its_addresses(api, worker):
    answer = await api.post("/v1/jobs", {"model": api.model, "prompt": "hello", "max_tokens": 5, "seed": 3})
    body = await answer.json()
    job = await worker.claim()
    assert answer.status == 202
    assert body == {
        "id": job.id,
        "queue": api.model,
        "status_url": f"/v1/jobs/{job.id}",
        "events_url": f"/v1/jobs/{job.id}/events",
    }
    assert answer.headers["location"] == body["status_url"]
    assert answer.headers["x-jitney-job-id"] == job.id
    spec = job.spec
    assert (spec.prompt, spec.sampling.max_tokens, spec.sampling.seed) == ("hello", 5, 3)
    assert (spec.on_disconnect, spec.tenant, spec.band) == ("continue", "-", "interactive")
    await job.finish()


async def test_a_job_tells_where_it_stands_through_its_life(api, worker):
    job_id = await api.create_job()

    async def standing() -> tuple[str, int]:
        body = await (await api.get(f"/v1/jobs/{job_id}")).json()
        assert (body["id"], body["object"], body["queue"]) == (job_id, "job", api.model)
        return body["status"], body["seq"]

    assert await standing() == ("queued", 0)
    job = await worker.claim()
    assert await standing() == ("running", 0)
    await job.say("Hi")
    assert await standing() == ("running", 2)
    await job.finish(" you")
    assert await standing() == ("finished", 4)


async def test_a_finished_job_tells_what_it_said(api, worker):
    job_id = await api.create_job()
    await worker.serve("Hi", " you")
    body = await (await api.get(f"/v1/jobs/{job_id}")).json()
    assert body["choices"] == [
        {"index": 0, "text": "Hi you", "token_ids": [100, 101, 2], "finish_reason": "stop", "logprobs": None}
    ]
    assert (body["usage"]["completion_tokens"], body["num_tokens"], body["attempts"]) == (3, 3, 1)
    assert body["created_at"] <= body["started_at"] <= body["ended_at"]


async def test_a_finished_job_still_tells_it_when_its_log_was_folded(api, worker):
    job_id = await api.create_job()
    await worker.serve(*("word " for _ in range(600)))
    assert await worker.queue.fold(job_id) == "ok"
    body = await (await api.get(f"/v1/jobs/{job_id}")).json()
    assert body["choices"][0]["text"] == "word " * 600


async def test_a_failed_job_tells_its_error_and_what_it_had_said(api, worker):
    job_id = await api.create_job()
    job = await worker.claim()
    await job.say("Half")
    await job.fail(message="it broke", code="bad_logits")
    body = await (await api.get(f"/v1/jobs/{job_id}")).json()
    assert (body["status"], body["text"]) == ("failed", "Half")
    assert body["error"] == {"type": "server_error", "code": "bad_logits", "message": "it broke", "param": None}


async def test_a_delayed_job_says_so(api):
    job_id = await api.create_job(not_before=4_000_000_000)
    assert (await (await api.get(f"/v1/jobs/{job_id}")).json())["status"] == "delayed"


async def test_cancelling_ends_a_waiting_job_and_may_be_repeated(api, worker):
    job_id = await api.create_job()
    assert await worker.queue.counts() == (1, 2)
    for _ in range(2):
        answer = await api.delete(f"/v1/jobs/{job_id}")
        assert answer.status == 200
        assert (await answer.json())["status"] == "cancelled"
    assert await worker.queue.counts() == (0, 0)
    assert (await (await api.get(f"/v1/jobs/{job_id}")).json())["error"]["code"] == "job_cancelled"


async def test_cancelling_ends_a_running_job_whoever_holds_it(api, worker):
    job_id = await api.create_job()
    job = await worker.claim()
    await job.say("Half")
    watching = await api.get(f"/v1/jobs/{job_id}/events")
    assert (await api.delete(f"/v1/jobs/{job_id}")).status == 200
    assert [frame.json()["type"] async for frame in watching.frames()] == ["started", "tokens", "cancelled"]
    with pytest.raises(AssertionError, match="done"):
        await job.finish()


async def test_cancelling_a_finished_job_changes_nothing(api, worker):
    job_id = await api.create_job()
    await worker.serve("Hi")
    answer = await api.delete(f"/v1/jobs/{job_id}")
    assert answer.status == 200
    assert (await answer.json())["status"] == "finished"


NO_JOB = "q.0123456789012345678901"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize(
    "job_id", [NO_JOB, "nonsense", "*", "q.", "%7Bjitney:q%7D:jobs", "x" * 500, "a%0d%0aX:y", "%00"]
)
async def test_an_unknown_job_is_not_found(api, method, job_id):
    answer = await api.ask(method, f"/v1/jobs/{job_id}")
    assert answer.status == 404
    error = (await answer.json())["error"]
    assert error["code"] == "job_not_found"
    assert len(error["message"]) < 200


async def test_the_events_of_an_unknown_job_are_not_found(api):
    answer = await api.get(f"/v1/jobs/{NO_JOB}/events")
    assert answer.status == 404
    assert answer.headers["content-type"] == "application/json"


async def test_one_idempotency_key_is_one_job(api, worker):
    async def create(**fields):
        body = {"model": api.model, "prompt": "hello", **fields}
        return await api.post("/v1/jobs", body, idempotency_key="order 17 / {x}:*")

    both = await asyncio.gather(create(), create())
    ids = {(await answer.json())["id"] for answer in both}
    assert len(ids) == 1
    assert await worker.queue.counts() == (1, 2)
    other = await create(max_tokens=5)
    assert (other.status, other.headers["x-should-retry"]) == (409, "false")
    assert (await other.json())["error"]["code"] == "idempotency_conflict"
    [job] = await worker.serve("Hi")
    assert {(await (await create()).json())["id"]} == ids == {job.id}
    assert await worker.queue.counts() == (0, 0)


async def test_two_requests_with_one_key_hear_one_answer(api, worker):
    body = {"model": api.model, "prompt": "hello", "stream": True}
    asking = [asyncio.create_task(api.post("/v1/completions", body, idempotency_key="k")) for _ in range(2)]
    job = await worker.claim()
    await job.say("Hi")
    answers = [await one for one in asking]
    await job.finish()
    bodies = [await answer.body() for answer in answers]
    assert bodies[0] == bodies[1]
    assert await worker.queue.counts() == (0, 0)


async def test_the_key_may_stand_in_the_body_but_not_differ_from_the_header(api, worker):
    body = {"model": api.model, "prompt": "hello", "idempotency_key": "k"}
    ids = [(await (await api.post("/v1/jobs", body)).json())["id"] for _ in range(2)]
    assert ids[0] == ids[1]
    assert (await (await api.post("/v1/jobs", body, idempotency_key="k")).json())["id"] == ids[0]
    assert (await api.post("/v1/jobs", body, idempotency_key="other")).status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "max_token": 5}, "max_token"),
        ({"prompt": "x", "stream": True}, "stream"),
        ({"prompt": "x", "n": 17}, "n"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "retry": {"max": 0}}, "retry.max"),
    ],
)
async def test_a_job_with_an_unknown_or_impossible_field_is_refused_by_name(api, worker, fields, param):
    answer = await api.post("/v1/jobs", {"model": api.model, **fields})
    assert answer.status == 400
    assert (await answer.json())["error"]["param"] == param
    assert await worker.queue.counts() == (0, 0)


async def test_a_job_may_be_a_chat(api, worker):
    answer = await api.post("/v1/jobs", {"model": api.model, "messages": [{"role": "developer", "content": "x"}]})
    assert answer.status == 202
    job = await worker.claim()
    assert job.spec.messages == ({"role": "system", "content": "x"},)
    await job.finish()


async def test_a_job_runs_on_whoever_asked_for_it(api, worker):
    job_id = await api.create_job()
    await api.hang_up()
    job = await worker.claim()
    await job.finish("Hi")

    async def standing() -> dict[str, Any]:
        return await (await api.get(f"/v1/jobs/{job_id}")).json()

    async def status() -> str:
        return (await standing())["status"]

    await until(status, "finished")
    assert (await standing())["choices"][0]["text"] == "Hi"

"""What happens to a job when the one who waits for it goes away."""

from __future__ import annotations

import asyncio
from typing import Any, Never

import pytest
from tests.api.api_wire import PATIENCE_S, num_readers, until

from jitney_api.presence import ClientGone, unless

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def request_bytes(api: Any, path: str, body: dict[str, Any], *more: str) -> tuple[str, bytes]:
    import json

    encoded = json.dumps({"model": api.model, **body}).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(encoded)}"]
    return "\n".join([*lines, *more]), encoded


async def send_and_leave_when(api: Any, claimed: Any, path: str, body: dict[str, Any], *more: str) -> Any:
    """Send a request, wait until its job was claimed, hang up. Returns the job."""
    head, encoded = request_bytes(api, path, body, *more)
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + encoded)
    job = await claimed()
    writer.close()
    await writer.wait_closed()
    return job


async def ending_of(api: Any, job_id: str) -> str:
    """Type of the job's last event, once it is there."""
    answer = await api.get(f"/v1/jobs/{job_id}/events")
    return [frame.json()["type"] async for frame in answer.frames()][-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hello"})])
async def test_a_client_that_leaves_before_the_first_token_cancels_its_job(api, worker, path, body, stream):
    job = await send_and_leave_when(api, worker.claim, path, {**body, "stream": stream})
    assert await ending_of(api, job.id) == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_the_middle_cancels_its_job(api, worker, stream):
    async def claim_and_say() -> Any:
        job = await worker.claim()
        await job.say("Half")
        return job

    job = await send_and_leave_when(api, claim_and_say, "/v1/chat/completions", {**CHAT, "stream": stream})
    assert await ending_of(api, job.id) == "cancelled"


async def test_a_job_that_waits_in_the_queue_is_cancelled_too(api, worker, redis):
    head, encoded = request_bytes(api, "/v1/completions", {"prompt": "hello"})
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + encoded)
    await until(lambda: worker.queue.counts(), (1, 2))
    writer.close()
    await writer.wait_closed()
    await until(lambda: worker.queue.counts(), (0, 0))
    assert (await worker.queue.claim("w", "n", credit=1, fingerprint="fp", lease_s=60)).deliveries == ()


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"on_disconnect": "continue"}, ()),
        ({"idempotency_key": "k1"}, ()),
        ({}, ("idempotency-key: k1",)),
    ],
)
async def test_a_job_that_shall_go_on_goes_on(api, worker, redis, fields, more):
    async def claim_and_say() -> Any:
        job = await worker.claim()
        await job.say("Half")
        return job

    body = {**CHAT, "stream": True, **fields}
    job = await send_and_leave_when(api, claim_and_say, "/v1/chat/completions", body, *more)
    await until(lambda: num_readers(redis, job.id), 0)
    await job.finish()
    assert await ending_of(api, job.id) == "finished"


async def test_an_idempotency_key_brings_a_lost_client_back_to_its_answer(api, worker, redis):
    body = {**CHAT, "stream": True}
    job = await send_and_leave_when(api, worker.claim, "/v1/chat/completions", body, "idempotency-key: again")
    again = asyncio.create_task(api.chat(stream=True, idempotency_key="again"))
    await job.say("Hi")
    await job.finish(" you")
    answer = await again
    assert answer.headers["x-jitney-job-id"] == job.id
    assert b'" you"' in await answer.body()
    assert await worker.queue.counts() == (0, 0)


async def test_after_the_grace_a_job_nobody_came_back_to_is_cancelled(start_api, write_queue_card, worker):
    await write_queue_card()
    api = await start_api(disconnect_grace_s=0.05)
    job = await send_and_leave_when(api, worker.claim, "/v1/chat/completions", {**CHAT, "stream": True})
    # Not by following it: a reader would keep it alive.
    await until(lambda: state_of(worker, job.id), ("done", "cancelled"))
    assert await worker.queue.counts() == (0, 0)


async def state_of(worker: Any, job_id: str) -> tuple[str, str]:
    status = await worker.queue.status(job_id)
    return status.state, status.reason


async def test_within_the_grace_a_reader_who_comes_back_keeps_the_job(start_api, write_queue_card, worker):
    await write_queue_card()
    api = await start_api(disconnect_grace_s=0.3)
    job = await send_and_leave_when(api, worker.claim, "/v1/chat/completions", {**CHAT, "stream": True})
    reader = await api.get(f"/v1/jobs/{job.id}/events")
    await until(lambda: _graces(api), 1)
    await asyncio.wait(api.service._graces, timeout=PATIENCE_S)
    await job.finish("Hi")
    assert [frame.json()["type"] async for frame in reader.frames()][-1] == "finished"


async def _graces(api: Any) -> int:
    await asyncio.sleep(0)
    return len(api.service._graces)


async def test_the_end_of_the_api_process_ends_a_stream_as_an_error_and_the_job_goes_on(
    start_api, write_queue_card, worker
):
    await write_queue_card()
    api = await start_api()
    asking = asyncio.create_task(api.chat(stream=True))
    job = await worker.claim()
    await job.say("Half")
    answer = await asking
    api.server.should_exit = True
    *_, last = [frame async for frame in answer.frames()]
    assert last.json()["error"]["code"] == "api_stopping"
    await job.finish()
    assert await state_of(worker, job.id) == ("done", "finished")


async def test_work_that_is_done_counts_though_the_client_left_in_the_same_moment():
    async def leaves() -> Never:
        raise ClientGone

    async def works() -> str:
        return "done"

    for _ in range(50):  # a set of two has no order to rely on
        assert await unless(works(), leaves()) == "done"


async def test_work_is_over_before_its_client_is_called_gone():
    ended = asyncio.Event()

    async def leaves() -> Never:
        await asyncio.sleep(0)
        raise ClientGone

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    with pytest.raises(ClientGone):
        await unless(works(), leaves())
    assert ended.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_the_api_process_is_a_503_for_who_has_heard_nothing(
    start_api, write_queue_card, worker, stream
):
    await write_queue_card()
    api = await start_api(headers_hold_s=60)
    asking = asyncio.create_task(api.chat(stream=stream))
    job = await worker.claim()
    api.server.should_exit = True
    answer = await asking
    assert answer.status == 503
    assert (await answer.json())["error"]["code"] == "api_stopping"
    await job.finish()
    assert await state_of(worker, job.id) == ("done", "finished")

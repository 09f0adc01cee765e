"""Server-sent events: frames, cursors, replay, and how a stream ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.api.api_wire import Answer, Frame, num_readers, until

from jitney.keys import Keys
from jitney.messages import Event


async def frames_of(answer: Answer) -> list[Frame]:
    assert answer.status == 200
    return [frame async for frame in answer.frames()]


async def test_a_stream_has_the_headers_that_proxies_need_and_names_its_job(api, worker):
    serving = asyncio.create_task(worker.serve("Hi"))
    answer = await api.chat(stream=True)
    [job] = await serving
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-jitney-job-id"] == job.id
    assert "content-length" not in answer.headers
    assert (await answer.body()).endswith(b"data: [DONE]\n\n")


async def test_the_id_of_a_frame_is_the_seq_of_the_last_event_told_whole(api, worker):
    serving = asyncio.create_task(worker.serve("Hi", " you"))
    frames = await frames_of(await api.chat(stream=True, stream_options={"include_usage": True}))
    await serving
    # started 1, tokens 2 and 3, the end token 4, finished 5: role and first text are both event 2, and the
    # frames after the last text bring no id, so that a reader who comes back then is told the end again.
    assert [(frame.id, list(shape_of(frame))) for frame in frames] == [
        ("", ["role", "content"]),
        ("2", ["content"]),
        ("3", ["content"]),
        ("4", []),
        ("4", ["usage"]),
        ("4", ["[DONE]"]),
    ]


def shape_of(frame: Frame) -> Any:
    if frame.data == "[DONE]":
        return ["[DONE]"]
    chunk = frame.json()
    return chunk["choices"][0]["delta"] if chunk["choices"] else ["usage"]


async def test_events_in_the_jobs_own_format_are_the_bytes_of_the_log(api, worker):
    job_id = await api.create_job()
    await worker.serve("Hi", " you")
    frames = await frames_of(await api.get(f"/v1/jobs/{job_id}/events"))
    log = await worker.queue.read_log(job_id)
    assert [frame.data.encode() for frame in frames] == log
    assert [frame.id for frame in frames] == ["1", "2", "3", "4", "5"]
    assert Event.decode(frames[-1].data).type == "finished"


async def test_what_has_arrived_together_goes_out_in_one_write(api, worker):
    job_id = await api.create_job()
    await worker.serve(*(f" {number}" for number in range(100)))
    answer = await api.get(f"/v1/jobs/{job_id}/events")
    chunks = [chunk async for chunk in answer.chunks()]
    assert len(chunks) == 1
    assert chunks[0].count(b"\ndata: ") == 103


@pytest.mark.parametrize(("stream_format", "endpoint"), [("chat.completion.chunk", "chat"), ("completion", "complete")])
async def test_a_replay_says_the_same_bytes_as_the_live_stream(api, worker, stream_format, endpoint):
    serving = asyncio.create_task(worker.serve("Hi", " ", "", "you"))
    live = await getattr(api, endpoint)(stream=True, stream_options={"include_usage": True})
    said = await live.body()
    [job] = await serving
    path = f"/v1/jobs/{job.id}/events?format={stream_format}&include_usage=true"
    assert await (await api.get(path)).body() == said
    # And from every cursor on, the frames that follow it.
    for seq in range(2, 6):
        marker = b"id: %d\n" % seq
        if marker in said:
            _, _, rest = said.partition(marker)
            later = await (await api.get(path, last_event_id=str(seq))).body()
            assert later == rest.partition(b"\n\n")[2]


@pytest.mark.parametrize("stream_format", ["chat.completion.chunk", "completion"])
async def test_a_token_whose_text_is_held_back_makes_no_frame(api, worker, stream_format):
    job_id = await api.create_job()
    await worker.serve("a", "", "", "b")
    frames = await frames_of(await api.get(f"/v1/jobs/{job_id}/events?format={stream_format}"))
    assert sorted({int(frame.id or 0) for frame in frames} - {0}) == [2, 5, 6]


async def test_offsets_of_a_completion_that_is_resumed_still_count_from_its_beginning(api, worker):
    job_id = await api.create_job(logprobs=0)
    job = await worker.claim()
    for token in ("Once", " more"):
        await job.say(token, logprobs=({"token": token, "logprob": -0.5, "bytes": None, "top": []},))
    await job.finish()
    frames = await frames_of(await api.get(f"/v1/jobs/{job_id}/events?format=completion", last_event_id="2"))
    assert frames[0].id == "3"
    assert frames[0].json()["choices"][0]["logprobs"]["text_offset"] == [4]


async def test_a_reader_that_comes_back_misses_nothing_and_hears_nothing_twice(api, worker):
    job_id = await api.create_job()
    job = await worker.claim()
    await job.say("a", "b", "c")
    first = await api.get(f"/v1/jobs/{job_id}/events")
    heard = []
    async for frame in first.frames():
        heard.append(frame)
        if frame.id == "3":
            break
    await first.close()
    await job.say("d")
    second = await api.get(f"/v1/jobs/{job_id}/events", last_event_id="3")
    await job.say("e")
    await job.finish()
    heard += await frames_of(second)
    assert [int(frame.id) for frame in heard] == list(range(1, 9))
    assert "".join(frame.json().get("text", "") for frame in heard) == "abcde"


async def test_the_header_of_a_reconnecting_browser_wins_over_the_query(api, worker):
    job_id = await api.create_job()
    await worker.serve("a", "b")
    path = f"/v1/jobs/{job_id}/events?starting_after=1"
    assert [frame.id for frame in await frames_of(await api.get(path))] == ["2", "3", "4", "5"]
    assert [frame.id for frame in await frames_of(await api.get(path, last_event_id="4"))] == ["5"]
    assert [frame.id for frame in await frames_of(await api.get(path, last_event_id="1"))] == ["2", "3", "4", "5"]


async def test_a_reader_that_has_seen_less_than_its_own_url_says_is_refused(api, worker):
    job_id = await api.create_job()
    await worker.serve("a", "b")
    answer = await api.get(f"/v1/jobs/{job_id}/events?starting_after=3", last_event_id="2")
    error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, "Last-Event-ID")
    assert error["message"] == "Last-Event-ID 2 lies before starting_after=3: send one of them"


async def test_a_browser_that_has_heard_everything_is_told_to_stop(api, worker):
    job_id = await api.create_job()
    await worker.serve("a")
    answer = await api.get(f"/v1/jobs/{job_id}/events", last_event_id="4")
    assert (answer.status, await answer.body()) == (204, b"")


@pytest.mark.parametrize("cursor", ["x", "-1", "1.5", "9" * 30, "²"])
async def test_a_last_event_id_that_is_no_seq_is_refused(api, worker, cursor):
    job_id = await api.create_job()
    answer = await api.get(f"/v1/jobs/{job_id}/events", last_event_id=cursor)
    assert answer.status == 400
    assert (await answer.json())["error"]["param"] == "Last-Event-ID"


async def test_two_readers_hear_the_same(api, worker):
    job_id = await api.create_job()
    job = await worker.claim()
    await job.say("a")
    readers = [await api.get(f"/v1/jobs/{job_id}/events?format=chat.completion.chunk") for _ in range(2)]
    await job.say("b")
    await job.finish()
    bodies = [await reader.body() for reader in readers]
    assert bodies[0] == bodies[1]
    assert bodies[0].endswith(b"data: [DONE]\n\n")


async def test_a_reader_that_leaves_cancels_nothing(api, worker, redis):
    job_id = await api.create_job(on_disconnect="cancel")
    job = await worker.claim()
    await job.say("a")
    reader = await api.get(f"/v1/jobs/{job_id}/events")
    async for _ in reader.frames():
        break
    await reader.close()
    await until_nobody_listens(redis, job_id)
    await job.finish()
    assert (await (await api.get(f"/v1/jobs/{job_id}")).json())["status"] == "finished"


async def until_nobody_listens(redis: Any, job_id: str) -> None:
    await until(lambda: num_readers(redis, job_id), 0)


async def test_any_api_process_can_go_on_with_a_stream(api, start_api, worker):
    job_id = await api.create_job()
    job = await worker.claim()
    await job.say("a")
    other = await start_api()
    answer = await other.get(f"/v1/jobs/{job_id}/events", last_event_id="1")
    await job.finish("b")
    assert "".join(frame.json().get("text", "") for frame in await frames_of(answer)) == "ab"


async def test_silence_is_filled_with_comments(start_api, write_queue_card, worker):
    await write_queue_card()
    api = await start_api(keep_alive_s=0.03, headers_hold_s=0)
    answer = await api.chat(stream=True)
    job = await worker.claim()
    chunks = answer.chunks()
    assert [await anext(chunks) for _ in range(3)] == [b": keep-alive\n\n"] * 3
    await job.finish("Hi")
    rest = b"".join([chunk async for chunk in chunks])
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_held_back_text_does_not_silence_the_comments(start_api, write_queue_card, worker):
    await write_queue_card()
    api = await start_api(keep_alive_s=0.03)
    serving = asyncio.create_task(api.chat(stream=True))
    job = await worker.claim()
    await job.say("Hi")
    answer = await serving
    chunks = answer.chunks()
    assert b'"Hi"' in await anext(chunks)
    while True:
        await job.say("")  # a token whose text is held back: nothing to tell
        if await anext(chunks) == b": keep-alive\n\n":
            break
    await job.finish()


async def test_headers_do_not_wait_longer_than_the_hold_and_a_late_refusal_is_in_band(
    start_api, write_queue_card, worker
):
    await write_queue_card()
    api = await start_api(headers_hold_s=0.02)
    answer = await api.chat(stream=True)  # the headers are here, though nobody has claimed the job
    job = await worker.claim()
    await job.fail(type="invalid_request_error", code="context_length_exceeded", message="too long")
    [frame] = await frames_of(answer)
    assert frame.json() == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": None,
            "code": "context_length_exceeded",
        }
    }


async def test_a_stream_that_breaks_ends_with_one_error_and_without_done(api, worker):
    asking = asyncio.create_task(api.chat(stream=True))
    job = await worker.claim()
    await job.say("Half")
    answer = await asking
    await job.fail(message="it broke")
    *_, last = frames = await frames_of(answer)
    assert last.json()["error"]["message"] == "it broke"
    assert [frame for frame in frames if "[DONE]" in frame.data] == []


async def test_a_job_cancelled_by_somebody_else_ends_its_stream_as_an_error(api, worker):
    asking = asyncio.create_task(api.chat(stream=True))
    job = await worker.claim()
    await job.say("Half")
    answer = await asking
    assert (await api.delete(f"/v1/jobs/{job.id}")).status == 200
    *_, last = await frames_of(answer)
    assert last.json()["error"]["code"] == "job_cancelled"


async def test_a_log_that_vanishes_ends_the_stream_as_an_error(api, worker, redis):
    asking = asyncio.create_task(api.chat(stream=True))
    job = await worker.claim()
    await job.say("Half")
    answer = await asking
    keys = Keys(job.queue.name)
    await redis.delete(keys.job(job.id), keys.tokens(job.id))
    await redis.publish(keys.tokens(job.id), Event(type="tokens", seq=99, text="lies").encode())
    *_, last = await frames_of(answer)
    assert last.json()["error"]["code"] == "stream_lost"


async def test_a_reader_that_takes_nothing_is_cut_off_and_can_come_back(start_api, write_queue_card, worker, redis):
    await write_queue_card()
    api = await start_api(write_timeout_s=0.1)
    job_id = await api.create_job()
    job = await worker.claim()
    slow = await api.get(f"/v1/jobs/{job_id}/events")
    slow.writer.transport.pause_reading()
    for _ in range(40):
        await job.say("x" * 15_000, "y" * 15_000, "z" * 15_000, "w" * 15_000)
    await until_nobody_listens(redis, job_id)
    await job.finish("end")
    slow.writer.transport.resume_reading()
    heard = []

    async def listen() -> None:
        async for frame in slow.frames():
            heard.append(frame)

    with pytest.raises(asyncio.IncompleteReadError):
        await listen()
    assert 0 < len(heard) < 160
    rest = await frames_of(await api.get(f"/v1/jobs/{job_id}/events", last_event_id=heard[-1].id))
    assert [int(frame.id) for frame in heard + rest] == list(range(1, 164))


async def test_streams_left_early_leave_no_subscription_and_no_connection(api, worker, redis):
    async def connections() -> int:
        return len([one for one in await redis.client_list() if one["name"].startswith("jitney-")])

    async def run_some() -> None:
        for number in range(20):
            asking = asyncio.create_task(api.chat(stream=True))
            job = await worker.claim()
            await job.say("a")
            answer = await asking
            if number % 3 == 0:
                await answer.close()
                await until_nobody_listens(redis, job.id)
            elif number % 3 == 1:
                await job.fail()
                await answer.body()
            else:
                await job.finish()
                await answer.body()

    await run_some()
    before = await connections()
    await run_some()
    assert await connections() == before
    prefix = Keys(worker.queue.name).prefix.replace("{", "\\{")
    await until(lambda: redis.pubsub_channels(f"{prefix}*"), [])


async def test_frames_hold_any_text_unharmed(api, worker):
    text = 'quote " backslash \\ newline \n carriage \r\n null \0 emoji 🙂 separator \u2028 data: [DONE]\n\n'
    asking = asyncio.create_task(api.chat(stream=True))
    job = await worker.claim()
    await job.say(text)
    await job.finish()
    frames = await frames_of(await asking)
    chunks = [json.loads(frame.data) for frame in frames if frame.data != "[DONE]"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text


@pytest.mark.parametrize("stream_format", ["job", "chat.completion.chunk", "completion"])
async def test_a_cursor_beyond_the_end_of_an_ended_job_is_gone_and_not_all_seen(api, worker, stream_format):
    """The log of which so much was seen is no more; 204 would say that the reader has it all."""
    job_id = await api.create_job()
    [job] = await worker.serve("a")
    answer = await api.get(f"/v1/jobs/{job_id}/events?format={stream_format}&starting_after={job.seq + 1}")
    assert answer.status == 410
    error = (await answer.json())["error"]
    assert error["code"] == "stream_lost"
    assert error["message"] == (
        f"the log of job {job_id} ends at event {job.seq}; event {job.seq + 1} was of another one"
    )


async def test_a_cursor_beyond_the_log_of_a_running_job_is_gone_for_a_format_that_begins_at_its_start(api, worker):
    """It would read on from the start, and leave out what comes at the numbers that were seen, whatever it is."""
    job_id = await api.create_job()
    job = await worker.claim()
    await job.say("a")
    answer = await api.get(f"/v1/jobs/{job_id}/events?format=completion&starting_after=9")
    assert (answer.status, (await answer.json())["error"]["code"]) == (410, "stream_lost")


async def test_a_cursor_beyond_the_log_of_a_waiting_job_is_gone(api):
    answer = await api.get(f"/v1/jobs/{await api.create_job()}/events", last_event_id="3")
    assert (answer.status, (await answer.json())["error"]["code"]) == (410, "stream_lost")


async def test_a_cursor_beyond_the_log_of_a_running_job_waits_for_the_worker_to_write_it_again(api, worker):
    job_id = await api.create_job()
    job = await worker.claim()
    await job.say("a")
    reading = asyncio.create_task(api.get(f"/v1/jobs/{job_id}/events", last_event_id="4"))
    await until(lambda: num_readers(worker.queue.redis, job_id), 1)
    await job.say("b", "c", "d")
    answer = await reading
    assert answer.status == 200
    await job.finish()
    assert [frame.id for frame in await frames_of(answer)] == ["5", "6", "7"]


async def test_a_whole_answer_is_begun_again_when_redis_lost_a_part_of_it(api, worker, redis):
    """A part that nobody was given yet: the client gets what the log says in the end."""
    asking = asyncio.create_task(api.chat())
    job = await worker.claim()
    await until(lambda: num_readers(redis, job.id), 1)
    await job.say("a", "b")
    # The same process has read as far: its followers hear one channel.
    answer = await api.get(f"/v1/jobs/{job.id}/events")
    async for frame in answer.frames():
        if frame.id == "3":
            break
    keys = worker.queue.keys
    first, *_ = await redis.xrange(keys.tokens(job.id))
    pipeline = redis.pipeline(transaction=True)
    pipeline.delete(keys.tokens(job.id))
    pipeline.xadd(keys.tokens(job.id), {"e": first[1][b"e"]}, id=first[0])
    pipeline.hset(keys.job(job.id), mapping={"seq": 1, "n": 0})
    await pipeline.execute()
    job.seq, job.num_tokens, job.positions = 1, 0, {}
    await job.say("A", "B", "C")
    await job.finish()
    body = await (await asking).json()
    assert body["choices"][0]["message"]["content"] == "ABC"
    assert body["usage"]["completion_tokens"] == 4

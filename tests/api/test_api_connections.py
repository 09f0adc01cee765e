"""What a connection may ask of the server before any application hears of it; other origins; the version."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from importlib.metadata import version
from typing import Any

import pytest
from tests.api.api_wire import PATIENCE_S, ask, read_head, until

from jitney.logs import logger
from jitney.messages import WIRE_VERSION

CHAT = "/v1/chat/completions"


async def answer_to(port: int, *pieces: bytes) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, JSON and headers of what comes back for bytes sent piece by piece; the connection must end then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        answer = await read_head(reader, writer)
        body = await asyncio.wait_for(reader.read(), PATIENCE_S)
        return answer.status, json.loads(body), answer.headers
    finally:
        writer.close()


def check_shape(wire: dict[str, Any], headers: dict[str, str], code: str) -> None:
    assert wire["error"].keys() == {"message", "type", "param", "code"}
    assert wire["error"]["code"] == code
    assert headers["x-request-id"].startswith("req_")
    assert headers["content-type"] == "application/json"


HEAD_S = 3.0
"""A well-formed head of a test arrives within it also on a machine that pauses."""


async def test_a_head_that_drips_in_gains_no_time_by_it_and_is_a_408_in_the_shape_of_every_error(start_api):
    api = await start_api(header_timeout_s=HEAD_S)
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(b"GET /livez HTTP/1.1\r\nx: ")

    async def drip() -> None:
        while True:
            writer.write(b"y")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    try:
        answer = await read_head(reader, writer)
        wire = json.loads(await asyncio.wait_for(reader.read(), PATIENCE_S))
    finally:
        dripping.cancel()
        writer.close()
    assert answer.status == 408
    check_shape(wire, answer.headers, "body_too_slow")
    assert wire["error"]["message"] == "the request's head took longer than 3 s"


async def test_a_connection_on_which_nothing_is_said_is_closed_without_a_word(start_api):
    api = await start_api()
    api.server.config.http_protocol_class.header_timeout_s = 0.1
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()


async def test_the_time_counts_for_the_second_request_of_a_connection_too(start_api):
    api = await start_api()
    answer = await api.get("/livez")
    await answer.body()
    api.server.config.http_protocol_class.header_timeout_s = 0.1
    answer.writer.write(b"GET /livez HT")
    assert (await read_head(answer.reader, answer.writer)).status == 408


async def test_half_a_request_that_follows_a_whole_one_does_not_end_the_answer_to_that(
    start_api, write_queue_card, worker
):
    """However long the rest of its head takes to come."""
    await write_queue_card()
    api = await start_api(headers_hold_s=0)
    answer = await api.complete(stream=True)
    job = await worker.claim()
    api.server.config.http_protocol_class.header_timeout_s = 0.0  # over as soon as it has begun
    answer.writer.write(b"GET /livez HT")

    async def has_begun() -> bool:
        return any(connection._has_begun for connection in api.server.server_state.connections)

    await until(has_begun, True)
    await job.finish("done")
    assert b"[DONE]" in await answer.body()


async def test_trailers_are_bounded_as_a_head_is(api):
    """No key is needed to send them, and no body has a length that they count for."""
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"a: %b\r\n" % (b"b" * 1_000))
                await writer.drain()
    writer.close()


async def test_a_trailer_is_no_header(api, worker, write_queue_card):
    await write_queue_card()
    body = json.dumps({"model": api.model, "prompt": "x"}).encode()
    sent = (
        b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nx-request-id: trailed\r\n\r\n" % (len(body), body)
    )
    status, _, headers = await answer_to(api.port, sent)
    assert status == 202
    assert headers["x-request-id"].startswith("req_")


async def test_a_body_behind_an_upgrade_is_no_request(api):
    """The parser ends such a request with its head; a proxy may send the next one of somebody else behind it."""
    smuggled = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    head = b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n"
    status, wire, headers = await answer_to(api.port, head % len(smuggled), smuggled)
    assert status == 400
    check_shape(wire, headers, "invalid_http")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\ncontent-length: 100\r\n\r\n",
    ],
    ids=["between requests", "a body that nobody waits for"],
)
async def test_one_byte_more_does_not_keep_a_connection_for_ever(start_api, sent):
    api = await start_api()
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(sent)
    await read_head(reader, writer)
    api.server.config.http_protocol_class.header_timeout_s = 0.1
    writer.write(b"\r\n")
    await asyncio.wait_for(reader.read(), PATIENCE_S)  # to its end
    writer.close()


async def test_a_head_without_end_is_refused_when_it_is_too_large(api):
    pieces = [
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx-long: ",
        *[b"y" * 65_536] * 2,
    ]  # and no more: a reset would take the answer away
    status, wire, headers = await answer_to(api.port, *pieces)
    assert status == 431
    check_shape(wire, headers, "headers_too_large")


async def test_five_thousand_headers_are_refused(api):
    lines = b"".join(b"x-%d: y\r\n" % number for number in range(5_000))
    answer = await api.send("GET /livez HTTP/1.1\nhost: x\n" + lines.decode().replace("\r\n", "\n").rstrip())
    assert answer.status == 431


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"HELLO\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", b"\0" * 64],
)
async def test_what_is_no_http_is_a_400_in_the_shape_of_every_error(api, sent):
    status, wire, headers = await answer_to(api.port, sent)
    assert status == 400
    check_shape(wire, headers, "invalid_http")


@pytest.mark.parametrize("bomb", [b"[" * 100_000, b'{"a":' * 100_000, b'{"model":"m","x":' + b"[" * 100_000])
async def test_a_bomb_of_brackets_is_a_clean_400(api, bomb):
    answer = await api.post(CHAT, bomb)
    error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (400, "invalid_json")
    assert len(error["message"]) < 200


@pytest.mark.parametrize("depth", [99, 100, 101, 254, 255, 900])
@pytest.mark.parametrize(
    "field", ["unknown", "logit_bias", "stop", "metadata", "messages", "prompt", "chat_template_kwargs"]
)
async def test_nesting_is_bounded_whatever_field_it_is_in(api, depth, field):
    """Deeper than it can be written again, or told in an error: orjson's limit is 254 levels, Python's 1,000 calls."""
    nested = "[" * (depth - 1) + "]" * (depth - 1)
    body = f'{{"model":"{api.model}","{field}":{nested}}}'.encode()
    answer = await api.post("/v1/jobs", body)
    error = (await answer.json())["error"]
    assert answer.status == 400
    assert (error["message"] == "the body is nested deeper than 100 levels") == (depth > 100)


async def test_others_are_served_while_costly_bodies_are_read(api):
    """A mebibyte of brackets, ids and parts: nobody else waits for them to be parsed."""
    size = 1_000_000
    bodies = [
        b'{"model":"m","x":[' + b",".join([b"[]"] * (size // 3)) + b"]}",
        b'{"model":"m","prompt":[' + b",".join([b"1"] * (size // 2)) + b"]}",
        b'{"model":"m","stop":[' + b",".join([b'"a"'] * (size // 4)) + b'],"prompt":"x"}',
        b'{"model":"m","prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % n for n in range(80_000)) + b"}}",
    ]
    asking = [asyncio.create_task(ask(api.port, "POST", "/v1/jobs", body)) for body in bodies * 2]
    waits = []
    while not all(task.done() for task in asking):
        began = time.monotonic()
        assert (await api.get("/livez")).status == 200
        waits.append(time.monotonic() - began)
    answers = [await task for task in asking]
    assert {answer.status for answer in answers} <= {400, 404}
    for answer in answers:
        await answer.close()
    assert max(waits) < 3.0  # a bound that only a loop standing still breaks; the diary has the figures


# Other origins

PAGE = "https://app.example"


async def test_without_the_setting_no_other_origin_may_read_an_answer(api):
    answer = await api.get("/livez", origin=PAGE)
    assert not [name for name in answer.headers if name.startswith("access-control")]
    preflight = await api.ask("OPTIONS", CHAT, origin=PAGE, access_control_request_method="POST")
    assert preflight.status == 405


async def test_an_origin_of_the_list_may_ask_and_read_and_another_one_may_not(start_api):
    api = await start_api(cors_origins=(PAGE,), access="keys")
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,content-type"}
    preflight = await api.ask("OPTIONS", CHAT, origin=PAGE, **asked)
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in preflight.headers
    assert preflight.headers["x-request-id"].startswith("req_")
    refused = await api.get("/v1/models", origin=PAGE)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    assert "x-request-id" in refused.headers["access-control-expose-headers"]
    other = await api.ask("OPTIONS", CHAT, origin="https://evil.example", **asked)
    assert other.status == 400
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in (await api.get("/livez", origin="https://evil.example")).headers


async def test_the_version_is_that_of_the_program_and_of_the_wire(api):
    answer = await api.get("/version")
    assert await answer.json() == {"version": version("jitney"), "wire_version": WIRE_VERSION}


# The request's id in the log


async def test_what_is_logged_for_a_request_carries_its_id_and_no_other_one(start_api, capfd):
    api = await start_api()
    app: Any = api.server.config.app

    @app.get("/log")
    async def log() -> dict[str, str]:
        logger().warning("something_happened")
        return {}

    await asyncio.gather(*(api.get("/log", x_request_id=f"id-{number}") for number in range(5)))
    logger().warning("something_happened")  # on nobody's behalf
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if "something_happened" in line]
    assert sorted(line.get("request_id", "") for line in lines) == ["", *(f"id-{number}" for number in range(5))]


async def test_the_listener_that_all_share_does_not_log_under_the_first_ones_id(
    start_api, write_queue_card, worker, redis, capfd
):
    """It was started by the first request that followed a job, and lives on for all others."""
    await write_queue_card()
    api = await start_api()
    job_id = await api.create_job()
    answer = await api.get(f"/v1/jobs/{job_id}/events", x_request_id="the-first")
    job = await worker.claim()
    for client in await redis.client_list(_type="pubsub"):
        await redis.client_kill_filter(_id=client["id"])
    await job.finish("done")
    assert b"done" in await answer.body()
    lost = [line for line in capfd.readouterr().err.splitlines() if "channel_connection_lost" in line]
    assert lost
    assert "the-first" not in "".join(lost)

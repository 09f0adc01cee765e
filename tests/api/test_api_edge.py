"""The edges: what is no request at all, what is too large or too slow, and the shape of every refusal."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from fastapi import FastAPI
from tests.api.api_wire import Answer, read_head

from jitney_api.app import create_app
from jitney_api.settings import ApiSettings

CHAT = "/v1/chat/completions"


async def error_of(answer: Answer) -> dict[str, Any]:
    body = await answer.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert answer.headers["content-type"] == "application/json"
    return body["error"]


async def test_an_unknown_url_is_a_404_in_the_same_shape(api):
    answer = await api.get("/v1/nothing/" + "x" * 500)
    assert answer.status == 404
    error = await error_of(answer)
    assert error["code"] == "unknown_url"
    assert len(error["message"]) < 120


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", ", did you mean /v1/chat/completions"),
        ("GET", "/models", ", did you mean /v1/models"),
        ("GET", "/chat/completions", ""),
        ("GET", "/nothing", ""),
    ],
)
async def test_a_base_url_without_v1_is_told_what_it_lacks(api, method, path, meant):
    error = await error_of(await api.ask(method, path))
    assert error["message"] == f"no such URL: {method} {path}{meant}; /docs has all"


async def test_a_query_parameter_that_nobody_knows_is_refused_and_not_ignored(api):
    """A misspelt cursor would repeat all that was heard."""
    job_id = await api.create_job()
    answer = await api.get(f"/v1/jobs/{job_id}/events?cursor=3")
    assert answer.status == 400
    error = await error_of(answer)
    assert (error["code"], error["param"]) == ("unknown_field", "cursor")
    assert "starting_after" in error["message"]


async def test_a_wrong_query_parameter_is_a_400_that_names_it(api):
    job = "/v1/jobs/q.0123456789012345678901/events"
    for query, name in (("format=" + "x" * 5_000, "format"), ("starting_after=-1", "starting_after")):
        answer = await api.get(f"{job}?{query}")
        error = await error_of(answer)
        assert (answer.status, error["param"]) == (400, name)
        assert len(error["message"]) < 250


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", "/v1/jobs", "POST"),
        ("PATCH", "/v1/jobs/x", "GET, DELETE"),
        ("POST", "/livez", "GET"),
    ],
)
async def test_a_wrong_method_names_the_right_ones(api, method, path, allowed):
    answer = await api.ask(method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)
    assert (await error_of(answer))["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"x"', b"null", b"5", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * 10_000),
        *(b'{"model": "\xff"}', b'{"a": NaN}', b'{"a": "\\ud800"}', b'{"a": 1} x', b'{"a":' * 10_000),
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(api, body):
    answer = await api.post(CHAT, body)
    assert answer.status == 400
    assert (await error_of(answer))["code"] in ("invalid_json", "missing_field")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_any_web_page_could_send_is_refused(api, content_type):
    answer = await api.send(f"POST {CHAT} HTTP/1.1\nhost: x\ncontent-type: {content_type}\ncontent-length: 2", b"{}")
    assert answer.status == 415
    assert (await error_of(answer))["code"] == "unsupported_media_type"


async def test_the_content_type_may_carry_a_charset(api):
    answer = await api.post(CHAT, {}, content_type="Application/JSON; charset=utf-8")
    assert (await error_of(answer))["param"] == "model"


def big(api: Any, size: int) -> bytes:
    return json.dumps({"model": api.model, "messages": [{"role": "user", "content": "x" * size}]}).encode()


async def test_a_body_too_large_is_refused_by_its_length_before_it_is_read(api, worker):
    answer = await api.send(
        f"POST {CHAT} HTTP/1.1\nhost: x\ncontent-type: application/json\ncontent-length: 10000000\nexpect: 100-continue"
    )
    assert answer.status == 413
    assert (await error_of(answer))["code"] == "body_too_large"
    assert await worker.queue.counts() == (0, 0)


async def test_a_body_too_large_in_chunks_is_refused_when_it_is_too_large(api, worker):
    body = big(api, 2_000_000)
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:700_000], body[700_000:])) + b"0\r\n\r\n"
    answer = await api.send(
        f"POST {CHAT} HTTP/1.1\nhost: x\ncontent-type: application/json\ntransfer-encoding: chunked", chunked
    )
    assert answer.status == 413
    assert (await error_of(answer))["code"] == "body_too_large"
    assert await worker.queue.counts() == (0, 0)


async def test_a_body_shorter_than_its_claimed_length_ends_after_the_timeout(start_api):
    api = await start_api(body_timeout_s=0.05)
    answer = await api.send(
        f"POST {CHAT} HTTP/1.1\nhost: x\ncontent-type: application/json\ncontent-length: 500", b'{"model"'
    )
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert (await error_of(answer))["code"] == "body_too_slow"


async def test_a_client_that_leaves_within_its_body_disturbs_nobody(api, worker):
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{{".encode()
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await api.get("/livez")).status == 200
    assert await worker.queue.counts() == (0, 0)


@pytest.mark.parametrize("headers", [["x: " + "y" * 200] * 250, [f"x{number}: {'y' * 1_000}" for number in range(80)]])
async def test_too_many_headers_are_refused(api, headers):
    answer = await api.send("\n".join(["GET /livez HTTP/1.1", "host: x", *headers]))
    assert answer.status == 431
    assert (await error_of(answer))["code"] == "headers_too_large"


async def test_a_connection_serves_the_next_request_after_a_refusal(api):
    answer = await api.post(CHAT, {})
    assert answer.status == 400
    await answer.body()
    answer.writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await read_head(answer.reader, answer.writer)).status == 200


async def test_a_harmless_request_id_comes_back(api):
    assert (await api.get("/livez", x_request_id="abc-123_4.5:6")).headers["x-request-id"] == "abc-123_4.5:6"
    assert (await api.get("/nothing", x_request_id="abc")).headers["x-request-id"] == "abc"


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a/b", "{tag}", "*", "é", "a;b"])
async def test_any_other_request_id_is_replaced(api, given):
    echoed = (await api.get("/livez", x_request_id=given)).headers["x-request-id"]
    assert echoed.startswith("req_")
    assert len(echoed) == 28


async def test_a_bug_is_a_500_that_tells_the_request_id_and_nothing_else(start_api):
    api = await start_api()
    app: Any = api.server.config.app

    @app.get("/bug")
    async def bug() -> None:
        raise RuntimeError("the database password is hunter2")

    answer = await api.get("/bug", x_request_id="abc")
    error = await error_of(answer)
    assert (answer.status, answer.headers["x-request-id"]) == (500, "abc")
    assert error == {
        "message": "internal error; request id abc",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


async def test_a_full_queue_says_when_to_come_back(start_api, write_queue_card, worker):
    await write_queue_card()
    api = await start_api(max_waiting_jobs=1)
    await api.create_job()
    answer = await api.post("/v1/jobs", {"model": api.model, "prompt": "x"})
    error = await error_of(answer)
    assert (answer.status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert int(answer.headers["retry-after-ms"]) >= 1
    assert await worker.queue.counts() == (1, 2)


async def test_without_redis_every_endpoint_says_so_and_none_names_the_host(start_api):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but not listening: a connection is refused
        port = nobody.getsockname()[1]
        api = await start_api(redis_url=f"redis://:secret@127.0.0.1:{port}/0")
        for answer in (
            await api.chat(),
            await api.chat(stream=True),
            await api.post("/v1/jobs", {"model": "m", "prompt": "x"}),
            await api.get("/v1/models"),
            await api.get("/v1/jobs/q.0123456789012345678901"),
            await api.get("/v1/jobs/q.0123456789012345678901/events"),
            await api.delete("/v1/jobs/q.0123456789012345678901"),
        ):
            body = await answer.body()
            assert answer.status == 503
            assert json.loads(body)["error"]["code"] == "queue_unavailable"
            assert answer.headers["retry-after"] == "1"
            assert b"secret" not in body
            assert str(port).encode() not in body
        for path in ("/readyz", "/health"):
            answer = await api.get(path)
            assert answer.status == 503
            assert (await answer.json())["reason"] == "the queue does not answer just now; try again"
        assert (await api.get("/livez")).status == 200


def test_the_openapi_document_describes_bodies_and_refusals():
    app: FastAPI = create_app(ApiSettings(redis_url="redis://127.0.0.1:1/0"))
    document = app.openapi()
    schemas = document["components"]["schemas"]
    for path, name in ((CHAT, "ChatRequest"), ("/v1/completions", "CompletionRequest"), ("/v1/jobs", "JobRequest")):
        operation = document["paths"][path]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        is_required = "model" in schemas[name].get("required", ())
        assert is_required == (name != "JobRequest")  # a job without one goes to the only queue there is
        refusal = operation["responses"]["429"]["content"]["application/json"]["schema"]
        assert refusal == {"$ref": "#/components/schemas/ErrorBody"}
    assert "tenant" not in schemas["JobRequest"]["properties"]
    refs = set(find_refs(document))
    assert {ref.removeprefix("#/components/schemas/") for ref in refs} <= schemas.keys()
    assert not [
        operation
        for path in document["paths"].values()
        for operation in path.values()
        if "422" in operation["responses"]
    ]


def find_refs(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [ref for value in node.values() for ref in find_refs(value)]
    return [ref for value in node for ref in find_refs(value)] if isinstance(node, list) else []


async def test_the_openapi_document_is_served(api):
    document = await (await api.get("/openapi.json")).json()
    assert document["info"]["title"] == "jitney"

"""What a machine thinks of to send: by the served OpenAPI document, and bodies of any JSON. Seeded: no run differs."""

from __future__ import annotations

import http.client
import json
from typing import Any

import orjson
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from jitney_api.response_schemas import ResponseRequest
from jitney_api.schemas import ChatRequest, JobRequest

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NUM_EXAMPLES = 25
QUIET = settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = [
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/jobs", "GET /v1/models", "GET /v1/models/{model}"),
    *("GET /v1/jobs/{job_id}", "DELETE /v1/jobs/{job_id}", "GET /v1/jobs/{job_id}/events", "GET /v1/queue"),
    *("POST /v1/responses", "GET /v1/responses/{response_id}", "POST /v1/responses/{response_id}/cancel"),
    *("POST /v1/files", "GET /v1/files", "GET /v1/files/{file_id}", "DELETE /v1/files/{file_id}"),
    *("GET /v1/files/{file_id}/content", "POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{batch_id}"),
    *(
        "POST /v1/batches/{batch_id}/cancel",
        "POST /v1/embeddings",
        "POST /tokenize",
        "POST /detokenize",
        "GET /health",
        "GET /metrics",
        "GET /v1/overview",
        "GET /v1/jobs/{job_id}/timeline",
        "GET /v1/admin/jobs/{job_id}",
        "DELETE /v1/admin/jobs/{job_id}",
        "GET /v1/admin/dead",
        "POST /v1/admin/dead/requeue",
        "GET /livez",
        "GET /readyz",
        "GET /version",
    ),
]

CAN_BE_WRONG = [
    label
    for label in OPERATIONS
    if label.endswith(("/events", "/{response_id}", "GET /v1/files", "GET /v1/batches"))
    or (label.startswith("POST") and not label.endswith("/cancel"))
]


def check_shape(status: int, body: bytes) -> None:
    """A refusal is OpenAI's, is bounded, and is no accident."""
    assert status != 500, body
    if status >= 400:
        error = orjson.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert len(body) < 5_000


@pytest.fixture
def document(shared_server: tuple[uvicorn.Server, int]) -> Any:
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{shared_server[1]}/openapi.json")


def test_every_operation_of_the_document_is_tried(document: Any) -> None:
    assert sorted(one.ok().label for one in document.get_all_operations()) == sorted(OPERATIONS)


@pytest.mark.parametrize(
    ("label", "mode"),
    [
        *((label, GenerationMode.POSITIVE) for label in OPERATIONS),
        *((label, GenerationMode.NEGATIVE) for label in OPERATIONS if label in CAN_BE_WRONG),
    ],
)
def test_answers_are_those_of_the_document_whatever_is_sent(
    document: Any, queue_with_a_card: str, label: str, mode: GenerationMode
) -> None:
    """Well-formed requests, and, where there is anything to be wrong, wrong ones."""
    method, path = label.split(" ")
    operation = document[path][method]

    @QUIET
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        response = case.call_and_validate(checks=CHECKS, timeout=20)
        if "/health" not in path and "/readyz" not in path:
            check_shape(response.status_code, response.content)

    run()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def bodies(schema: type[Any], **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of the documented members, each holding any JSON at all, and these `fields`."""
    known = st.sampled_from([*sorted(schema.model_fields), "tools", "response_format", "tenant", "unknown"])
    return st.dictionaries(known, JSON, max_size=5).map(lambda body: fields | body)


def post(port: int, path: str, body: Any) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, sent, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture
async def queue_with_a_card(write_queue_card: Any, queue_name: str) -> str:
    await write_queue_card()
    return queue_name


def test_a_job_of_any_json_is_accepted_or_refused_and_never_an_accident(
    shared_server: tuple[uvicorn.Server, int], queue_with_a_card: str
) -> None:
    seen = set()

    @settings(QUIET, max_examples=300)
    @given(body=bodies(JobRequest, model=queue_with_a_card, prompt="x"))
    def run(body: dict[str, Any]) -> None:
        status, answer = post(shared_server[1], "/v1/jobs", body)
        check_shape(status, answer)
        seen.add(status)

    run()
    assert {202, 400} <= seen <= {202, 400, 404, 409}


@pytest.mark.parametrize(
    ("path", "schema", "given_fields"),
    [
        ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", ResponseRequest, {}),
        ("/v1/responses", ResponseRequest, {"input": "x"}),
    ],
)
def test_a_body_of_any_json_for_a_model_that_is_not_there_is_refused(
    shared_server: tuple[uvicorn.Server, int], path: str, schema: type[Any], given_fields: dict[str, Any]
) -> None:
    @settings(QUIET, max_examples=200)
    @given(body=bodies(schema, **given_fields))
    def run(body: dict[str, Any]) -> None:
        status, answer = post(shared_server[1], path, {**body, "model": "nobody"})
        check_shape(status, answer)
        assert status in (400, 404)

    run()


def test_bytes_of_any_kind_are_refused(shared_server: tuple[uvicorn.Server, int]) -> None:
    @settings(QUIET, max_examples=200)
    @given(body=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
    def run(body: bytes) -> None:
        status, answer = post(shared_server[1], "/v1/jobs", body)
        check_shape(status, answer)
        assert status in (400, 404)

    run()

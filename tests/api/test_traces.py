"""One trace, from a caller through API and queue to every worker that had the job. None where no collector is named."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.api.api_wire import until
from tests.api.conftest import StartApi
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, MAX_MODEL_LEN, Turnstile, working

from jitney import AsyncClient, tracing
from jitney.connection import Redis
from jitney.errors import SettingsError
from jitney.keys import Keys
from jitney.messages import JobSpec
from jitney.queue import Queue
from jitney.tracing import Traces, traces_if_wanted, traces_wanted, valid_traceparent
from jitney_worker.model.tiny import make_tiny
from jitney_worker.text.tokenizer import Tokenizer

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
SLACK_S = 3.0
"""How far the server's clock, asked over a socket on a busy machine, may be from the truth."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = make_tiny(tmp_path_factory.mktemp("tiny"))
    return Tokenizer.load(directory)


@pytest.fixture(autouse=True)
async def card(write_queue_card: Any, tokenizer: Tokenizer) -> None:
    await write_queue_card(max_model_len=MAX_MODEL_LEN, vocab_size=tokenizer.vocab_size, model="hash")


class Spans:
    """What was recorded, by name."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.traces = Traces("test", self.exporter, at_once=True)

    def all(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.all(name)
        return span

    def parts_of(self, whole: ReadableSpan) -> dict[str, ReadableSpan]:
        assert whole.context is not None
        return {
            span.name: span
            for span in self.exporter.get_finished_spans()
            if span.parent is not None and span.parent.span_id == whole.context.span_id
        }


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


async def test_traces_show_a_jobs_ride_under_its_callers_span(
    redis: Redis, redis_url: str, queue_name: str, tokenizer: Tokenizer
) -> None:
    spans = Spans()
    async with (
        AsyncClient(redis_url, queue=queue_name) as client,
        working(redis_url, queue_name, tokenizer, HashModel(), traces=spans.traces),
    ):
        began, _ = await redis.time()
        job = await client.enqueue(
            [1, 2, 3], max_tokens=6, ignore_eos=True, n=2, temperature=0.5, traceparent=TRACEPARENT, stop=["zebrafish"]
        )
        await job.result(LIVENESS_S)
    ride = spans.one("text_completion hash")
    assert ride.context is not None
    assert ride.parent is not None
    assert (f"{ride.context.trace_id:032x}", f"{ride.parent.span_id:016x}") == (TRACE, CALLER)
    assert (ride.kind, ride.status.status_code) == (SpanKind.CONSUMER, StatusCode.UNSET)
    said = dict(ride.attributes or {})
    assert 0 <= said.pop("gen_ai.response.time_to_first_chunk") < LIVENESS_S  # type: ignore[operator]
    assert said == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "jitney",
        "gen_ai.request.model": "hash",
        "gen_ai.response.model": "hash",
        "gen_ai.response.id": job.id,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "jitney.band": "interactive",
        "jitney.attempt": 1,
        "jitney.outcome": "finished",
    }
    parts = spans.parts_of(ride)
    assert list(parts) == ["queue", "prefill", "decode"]
    (start, end), bounds = seconds(ride), [seconds(parts[name]) for name in ("queue", "prefill", "decode")]
    assert began - SLACK_S <= start == bounds[0][0]
    assert bounds[0][1] == bounds[1][0] <= bounds[1][1] == bounds[2][0] < bounds[2][1] <= end


async def test_traces_show_what_a_hand_over_cost(
    redis: Redis, redis_url: str, queue_name: str, tokenizer: Tokenizer
) -> None:
    """Its first owner is put out in the middle; the second one's ride is in the same trace."""
    spans, turnstile = Spans(), Turnstile(HashModel())
    async with AsyncClient(redis_url, queue=queue_name) as client:
        async with working(redis_url, queue_name, tokenizer, turnstile, traces=spans.traces) as first:
            job = await client.enqueue([1], max_tokens=30, ignore_eos=True, traceparent=TRACEPARENT)
            while (await job.status()).seq < 3:
                await turnstile.until_step()
                turnstile.pass_one()
            first.drain()
            first.drain()
            turnstile.open()
        num_logged = (await job.status()).num_tokens
        assert 0 < num_logged < 30
        async with working(redis_url, queue_name, tokenizer, HashModel(), traces=spans.traces):
            await job.result(LIVENESS_S)
    released, finished = spans.all("text_completion hash")
    assert [dict(one.attributes or {})["jitney.outcome"] for one in (released, finished)] == ["released", "finished"]
    assert {one.context.trace_id for one in (released, finished) if one.context} == {int(TRACE, 16)}
    assert list(spans.parts_of(released)) == ["queue", "prefill", "decode"]
    parts = spans.parts_of(finished)
    assert list(parts) == ["hand-over", "prefill", "decode"]
    assert dict(parts["hand-over"].attributes or {}) == {
        "jitney.resumed_tokens": num_logged,
        "jitney.is_reclaimed": False,
    }
    assert seconds(released)[1] <= seconds(finished)[0] + SLACK_S


async def test_traces_say_with_what_a_job_failed_or_was_lost(
    redis: Redis, redis_url: str, queue_name: str, tokenizer: Tokenizer
) -> None:
    spans, turnstile = Spans(), Turnstile(HashModel())
    async with (
        AsyncClient(redis_url, queue=queue_name) as client,
        working(redis_url, queue_name, tokenizer, turnstile, traces=spans.traces),
    ):
        job = await client.enqueue([1], max_tokens=30, ignore_eos=True)
        await turnstile.until_step()
        await redis.zadd(Keys(queue_name).leases("interactive"), {job.id: 1})
        await Queue(redis, queue_name).claim("thief", "t", credit=1, fingerprint="hash.1", lease_s=60)
        turnstile.open()

        async def num_rides() -> int:
            return len(spans.all("text_completion hash"))

        await until(num_rides, 1)
    ride = spans.one("text_completion hash")
    assert (ride.parent, ride.status.status_code) == (None, StatusCode.ERROR)
    assert dict(ride.attributes or {})["error.type"] == "lost"


class Collector:
    """An OTLP collector: what it was sent, span by span."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        collector = self

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    named = {one.key: one.value.string_value for one in resource.resource.attributes}
                    service = named["service.name"]
                    collector.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    running = Collector()
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
    yield running
    running.close()


async def body_of(redis: Redis, queue: str) -> JobSpec:
    (key,) = [key async for key in redis.scan_iter(f"{Keys(queue).prefix}:body:*")]
    stored = await redis.get(key)
    assert stored is not None
    return JobSpec.decode(stored)


async def test_traces_reach_the_collector_and_a_request_is_the_parent_of_its_job(
    redis: Redis, queue_name: str, start_api: StartApi, collector: Collector
) -> None:
    api = await start_api()
    answer = await api.post("/v1/jobs", {"model": queue_name, "prompt": "hello"}, traceparent=TRACEPARENT)
    assert answer.status == 202
    for path in ("/livez", "/metrics"):
        await api.get(path, traceparent=TRACEPARENT)
    spec = await body_of(redis, queue_name)
    api.server.should_exit = True

    async def num_spans() -> int:
        return len(collector.spans)

    await until(num_spans, 1)
    ((service, span),) = collector.spans
    assert (service, span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
        "jitney-api",
        "POST /v1/jobs",
        TRACE,
        CALLER,
    )
    assert spec.traceparent == f"00-{TRACE}-{span.span_id.hex()}-01"
    assert {one.key for one in span.attributes} == {"http.request.method", "http.response.status_code", "http.route"}


async def test_traces_of_callers_are_passed_on_where_no_collector_is_named(
    redis: Redis, queue_name: str, start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    api = await start_api()
    await api.post("/v1/jobs", {"model": queue_name, "prompt": "hello"}, traceparent=TRACEPARENT)
    assert (await body_of(redis, queue_name)).traceparent == TRACEPARENT


@pytest.mark.parametrize("wrong", ["x", "00-" + "0" * 32 + f"-{CALLER}-01", f"{TRACEPARENT}-more", "00-ab-cd-01"])
async def test_traces_ignore_a_header_that_is_none(
    redis: Redis, queue_name: str, start_api: StartApi, wrong: str
) -> None:
    api = await start_api()
    answer = await api.post("/v1/jobs", {"model": queue_name, "prompt": "hello"}, traceparent=wrong)
    assert answer.status == 202
    assert (await body_of(redis, queue_name)).traceparent is None
    assert valid_traceparent(wrong) is None


def test_traces_are_wanted_by_whoever_names_a_collector() -> None:
    url = "http://127.0.0.1:4318"
    assert not traces_wanted({})
    assert traces_wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": url})
    assert traces_wanted({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url})
    assert not traces_wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_SDK_DISABLED": "true"})
    assert not traces_wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_TRACES_EXPORTER": "none"})


def test_traces_that_are_asked_for_without_the_library_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SettingsError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT asks for traces.*jitney\[otel\]"):
        traces_if_wanted("jitney-worker")

"""What a worker counts, by itself: once for each thing that happened, however it was told."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.api.api_wire import until
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, StartWorker, crew

from jitney import AsyncClient
from jitney.errors import InvalidJob, SettingsError
from jitney.keys import Fence, JobId
from jitney.messages import JobSpec
from jitney.metrics.readings import Histogram
from jitney.queue import Append, Delivery, Ending
from jitney_worker.engine.protocol import Capacity, ModelOutput, SchedulerOutput, SequenceDelta
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest
from jitney_worker.runtime.bridge import StepReport
from jitney_worker.runtime.choice import Choice
from jitney_worker.runtime.meters import Meters
from jitney_worker.runtime.running import RunningJob
from jitney_worker.runtime.server_time import ServerTime
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.stack.local import StackSettings, worker_arguments
from jitney_worker.text.spelling import Speller
from jitney_worker.text.tokenizer import Tokenizer

CAPACITY = Capacity(free_seats=1, num_running=3, num_waiting=2, num_free_blocks=6, num_blocks=8)


def delivery(**fields: Any) -> Delivery:
    given = {
        **{"id": JobId("q.a"), "band": "interactive", "tenant": "-", "fence": Fence("f"), "tries": 1, "strikes": 0},
        **{"seq": 0, "num_tokens": 0, "at_ms": 1_000, "virtual_time": 0.0, "fingerprints": (), "body": b""},
        **{"prompt_ids": None},
    }
    return Delivery(**{**given, **fields})


def riding(meters: Meters, tokenizer: Tokenizer, **fields: Any) -> RunningJob:
    """A job on board, with one choice."""
    handed = delivery(**fields)
    params = SequenceParams(max_tokens=9)
    request = SequenceRequest(SequenceId(f"{handed.id}/0/{handed.fence}"), (1, 2), params, (0, 0.0, 0, 0))
    choice = Choice(request, Speller(tokenizer), handed.num_tokens, handed.num_tokens)
    job = RunningJob(handed, JobSpec(prompt=(1, 2)), (1, 2), [choice], 1, lambda ids, logprobs: [], "f")
    meters.claimed(handed)
    meters.boarded(job)
    return job


def step(meters: Meters, *jobs: RunningJob, began_at: float, at: float, joined: int, number: int) -> None:
    deltas = tuple(
        SequenceDelta(job.choices[0].request.id, number, (5,), joined_step=joined, num_cached_tokens=1) for job in jobs
    )
    report = StepReport(deltas, CAPACITY, at=at, began_at=began_at, boundary_at=began_at, num_tokens=len(jobs) or 1)
    meters.stepped(report)
    for job, delta in zip(jobs, deltas, strict=True):
        meters.gained(job, job.choices[0], delta, at)
    meters.after_step(report)


def observed(histogram: Histogram) -> tuple[int, float]:
    return histogram.count, round(histogram.sum, 6)


def test_metrics_count_a_histogram_at_its_bounds_and_many_at_once() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(1.5, 3)
    histogram.observe(9.0)
    assert (histogram.counts, histogram.sum, histogram.count) == ([1, 3, 1], 14.5, 5)


def test_metrics_count_what_gives_a_log_its_lost_end_back_once(tokenizer: Tokenizer) -> None:
    meters = Meters(ServerTime(), looks_up_prefixes=True)
    riding(meters, tokenizer)
    for num_tokens in (2, 5):
        meters.wrote(Append(JobId("q.a"), Fence("f"), 1, num_tokens, [b"e"], num_prompt_tokens=2))
    meters.wrote(Append(JobId("q.a"), Fence("f"), 1, 5, [b"e"], num_prompt_tokens=2))  # mended, byte for byte
    meters.wrote(Ending(JobId("q.a"), Fence("f"), 4, 6, "finished", [b"e"], num_prompt_tokens=2))
    meters.wrote(Ending(JobId("q.a"), Fence("f"), 4, 6, "finished", [b"e"], num_prompt_tokens=2))
    meters.left(Fence("f"), "lost")
    readings = meters.readings
    assert readings.value("jitney_generation_tokens_total") == 6
    assert readings.value("jitney_prompt_tokens_total") == 2
    assert readings.numbers["jitney_jobs_left_total"] == {("finished",): 1}


def test_metrics_count_a_write_that_redis_took_before_its_job_was_cancelled(tokenizer: Tokenizer) -> None:
    """The cancel is heard first; the reply to the append comes after it."""
    meters = Meters(ServerTime(), looks_up_prefixes=True)
    riding(meters, tokenizer)
    meters.left(Fence("f"), "cancelled")
    meters.wrote(Append(JobId("q.a"), Fence("f"), 1, 2, [b"e"], num_prompt_tokens=2))
    meters.wrote(Ending(JobId("q.a"), Fence("f"), 2, 3, "finished", [b"e"]))
    assert meters.readings.value("jitney_generation_tokens_total") == 3
    assert meters.readings.numbers["jitney_jobs_left_total"] == {("cancelled",): 1}
    for number in range(2_000):
        meters.claimed(delivery(fence=Fence(str(number))))
        meters.left(Fence(str(number)), "lost")
    assert len(meters._gone) < 1_000


def test_metrics_of_latency_are_those_of_the_steps(tokenizer: Tokenizer) -> None:
    """The first joined in step 1 and read its prompt in two steps; the second one skipped a step (it was preempted)."""
    clock = ServerTime()
    meters = Meters(clock, looks_up_prefixes=True)
    first, second = riding(meters, tokenizer), riding(meters, tokenizer, id=JobId("q.b"), fence=Fence("g"), tries=2)
    step(meters, began_at=10.0, at=10.5, joined=1, number=1)
    step(meters, first, second, began_at=11.0, at=11.5, joined=1, number=2)
    step(meters, first, began_at=12.0, at=12.5, joined=1, number=3)
    step(meters, first, second, began_at=13.0, at=13.5, joined=1, number=4)
    readings = meters.readings
    assert observed(readings.histogram("jitney_request_prefill_time_seconds")) == (2, 3.0)
    assert observed(readings.histogram("jitney_inter_token_latency_seconds")) == (3, 4.0)
    assert observed(readings.histogram("jitney_step_seconds")) == (4, 2.0)
    waited = readings.histogram("jitney_request_queue_time_seconds")
    assert (waited.count, waited.sum) == (1, pytest.approx(clock.at(10.0) - 1.0)), "the other one had an owner before"
    assert readings.value("jitney_prefix_cache_queries_total") == 4
    assert readings.value("jitney_prefix_cache_hits_total") == 2


def test_metrics_of_a_cancel_wait_for_the_boundary_that_hears_of_it(tokenizer: Tokenizer) -> None:
    meters = Meters(ServerTime(), looks_up_prefixes=True)
    meters.cancel_passed_on()
    step(meters, began_at=0.0, at=1.0, joined=1, number=1)
    latency = meters.readings.histogram("jitney_cancel_latency_seconds")
    assert latency.count == 0, "that step had begun before"
    step(meters, began_at=1e12, at=1e12, joined=1, number=2)
    assert latency.count == 1


def test_metrics_of_the_batch_are_those_of_its_last_report() -> None:
    readings = Meters(ServerTime(), looks_up_prefixes=True).read(None, CAPACITY, 4)
    assert {name: series[()] for name, series in readings.numbers.items()} == {
        "jitney_num_requests_running": 3,
        "jitney_num_requests_waiting": 2,
        "jitney_max_num_seqs": 4,
        "jitney_kv_cache_usage_perc": 0.25,
    }


class Broken(HashModel):
    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        raise InvalidJob("it will be so every time")


async def test_metrics_of_a_job_that_fails_in_a_step_say_what_became_of_it(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    async with start_worker(Broken(), worker={"metrics_port": 0}) as worker:
        job = await client.enqueue([1], max_tokens=3, ignore_eos=True)
        assert [event.type async for event in job.stream()] == ["failed"]

        page = worker.metrics_url
        assert page is not None

        async def outcomes() -> dict[str, str]:
            with await asyncio.to_thread(urllib.request.urlopen, page, timeout=LIVENESS_S) as answer:
                lines = answer.read().decode().splitlines()
            names = ("jitney_dead_total{", "jitney_jobs_left_total{", "jitney_step_failures_total{")
            return {line.partition("{")[0]: line.partition("} ")[2] for line in lines if line.startswith(names)}

        wanted = {"jitney_dead_total": "1.0", "jitney_jobs_left_total": "1.0", "jitney_step_failures_total": "1.0"}
        await until(outcomes, wanted)


async def test_metrics_port_that_is_taken_is_refused_by_name(
    redis_url: str, queue_name: str, tokenizer: Tokenizer
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = load_settings(redis_url=redis_url, queue=queue_name, worker={"metrics_port": port})
        worker = Worker(settings, crew(settings, tokenizer, HashModel(), {}))
        with pytest.raises(SettingsError, match=rf"worker\.metrics_port={port} cannot be served on 127\.0\.0\.1"):
            await worker.run()


async def test_metrics_are_served_by_nobody_who_was_not_asked(start_worker: StartWorker) -> None:
    async with start_worker() as worker:
        assert worker.metrics_url is None


@pytest.mark.parametrize(("port", "ports"), [(None, [None, None]), (9_100, ["9100", "9101"]), (0, ["0", "0"])])
def test_metrics_ports_of_a_stack_are_one_for_each_worker(tmp_path: Path, port: int | None, ports: list[Any]) -> None:
    settings = StackSettings(tmp_path, "q", redis_url="redis://127.0.0.1:1/0", metrics_port=port)
    words = [worker_arguments(settings, number) for number in (1, 2)]
    found = [given[given.index("--metrics-port") + 1] if "--metrics-port" in given else None for given in words]
    assert found == ports

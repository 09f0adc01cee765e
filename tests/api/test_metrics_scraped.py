"""Both pages that Prometheus reads, after a preemption, a cancel, a takeover, a thief and some quiet jobs.

Names, kinds, labels and help are those of the table; numbers are those of what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain
from tests.api.conftest import Api, StartApi
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, MAX_MODEL_LEN, Turnstile, working

from jitney import AsyncClient, AsyncJob
from jitney.connection import Redis
from jitney.messages import Event
from jitney.metrics.table import ALL, OF_API, OF_QUEUE, OF_WORKER, QUEUE_LABELS, WORKER_LABELS, Metric
from jitney.queue import Append, Queue, pack_ids
from jitney_worker.model.tiny import make_tiny
from jitney_worker.runtime.worker import Worker
from jitney_worker.text.tokenizer import Tokenizer

SAID_BY_THE_DEAD = 3


class Scrape:
    """A page, read as Prometheus reads it."""

    def __init__(self, text: str, parse: Callable[[str], Iterable[Family]] = plain) -> None:
        self.families = {family.name: family for family in parse(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name which carry these labels."""
        return sum(one.value for one in self.samples if one.name == name and labels.items() <= one.labels.items())

    def series(self, name: str, label: str) -> dict[str, float]:
        """Values by the value of one label."""
        return {one.labels[label]: one.value for one in self.samples if one.name == name}


def fetch(url: str, accept: str = "text/plain") -> tuple[str, str]:
    request = urllib.request.Request(url, headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=LIVENESS_S) as answer:
        return answer.read().decode(), answer.headers["content-type"]


async def scrape(url: str) -> Scrape:
    text, _ = await asyncio.to_thread(fetch, url)
    return Scrape(text)


async def until(url: str, is_there: Callable[[Scrape], bool]) -> Scrape:
    """Scrape again until it shows what is waited for."""
    deadline = asyncio.get_running_loop().time() + LIVENESS_S
    while not is_there(page := await scrape(url)):
        assert asyncio.get_running_loop().time() < deadline, [one for one in page.samples if "_bucket" not in one.name]
    return page


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = make_tiny(tmp_path_factory.mktemp("tiny"))
    return Tokenizer.load(directory)


@dataclass
class Stack:
    """client: of Redis. worker_page, api_page: where they are scraped."""

    client: AsyncClient
    worker: Worker
    api: Api

    @property
    def worker_page(self) -> str:
        assert self.worker.metrics_url is not None
        return self.worker.metrics_url

    @property
    def api_page(self) -> str:
        return f"http://127.0.0.1:{self.api.port}/metrics"


async def begun_by_a_dead_worker(client: AsyncClient, queue: Queue) -> AsyncJob:
    """A job with three tokens in its log, whose owner is not heard of any more."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    job = await client.enqueue(prompt, max_tokens=20, ignore_eos=True)
    (delivery,) = (await queue.claim("dead", "n", credit=1, fingerprint="hash.1", lease_s=60)).deliveries
    events = [Event("started", 1, attempt=1), Event("tokens", 2, token_ids=(5,) * SAID_BY_THE_DEAD, text="xxx")]
    append = Append(
        job.id,
        delivery.fence,
        1,
        SAID_BY_THE_DEAD,
        [event.encode() for event in events],
        prompt_ids=pack_ids(prompt),
        num_prompt_tokens=len(prompt),
    )
    assert await queue.append([append]) == []
    await queue.redis.zadd(queue.keys.leases("interactive"), {job.id: 1})
    return job


async def stolen(client: AsyncClient, queue: Queue, turnstile: Turnstile, page: str) -> AsyncJob:
    """Somebody else claims a job in the middle of a step of its owner, who learns it when its append is refused."""
    job = await client.enqueue([9], max_tokens=30, ignore_eos=True)
    turnstile.pass_one()
    while (await job.status()).seq < 2:
        await turnstile.until_step()
        turnstile.pass_one()
    await turnstile.until_step()
    await queue.redis.zadd(queue.keys.leases("interactive"), {job.id: 1})
    (delivery,) = (await queue.claim("thief", "t", credit=1, fingerprint="hash.1", lease_s=60)).deliveries
    assert delivery.id == job.id
    assert delivery.is_reclaimed
    turnstile.pass_one()
    await until(page, lambda page: page.value("jitney_fenced_writes_total") == 1)
    assert (await queue.release(job.id, delivery.fence)) == "ok"
    return job


@pytest.fixture
async def stack(
    redis: Redis, redis_url: str, queue_name: str, start_api: StartApi, tokenizer: Tokenizer, write_queue_card: Any
) -> AsyncIterator[Stack]:
    await write_queue_card(max_model_len=MAX_MODEL_LEN, vocab_size=tokenizer.vocab_size, model="hash")
    async with (
        AsyncClient(redis_url, queue=queue_name) as client,
        working(redis_url, queue_name, tokenizer, HashModel()) as worker,
    ):
        yield Stack(client, worker, await start_api())


def check_page(page: Scrape, metrics: Iterable[Metric], labels: tuple[str, ...]) -> None:
    for metric in metrics:
        family = page.families[metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help), metric.name
        for sample in family.samples:
            suffix = {"le"} if sample.name.endswith("_bucket") else set()
            assert sample.labels.keys() == {*labels, *metric.labels, *suffix}, sample


async def test_metrics_of_both_pages_are_those_of_the_table_and_of_nothing_else(stack: Stack) -> None:
    await (await stack.client.enqueue([1, 2], max_tokens=5, ignore_eos=True)).result(LIVENESS_S)
    own = await until(stack.worker_page, lambda page: page.value("jitney_jobs_left_total") == 1)
    shared = await until(stack.api_page, lambda page: page.value("jitney_jobs_left_total") >= 1)
    check_page(own, OF_WORKER, WORKER_LABELS)
    check_page(shared, OF_WORKER, WORKER_LABELS)
    check_page(shared, OF_QUEUE, QUEUE_LABELS)
    check_page(shared, OF_API, ())
    for page, metrics in ((own, OF_WORKER), (shared, ALL.values())):
        names = {name.removesuffix("_total") if metric.kind == "counter" else name for name, metric in ALL.items()}
        assert page.families.keys() <= names
        assert len(page.families) == len(list(metrics))


async def test_metrics_are_given_in_the_format_that_is_asked_for(stack: Stack) -> None:
    for url in (stack.worker_page, stack.api_page):
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        text, content_type = await asyncio.to_thread(fetch, url, accept)
        assert content_type.startswith("application/openmetrics-text; version=1.0.0")
        assert text.endswith("# EOF\n")
        assert Scrape(text, open_metrics).families.keys() >= {"jitney_step_seconds", "jitney_iteration_tokens_total"}
        text, content_type = await asyncio.to_thread(fetch, url, "*/*")
        assert content_type.startswith("text/plain; version=0.0.4")


async def test_metrics_say_what_happened(
    redis: Redis, redis_url: str, queue_name: str, start_api: StartApi, tokenizer: Tokenizer, write_queue_card: Any
) -> None:
    await write_queue_card(max_model_len=MAX_MODEL_LEN, vocab_size=tokenizer.vocab_size, model="hash")
    queue, turnstile = Queue(redis, queue_name), Turnstile(HashModel(block_size=4))
    async with (
        AsyncClient(redis_url, queue=queue_name) as client,
        contextlib.AsyncExitStack() as running,
    ):
        # A takeover, before anybody else is there.
        jobs = [await begun_by_a_dead_worker(client, queue)]
        small = {"num_blocks": 16, "block_size": 4, "admission_reserve": 0.0}
        worker = await running.enter_async_context(working(redis_url, queue_name, tokenizer, turnstile, **small))
        running.callback(turnstile.open)
        stack = Stack(client, worker, await start_api())
        # A cancel of a job that is in the batch.
        doomed = await client.enqueue([7], max_tokens=40, ignore_eos=True, tenant="acme")
        while doomed.id not in await turnstile.until_step():
            turnstile.pass_one()
        assert await doomed.cancel()
        await until(stack.worker_page, lambda page: page.value("jitney_jobs_left_total", outcome="cancelled") == 1)
        # A thief.
        jobs.append(await stolen(client, queue, turnstile, stack.worker_page))
        turnstile.open()
        # Room for little more than one of them: preemptions. And one with two answers, one that is too long.
        jobs += [await client.enqueue([n, 2, 3], max_tokens=40, ignore_eos=True, timeout_s=600) for n in range(1, 5)]
        jobs.append(await client.enqueue([5, 5], max_tokens=3, ignore_eos=True, n=2))
        usages = [(await job.result(LIVENESS_S)).usage for job in jobs]
        with contextlib.suppress(Exception):
            await (await client.enqueue([1] * 100, max_tokens=40)).result(LIVENESS_S)
        num_claims = len(jobs) + 3  # the cancelled one, the refused one, and one of them twice
        page = await until(
            stack.worker_page,
            lambda page: page.value("jitney_jobs_left_total") == page.value("jitney_jobs_claimed_total") == num_claims,
        )
        shared = await until(
            stack.api_page, lambda shared: shared.value("jitney_jobs_left_total", queue=queue_name) == num_claims
        )
        logs = [event async for event in doomed.stream()]
    cancelled_tokens = sum(len(event.token_ids) for event in logs)
    said = sum(usage["completion_tokens"] for usage in usages)
    assert page.value("jitney_generation_tokens_total") == said + cancelled_tokens - SAID_BY_THE_DEAD
    # The dead worker's job was given its prompt by the dead worker; the one that was refused was never read in.
    prompts = sum(usage["prompt_tokens"] for usage in usages[1:])
    assert page.value("jitney_prompt_tokens_total") == prompts
    assert page.value("jitney_resumed_tokens_total") > SAID_BY_THE_DEAD
    assert page.series("jitney_jobs_left_total", "outcome") == {
        "finished": len(jobs),
        "cancelled": 1,
        "lost": 1,
        "failed": 1,
    }
    assert page.series("jitney_request_success_total", "finished_reason") == {"length": len(jobs) + 1}
    assert page.value("jitney_leases_reclaimed_total") == 1
    assert page.value("jitney_redelivered_total") == 2
    assert page.value("jitney_fenced_writes_total") == 1
    assert page.value("jitney_num_preemptions_total") > 0
    assert page.value("jitney_cancel_latency_seconds_count") == 1
    assert page.value("jitney_deadline_margin_seconds_count") == 4
    assert page.value("jitney_e2e_request_latency_seconds_count") == len(jobs)
    # Every job that was not begun by somebody else.
    assert page.value("jitney_time_to_first_token_seconds_count") == len(jobs) - 1
    assert page.value("jitney_computed_tokens_total") == page.value("jitney_iteration_tokens_total_sum")
    assert page.value("jitney_request_generation_tokens_sum") == said
    assert page.value("jitney_num_requests_running") == page.value("jitney_num_requests_waiting") == 0
    # The API says the same, under the same labels.
    mine = {"model_name": "hash", "queue": queue_name, "worker": "w1"}
    for name in ("jitney_generation_tokens_total", "jitney_jobs_claimed_total", "jitney_num_preemptions_total"):
        assert shared.value(name, **mine) == page.value(name, **mine) > 0
    assert Counter(sample.labels.get("tenant") for sample in shared.samples).keys() == {None}

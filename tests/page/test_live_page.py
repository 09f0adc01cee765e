"""The live page in a browser, on the real stack: what it shows is what the worker does, step by step."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect
from tests.browsers import DESKTOP, PHONE, OpenPage, barriers
from tests.page.stage import QUEUE, Stage

from jitney.cards import QueueCard, write_card
from jitney.keys import QUEUES, JobId, new_job_id
from jitney.messages import JobSpec
from jitney.queue import Entry

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIVENESS_MS = 30_000
expect.set_options(timeout=LIVENESS_MS)


@pytest_asyncio.fixture(loop_scope="module")
async def jobs(stage: Stage) -> AsyncIterator[list[Any]]:
    """Filled by a test; whoever is in it is over at the end, and the worker runs freely."""
    made: list[Any] = []
    yield made
    await stage.clear(*made)


def seat(page: Page, job: Any) -> Any:
    return page.locator(f'.seat:not(.free)[data-job="{job.id}"]')


async def test_page_shows_the_jobs_that_run_and_how_far_they_are(
    stage: Stage, open_page: OpenPage, jobs: list[Any]
) -> None:
    stage.gate.allow(0)
    jobs += [await stage.enqueue(60, 5, 6, 7), await stage.enqueue(60, 8, 9)]
    await stage.until_seated(*jobs)
    async with open_page(stage.url) as page:
        for job in jobs:
            await expect(seat(page, job)).to_have_count(1)
            await expect(seat(page, job).locator(".job")).to_have_text("…" + job.id[-6:])
        said = seat(page, jobs[0]).locator(".tokens")
        number = int((await said.text_content() or "").split(" of 60")[0])
        await expect(seat(page, jobs[0]).locator(".phase")).to_have_text("decode")
        await stage.advance(2)
        await expect(said).to_have_text(f"{number + 2} of 60")
        await expect(page.get_by_text("0 prefill + 2 decode = 2 of 64 tokens")).to_be_visible()
        await expect(page.get_by_role("img", name=re.compile(r"^8 KV blocks: [2-8] used, 0 shared"))).to_be_visible()
        await expect(page.locator(".worker header")).to_contain_text("2 of 4 seats taken")
        stage.gate.allow(float("inf"))
        await expect(page.locator(".worker .seat:not(.free)")).to_have_count(0)
        await expect(page.locator(".figure", has_text="tokens per second").locator(".value")).not_to_have_text("–")


async def test_page_shows_a_seat_that_was_left_in_one_step_and_taken_in_the_next(
    stage: Stage, open_page: OpenPage, jobs: list[Any]
) -> None:
    stage.gate.allow(0)
    jobs += [await stage.enqueue(length, length) for length in (40, 25, 26, 27)]
    await stage.until_seated(*jobs)
    async with open_page(stage.url) as page:
        for job in jobs:
            await expect(seat(page, job)).to_have_count(1)
        fifth = await stage.enqueue(10, 9)
        jobs.append(fifth)
        await stage.until(lambda view: view.num_waiting == 1)
        stage.gate.allow(float("inf"))
        left = page.locator(f'.moves .left[data-job="{jobs[1].id}"]')
        took = page.locator(f'.moves .joined[data-job="{fifth.id}"]')
        await expect(took).to_have_class(re.compile(r"\bnext\b"))
        steps = [int(await one.get_attribute("data-step") or 0) for one in (left, took)]
        seats = [await one.get_attribute("data-seat") for one in (left, took)]
        assert steps[1] == steps[0] + 1
        assert seats[0] == seats[1] != "0"


async def test_page_shows_a_preemption_and_the_timeline_of_its_job(
    stage: Stage, open_page: OpenPage, jobs: list[Any]
) -> None:
    """Two jobs that together need more than the cache has: the later one gives way, and comes back."""
    stage.gate.allow(0)
    first = await stage.enqueue(70, *range(3, 50))
    later = await stage.enqueue(60, *range(4, 20))
    jobs += [first, later]
    async with open_page(stage.url) as page:
        stage.gate.allow(float("inf"))
        lost = page.locator(".moves .preempted")
        await expect(lost.first).to_be_visible()
        await lost.first.get_by_role("button").click()
        timeline = page.locator(".timeline")
        await expect(timeline.locator('[data-what="finished"]')).to_be_visible()
        whats = await timeline.locator("li").evaluate_all("all => all.map((one) => one.dataset.what)")
        assert whats[:3] == ["queued", "claimed", "prefill"]
        middle = whats[3:-1]
        assert middle == ["joined", "preempted"] * (len(middle) // 2 - 1) + ["joined", "left"]
        assert "preempted" in middle
        await page.keyboard.press("Escape")
        await expect(page.locator("#job")).to_be_hidden()
        await expect(page).to_have_url(stage.url)


async def test_page_cancels_a_job(stage: Stage, open_page: OpenPage, jobs: list[Any]) -> None:
    stage.gate.allow(0)
    job = await stage.enqueue(90)
    jobs.append(job)
    await stage.until_seated(job)
    async with open_page(stage.url) as page:
        await seat(page, job).click()
        await page.get_by_role("button", name="Cancel this job").click()
        await expect(page.locator('.timeline [data-what="cancelled"]')).to_be_visible()
        stage.gate.allow(float("inf"))
        await expect(seat(page, job)).to_have_count(0)
    assert (await job.status()).reason == "cancelled"


async def test_page_asks_and_shows_its_own_job_join_the_batch(stage: Stage, open_page: OpenPage) -> None:
    async with open_page(stage.url) as page:
        await expect(page.locator("#ask-queue")).to_have_value(QUEUE)
        stage.gate.allow(3)
        await page.get_by_label("Your message joins the batch above.").fill("hello")
        await page.locator("#ask-tokens").fill("12")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator(".seat.mine")).to_have_count(1)
        stage.gate.allow(float("inf"))
        await expect(page.locator("#ask-state")).to_contain_text("Finished: ")
        said = await page.locator("#ask-answer").text_content()
        job = stage.client.job(str(await page.locator("#ask-answer").get_attribute("data-job")))
        assert said == (await job.result()).text


ERROR = {"type": "server_error", "code": "nan_logits", "message": "layer 3 said <b>NaN</b>", "param": None}


@pytest_asyncio.fixture(loop_scope="module")
async def buried(stage: Stage) -> AsyncIterator[JobId]:
    """A dead letter, in a queue of its own that has no worker."""
    redis, queue = stage.client.redis, stage.client.queue("mine-pit")
    await write_card(redis, queue.name, QueueCard(model="none", max_model_len=64, vocab_size=64))
    spec = JobSpec(prompt=(3, 4), band="standard").seeded()
    id = new_job_id(queue.name)
    await queue.enqueue(Entry(id, spec.encode(), spec.band, num_prompt_tokens=2))
    claimed = await queue.claim("digger", "once", credit=1, fingerprint="f", lease_s=600)
    assert await queue.retry(id, claimed.deliveries[0].fence, max_tries=1, error=ERROR) == "dead"
    yield id
    await redis.hdel(QUEUES, queue.name)


async def test_page_shows_a_dead_letter_and_requeues_it(stage: Stage, open_page: OpenPage, buried: JobId) -> None:
    queue = stage.client.queue("mine-pit")
    async with open_page(stage.url) as page:
        await expect(page.locator("#dead li")).to_contain_text("layer 3 said <b>NaN</b>")
        button = page.get_by_role("button", name=f"requeue {buried}")
        await button.focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#state")).to_contain_text("Queued anew as")
        await expect(page.locator("#dead")).to_contain_text("None.")
        await expect(page.locator(".bands .told").filter(has_text="1 waiting")).to_have_count(1)
    assert (await queue.count_dead(), (await queue.counts())[0]) == (0, 1)


async def test_page_plays_the_two_policies(stage: Stage, open_page: OpenPage) -> None:
    async with open_page(stage.url) as page:
        await expect(page.locator("jitney-lockstep .lane")).to_have_count(2)
        await expect(page.locator(".readout")).to_contain_text("step 0 of")
        await page.get_by_role("button", name="play").click()
        await expect(page.locator(".readout")).not_to_contain_text("step 0 of")


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light"), (PHONE, "dark")])
async def test_page_keeps_nobody_out_and_fits_its_screen(
    stage: Stage, open_page: OpenPage, jobs: list[Any], size: tuple[int, int], scheme: Literal["light", "dark"]
) -> None:
    stage.gate.allow(0)
    jobs += [await stage.enqueue(60, n) for n in (3, 4)]
    await stage.until_seated(*jobs)
    async with open_page(stage.url, size=size, scheme=scheme) as page:
        await expect(seat(page, jobs[1])).to_have_count(1)
        assert await page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert await barriers(page) == []
        await seat(page, jobs[0]).click()
        await expect(page.locator(".timeline li").first).to_be_visible()
        assert await barriers(page) == []


async def test_page_is_reached_by_keyboard_alone(stage: Stage, open_page: OpenPage, jobs: list[Any]) -> None:
    stage.gate.allow(0)
    jobs.append(await stage.enqueue(60))
    await stage.until_seated(*jobs)
    async with open_page(stage.url) as page:
        await expect(seat(page, jobs[0])).to_have_count(1)
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.dataset.job") == jobs[0].id
        await page.keyboard.press("Enter")
        await expect(page.locator("#job")).to_be_visible()

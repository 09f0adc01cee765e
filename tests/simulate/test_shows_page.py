"""The page that `jitney simulate --html` writes, in a browser: what it plays is what was simulated, or recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.async_api import Page, Route
from tests.browsers import DESKTOP, PHONE, OpenPage, barriers

from jitney.shows import asset
from jitney_worker.record.reading import RecordedRun, read_runs
from jitney_worker.simulate.animation import two_policies
from jitney_worker.simulate.page import page as comparison_page
from jitney_worker.simulate.page import record_page
from jitney_worker.simulate.run import Comparison, PolicyRun, simulate_policies
from jitney_worker.simulate.scenarios import SIXTEEN_JOBS, Scenario, ScenarioJob
from jitney_worker.simulate.timeline import of_record

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECORD = Path(__file__).parents[2] / "docs" / "between-two-steps.jsonl"
PLAYER = "document.querySelector('jitney-lockstep')"
LIVENESS_MS = 30_000

READ_LANES = """() => [...document.querySelectorAll('jitney-lockstep .lane')].map((lane) => ({
  name: lane.getAttribute('aria-label'),
  figures: Object.fromEntries(
    [...lane.querySelectorAll('dl > div')].map((one) => [one.className, one.lastChild.textContent]),
  ),
  chips: [...lane.querySelectorAll('.chip')].map((chip) => chip.textContent),
  waiting: [...lane.querySelectorAll('.small')].map((chip) => chip.textContent),
}))"""


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return simulate_policies(SIXTEEN_JOBS, num_seats=4, step_s=0.05)


@pytest.fixture(scope="module")
def record() -> RecordedRun:
    return read_runs(RECORD)[-1]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, comparison: Comparison, record: RecordedRun) -> dict[str, str]:
    """Their addresses."""
    where = tmp_path_factory.mktemp("pages")
    written = {"simulated": comparison_page(comparison), "recorded": record_page(record, of_record(record))}
    for name, text in written.items():
        (where / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (where / f"{name}.html").as_uri() for name in written}


async def go_to(page: Page, step: int) -> dict[str, dict[str, Any]]:
    """Set the player to a step; what each lane shows."""
    await page.evaluate(f"{PLAYER}.at = {step}")
    lanes: list[dict[str, Any]] = await page.evaluate(READ_LANES)
    return {lane["name"]: lane for lane in lanes}


async def at(page: Page) -> int:
    return int(await page.evaluate(f"{PLAYER}.at"))


def expected(run: PolicyRun, step: int) -> dict[str, Any]:
    """The same lane out of the simulation, counted step by step."""
    now = min(step, run.num_steps)
    seats = run.seats_at(now)
    chips = [
        "empty"
        if one is None
        else f"{one.job.name} ended"
        if one.end_step <= now
        else f"{one.job.name} {now - one.start_step}/{one.job.num_output_tokens}"
        for one in seats
    ]
    busy = [sum(one is not None and one.end_step > done for one in run.seats_at(done)) for done in range(now)]
    num_idle = sum(run.num_seats - number for number in busy)
    num_wasted = sum(run.num_seats - number for done, number in enumerate(busy) if run.waiting_at(done))
    num_busy = sum(one is not None and one.end_step > now for one in seats)
    return {
        "name": run.policy,
        "figures": {
            "busy": f"{num_busy} of {run.num_seats}" if step < run.num_steps else f"over at {run.num_steps:,}",
            "tokens": f"{sum(max(0, min(now, one.end_step) - one.start_step) for one in run.jobs):,}",
            "done": f"{sum(one.end_step <= now for one in run.jobs)} of {len(run.jobs)}",
            "waiting": f"{len(run.waiting_at(now))}",
            "idle": f"{num_idle:,}",
            "wasted": f"{num_wasted:,}",
        },
        "chips": chips,
        "waiting": [one.job.name for one in run.waiting_at(now)],
    }


async def test_it_shows_every_lane_as_it_was_simulated_at_any_step(
    open_page: OpenPage, pages: dict[str, str], comparison: Comparison
) -> None:
    async with open_page(pages["simulated"]) as page:
        for step in (0, 1, 29, 30, 31, 399, 400, 430, 700, 859, 860, 861, 1_599, 1_600, 2_330):
            lanes = await go_to(page, step)
            assert list(lanes) == ["static", "continuous", "naive"]
            for run in comparison.runs:
                assert lanes[run.policy] == expected(run, step)


async def test_its_counters_make_the_point(open_page: OpenPage, pages: dict[str, str]) -> None:
    """Under continuous no seat is ever idle while somebody waits; under static 2,960 seat-steps are."""
    async with open_page(pages["simulated"]) as page:
        lanes = await go_to(page, 2_330)
        wasted = {name: lane["figures"]["wasted"] for name, lane in lanes.items()}
        assert wasted == {"static": "2,960", "continuous": "0", "naive": "0"}
        assert {lane["figures"]["tokens"] for lane in lanes.values()} == {"2,330"}


async def test_it_shows_the_seats_of_a_recorded_run_step_by_step(
    open_page: OpenPage, pages: dict[str, str], record: RecordedRun
) -> None:
    async with open_page(pages["recorded"]) as page:
        num_tokens = 0
        for step in record.steps:
            lanes = await go_to(page, step.step - 1)
            lane = lanes["continuous"]
            recorded = ["empty"] * record.began.num_seats
            for row in step.rows:
                recorded[row.seat] = f"#{row.number}"
            assert [chip.split(" ")[0] for chip in lane["chips"]] == recorded, step.step
            assert lane["figures"]["tokens"] == f"{num_tokens:,}"
            num_tokens += sum(row.gained for row in step.rows)
        assert await page.locator(".bar.preempted").count() == 3, "two in the tracks, one in the legend"


async def test_it_plays_and_pauses_and_plays_again_from_the_start(open_page: OpenPage, pages: dict[str, str]) -> None:
    async with open_page(pages["simulated"]) as page:
        assert await at(page) == 0, "nothing moves by itself"
        await page.get_by_label("speed").select_option("200")
        await page.get_by_role("button", name="play").click()
        await page.wait_for_function(f"{PLAYER}.at > 20", timeout=LIVENESS_MS)
        await page.get_by_role("button", name="pause").click()
        stood = await at(page)
        await page.wait_for_timeout(300)
        assert await at(page) == stood
        await go_to(page, 2_329)
        await page.get_by_role("button", name="play").click()
        await page.wait_for_function(f"{PLAYER}.at === 2330 && !{PLAYER}.isPlaying", timeout=LIVENESS_MS)
        await page.get_by_role("button", name="play").click()
        await page.wait_for_function(f"{PLAYER}.at < 2000", timeout=LIVENESS_MS)


async def test_it_is_played_by_keyboard_alone(open_page: OpenPage, pages: dict[str, str]) -> None:
    async with open_page(pages["simulated"]) as page:
        await page.keyboard.press("Tab")
        focused = await page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert focused == "back to the start"
        for _ in range(3):
            await page.keyboard.press("ArrowRight")
        await page.keyboard.press("ArrowLeft")
        assert await at(page) == 2
        await page.keyboard.press("n")
        assert await at(page) == 30
        told = await page.locator(".told").text_content()
        assert told is not None
        assert "After 30 steps: static 120 tokens, 3 finished" in told
        for _ in range(2):
            await page.keyboard.press("Tab")
        await page.keyboard.press("Space")
        await page.wait_for_function(f"{PLAYER}.at > 30", timeout=LIVENESS_MS)
        await page.keyboard.press("Space")
        assert not await page.evaluate(f"{PLAYER}.isPlaying")
        stood = await at(page)
        await page.get_by_label("step", exact=True).focus()
        await page.keyboard.press("ArrowRight")
        assert await at(page) == stood + 1
        await page.keyboard.press("Home")
        assert await at(page) == 0
        await page.keyboard.press("Space")
        await page.wait_for_function(f"{PLAYER}.at > 0", timeout=LIVENESS_MS)
        await page.keyboard.press("n")
        assert await at(page) > 0
        assert not await page.evaluate(f"{PLAYER}.isPlaying")


async def test_where_motion_is_unwelcome_it_goes_from_move_to_move(
    open_page: OpenPage, pages: dict[str, str], comparison: Comparison
) -> None:
    async with open_page(pages["simulated"], calm=True) as page:
        await page.get_by_role("button", name="play").click()
        await page.wait_for_function(f"{PLAYER}.at > 0", timeout=LIVENESS_MS)
        moves = {step for run in comparison.runs for one in run.jobs for step in (one.start_step, one.end_step)}
        assert await at(page) in moves, "never a step in which nothing moved"


@pytest.mark.parametrize(("name", "scheme"), [("simulated", "light"), ("simulated", "dark"), ("recorded", "dark")])
async def test_it_keeps_nobody_out(
    open_page: OpenPage, pages: dict[str, str], name: str, scheme: Literal["light", "dark"]
) -> None:
    async with open_page(pages[name], scheme=scheme) as page:
        await go_to(page, 45)
        assert await barriers(page) == []


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
async def test_it_fits_its_screen_and_its_buttons_a_finger(
    open_page: OpenPage, pages: dict[str, str], size: tuple[int, int]
) -> None:
    async with open_page(pages["simulated"], size=size) as page:
        await go_to(page, 700)
        assert await page.evaluate("document.documentElement.scrollWidth") == size[0]
        for box in [await button.bounding_box() for button in await page.locator("jitney-lockstep button").all()]:
            assert box is not None
            assert min(box["width"], box["height"]) >= 44
        cut_off = await page.evaluate(
            "[...document.querySelectorAll('.chip')].filter((one) => one.scrollWidth > one.clientWidth).length"
        )
        assert cut_off == 0, "what a chip says is not to be read"


async def test_names_are_words_whatever_is_in_them(open_page: OpenPage, tmp_path: Path) -> None:
    name = "</script><b>&"
    jobs = (ScenarioJob(name, 3), ScenarioJob("<img src=x>", 2, arrival_step=1, arrival_s=0.05))
    path = tmp_path / "page.html"
    path.write_text(comparison_page(simulate_policies(Scenario("odd", "odd", jobs), num_seats=1, step_s=0.05)))
    async with open_page(path.as_uri()) as page:
        lanes = await go_to(page, 1)
        assert lanes["continuous"]["chips"] == [f"{name} 1/3"]
        assert lanes["continuous"]["waiting"] == ["<img src=x>"]
        assert await page.locator("b", has_text="&").count() == 3, (
            "a chip in each lane, and no element of the name's own"
        )


async def test_another_page_can_play_the_run_that_is_kept_beside_the_script(
    open_page: OpenPage, chromium: Any, comparison: Comparison
) -> None:
    """As the API will serve them: script, style and run as files of their own."""
    html = (
        '<!doctype html><html lang="en"><title>t</title><link rel="stylesheet" href="/lockstep.css">'
        '<jitney-lockstep src="/sixteen-jobs.json"></jitney-lockstep><script src="/lockstep.js"></script>'
    )
    kinds = {"lockstep.css": "text/css", "lockstep.js": "text/javascript", "sixteen-jobs.json": "application/json"}

    async def serve(route: Route) -> None:
        name = route.request.url.rsplit("/", 1)[1]
        if name in kinds:
            await route.fulfill(body=asset(name), content_type=kinds[name])  # type: ignore[arg-type]
        else:
            await route.fulfill(body=html, content_type="text/html")

    page = await chromium.new_page()
    await page.route("**/*", serve)
    await page.goto("http://shows.test/")
    await page.wait_for_selector("jitney-lockstep .lane", timeout=LIVENESS_MS)
    lanes = await go_to(page, 700)
    await page.close()
    assert lanes == {policy: expected(comparison.run(policy), 700) for policy in ("static", "continuous")}


async def test_the_run_that_is_kept_beside_the_script_is_the_simulated_one() -> None:
    assert asset("sixteen-jobs.json") == two_policies()
    assert {lane["name"] for lane in json.loads(two_policies())["lanes"]} == {"static", "continuous"}


async def test_a_job_that_was_taken_out_while_it_waited_waits_no_more(
    open_page: OpenPage, record: RecordedRun, tmp_path: Path
) -> None:
    timeline = of_record(record)
    jobs = (*timeline.jobs, replace(timeline.jobs[0], label="#8", arrival_step=3, gone_step=9))
    path = tmp_path / "page.html"
    path.write_text(record_page(record, replace(timeline, jobs=jobs)), encoding="utf-8")
    async with open_page(path.as_uri()) as page:
        shown = [(await go_to(page, step))["continuous"]["waiting"] for step in (2, 3, 8, 9)]
    assert shown == [["#5"], ["#5", "#8"], ["#5", "#8"], ["#5"]]

"""F20, F22: writers of other versions, and workers of other builds."""

from __future__ import annotations

import orjson
from tests.faults.answers import Alone, Asked, Asking
from tests.faults.arena import Arena
from tests.faults.conftest import Report
from tests.faults.readers import PythonClient
from tests.faults.test_f18_poison import submit_raw

from jitney.messages import Event

OTHER_SALT = 77


async def test_f20_fields_of_a_later_version_are_kept_and_passed_on(field: Arena, seed: int, report: Report) -> None:
    """In jobs and in events, over a change from the newer worker to an older one."""
    newer = await field.start_worker("w1", "--newer", "--at", "decode:12:die")
    sampling = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    asked = Asked(f"f20-{seed}", {"prompt": [5, 6, 7], **sampling})
    field.answers[asked.name] = field.alone.answer(asked)
    job_id = await submit_raw(
        field, asked.name, orjson.dumps({"v": 1, "prompt": [5, 6, 7], "sampling": sampling, "x_later": {"deep": [1]}})
    )
    field.read(PythonClient(field.client(), field.ledger), asked, job_id)
    field.read(field.http(), asked, job_id)
    await newer.ended()
    assert orjson.loads(await field.command("GET", field.keys.body(job_id)))["x_later"] == {"deep": [1]}
    await field.start_worker("w2")
    assert report(await field.finished(f"F20 versions #{seed}")).summary.num_finished == 1
    assert await field.num_takeovers() == 1
    kept = ['"x_later":{"a":[1]}' in line.payload for line in field.ledger.of("event") if line.reader == "http"]
    assert kept[0]
    assert not kept[-1]
    await field.rests()


async def test_f22_another_build_leaves_a_begun_job_to_its_own(field: Arena, seed: int, report: Report) -> None:
    """w2 is another model. It takes what is new, and never goes on with what w1 has begun."""
    first = await field.start_worker("w1", "--at", "decode:15:die", fingerprint="build.1", seats=64)
    begun = await field.load(seed, num_streams=20, num_bulk=0)
    await first.ended()
    said = {job_id for job_id in begun if (await field.status(job_id)).seq > 0}
    assert said == set(begun), "what was not begun is anybody's, and here it must be clear whose answer is right"
    await field.start_worker("w2", fingerprint="build.2", salt=77)
    other = Alone(field.alone.tokenizer, field.alone.plain, salt=77)
    fresh = Asking(seed + 1_000).some(6)
    for asked in fresh:
        await field.follow(PythonClient(field.client(), field.ledger), asked)
        field.answers[asked.name] = other.answer(asked)
    fresh_ids = set(field.jobs) - set(begun)
    await field.until(lambda: field.are_done(fresh_ids), "the fresh jobs")
    assert {(await field.status(job_id)).state for job_id in said} <= {"returned", "done"}
    await field.start_worker("w3", fingerprint="build.1")
    assert report(await field.finished(f"F22 builds #{seed}")).summary.num_finished == 26
    assert await field.num_takeovers() > 5
    await field.rests()


async def begun_by_a_build_that_is_gone(field: Arena, seed: int) -> list[str]:
    """All of them have said something when the only worker of their build dies for good."""
    first = await field.start_worker("w1", "--at", "decode:15:die", fingerprint="build.1", seats=64)
    begun = await field.load(seed, num_streams=20, num_bulk=0, asking=Asking(seed, (60, 90)))
    await first.ended()
    held = sorted(await field.owned_by("w1"))
    assert all([(await field.status(job_id)).seq > 0 for job_id in begun])
    assert len(held) > 10
    return held


async def test_f22_after_a_wait_a_job_whose_build_is_gone_fails_and_keeps_its_text(
    field: Arena, seed: int, report: Report
) -> None:
    held = await begun_by_a_build_that_is_gone(field, seed)
    await field.start_worker("w2", "--resume-wait-s", "0.1", fingerprint="build.2", salt=OTHER_SALT)
    await field.until(lambda: field.are_done(held), "all of them ended")

    def meant(_name: str, end: Event) -> bool:
        return end.type == "failed" and (end.error or {}).get("code") == "no_worker"

    figures = report(await field.finished(f"F22 fail #{seed}", may_end_otherwise=meant))
    assert (figures.summary.num_otherwise, figures.summary.num_finished) == (len(held), 20 - len(held))
    ends = [line.event for line in field.ledger.of("event") if line.job in held and line.event.is_terminal]
    assert len(ends) == len(held)
    for end in ends:
        assert "no worker of the build that began this answer" in (end.error or {})["message"]
        assert (end.usage or {})["completion_tokens"] > 0
    await field.rests()


async def test_f22_or_another_build_goes_on_where_it_was_allowed_to_and_says_so(
    field: Arena, seed: int, report: Report
) -> None:
    """The other build is the same model under another name, so that what it says can be compared."""
    held = await begun_by_a_build_that_is_gone(field, seed)
    await field.start_worker("w2", "--resume-wait-s", "0.1", "--resume-mismatch", "continue", fingerprint="build.2")
    figures = report(await field.finished(f"F22 continue #{seed}"))
    assert figures.summary.num_finished == 20
    assert figures.num_takeovers > 10
    told = {line.job: line.event.fingerprints for line in field.ledger.of("event") if line.event.is_terminal}
    assert {told[job_id] for job_id in held} == {("build.1", "build.2")}
    assert {fingerprints for job_id, fingerprints in told.items() if job_id not in held} <= {None}
    await field.rests()

"""F18, F20, F22: jobs that break workers, writers of other versions, workers of other builds."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from tests.faults.answers import Alone, Answer, Asked, Asking
from tests.faults.arena import Arena
from tests.faults.conftest import Report
from tests.faults.hash_model import CRASH, HANG, NAN
from tests.faults.readers import PythonClient

from jitney.keys import new_job_id
from jitney.messages import Event
from jitney.queue import Entry


def ends_as(name: str, *codes: str) -> Any:
    """Only this request may end otherwise, as `failed` with one of these codes."""

    def meant(asked: str, end: Event) -> bool:
        return asked == name and end.type == "failed" and (end.error or {}).get("code") in codes

    return meant


async def poisoned(field: Arena, seed: int, token_id: int) -> Asked:
    """Submit a request that no worker survives (or whose row fails)."""
    asked = Asked(f"poison-{seed}", {"prompt": [5, token_id, 6], "max_tokens": 20, "temperature": 0.0})
    await field.follow(PythonClient(field.client(), field.ledger), asked)
    return asked


@pytest.mark.parametrize(("kind", "token_id"), [("crash", CRASH), ("hang", HANG)])
async def test_f18_a_job_that_kills_its_worker_is_buried_and_its_neighbours_finish(
    field: Arena, seed: int, kind: str, token_id: int, report: Report
) -> None:
    await field.write_card()
    asked = await poisoned(field, seed, token_id)  # the first in every batch, before anybody has said a word
    await field.load(seed, num_streams=20, num_bulk=10)
    field.ledger.fault(f"poison of the kind {kind}")
    async with field.kept_alive("w1", "w2", stall_after_s=1.0):
        meant = ends_as(asked.name, "max_attempts")
        figures = report(await field.finished(f"F18 {kind} #{seed}", may_end_otherwise=meant))
        assert (figures.summary.num_finished, figures.summary.num_otherwise) == (30, 1)
        deaths = [line for worker in field.workers.values() for line in worker.said(f"poisoned {kind}")]
        assert len(deaths) == 3, "as many as a job may have attempts without progress"
        assert [dead.reason for dead in await field.queue.dead()] == ["max_attempts"]


async def test_f18_a_row_that_is_not_a_number_fails_alone(field: Arena, seed: int, report: Report) -> None:
    await field.start_workers("w1", "w2")
    asked = await poisoned(field, seed, NAN)
    await field.load(seed, num_streams=20, num_bulk=10)
    meant = ends_as(asked.name, "nan_logits")
    summary = report(await field.finished(f"F18 NaN #{seed}", may_end_otherwise=meant)).summary
    assert (summary.num_finished, summary.num_otherwise) == (30, 1)
    assert all(worker.is_alive for worker in field.workers.values())
    await field.rests()


async def submit_raw(field: Arena, name: str, body: bytes) -> str:
    """As a client of any version may: the contract's script, and whatever bytes."""
    job_id = new_job_id(field.queue_name)
    await field.queue.enqueue(Entry(job_id, body, digest=name))
    field.ledger.accepted(name, job_id)
    return job_id


@pytest.mark.parametrize(
    ("body", "code", "is_buried"),
    [
        (b"\xff\x00 no JSON", "undecodable", True),
        (b'{"v":2,"prompt":[5]}', "undecodable", True),
        (b'{"v":1,"prompt":[5],"sampling":{"x_later":1}}', "unknown_field", False),
        (b'{"v":1,"prompt":[99999]}', "invalid_value", False),
    ],
    ids=["no JSON", "version 2", "later sampling", "no such token"],
)
async def test_f18_what_cannot_be_read_is_refused_plainly(
    field: Arena, seed: int, body: bytes, code: str, is_buried: bool
) -> None:
    await field.start_workers("w1")
    await field.load(seed, num_streams=4, num_bulk=0)
    field.answers["raw"] = Answer((), "", "length", 0)
    job_id = await submit_raw(field, "raw", body)
    field.read(PythonClient(field.client(), field.ledger), Asked("raw", {}), job_id)
    summary = (await field.finished("F18 raw", may_end_otherwise=ends_as("raw", code))).summary
    assert (summary.num_finished, summary.num_otherwise) == (4, 1)
    assert [dead.id for dead in await field.queue.dead()] == ([job_id] if is_buried else [])
    await field.rests("dead", "body")


async def test_f20_fields_of_a_later_version_are_kept_and_passed_on(field: Arena, seed: int, report: Report) -> None:
    """In jobs and in events, over a change from the newer worker to an older one."""
    newer = await field.start_worker("w1", "--newer", "--at", "decode:12:die")
    asked = Asking(seed).one(prompt=[5, 6, 7], temperature=0.0, max_tokens=60, ignore_eos=True)
    for name in ("messages", "stop", "stop_token_ids", "seed", "logprobs"):
        asked.fields.pop(name, None)
    field.answers[asked.name] = field.alone.answer(asked)
    sampling = {name: asked.fields[name] for name in ("temperature", "max_tokens", "ignore_eos")}
    job_id = await submit_raw(
        field, asked.name, orjson.dumps({"v": 1, "prompt": [5, 6, 7], "sampling": sampling, "x_later": {"deep": [1]}})
    )
    field.read(PythonClient(field.client(), field.ledger), asked, job_id)
    field.read(field.http(), asked, job_id)
    await newer.ended()
    assert orjson.loads(await field.redis.get(field.keys.body(job_id)))["x_later"] == {"deep": [1]}
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

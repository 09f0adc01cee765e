"""F18: jobs that break workers, and jobs that nobody can read."""

from __future__ import annotations

from typing import Any

import pytest
from tests.faults.answers import Answer, Asked
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
    async with field.kept_alive("w1", "w2", stall_after_s=2 * field.lease_s):
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

"""The promise in one row: `kill -9` in the middle of sixty streams, judged token by token."""

from __future__ import annotations

import signal

import pytest
from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.conftest import Report

from jitney_worker.settings import WorkerSection

NUM_STREAMS = 60

MOMENTS = {
    "mid-prefill": "prefill:6",
    "mid-decode": "decode:30",
    "between append and finish": "before:finish:3",
}
PACES = {"a write for each step": 0.0, "as it comes": WorkerSection().publish_interval_s}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("pace", PACES)
async def test_kill_9_amid_sixty_streams_costs_a_pause_and_not_one_wrong_missing_or_repeated_token(
    field: Arena, seed: int, pace: str, moment: str, report: Report
) -> None:
    """Thirty streams over HTTP, thirty by the client, three workers, one of them killed where it says that it stands.

    The checker compares every token, text, log probability, finish reason and usage with those of a run alone, in
    what each reader was given and in the log. How long the pause was is reported, beside the lease.
    """
    dying = {"w1": ["--at", f"{MOMENTS[moment]}:die"]}
    victim, *_ = await field.start_workers(
        "w1", "w2", "w3", options=dying, seats=NUM_STREAMS * 2 // 5, publish_interval_s=PACES[pace]
    )
    jobs = await field.load(seed, num_streams=NUM_STREAMS, num_bulk=0, asking=Asking(seed, (60, 120)))
    assert await victim.ended() == -signal.SIGKILL
    assert victim.said("at ") == [f"at {MOMENTS[moment]} die"]
    figures = report(await field.finished(f"sixty streams, {moment}, {pace} #{seed}"))
    assert (figures.summary.num_accepted, figures.summary.num_finished) == (NUM_STREAMS, NUM_STREAMS)
    assert (figures.summary.num_otherwise, figures.summary.num_lost) == (0, 0)
    assert figures.summary.num_tokens == sum(answer.num_tokens for answer in field.answers.values())
    assert figures.num_takeovers > 0
    readers = [line.reader for line in field.ledger.of("event") if line.event.is_terminal]
    assert (readers.count("http"), readers.count("py")) == (NUM_STREAMS // 2, NUM_STREAMS // 2)
    assert await field.are_done(jobs)
    await field.rests()

"""F1 with several answers to each prompt: a worker dies in the middle of some, after the end of others."""

from __future__ import annotations

import signal
from collections import defaultdict
from typing import Any

import pytest
from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.conftest import Report

from jitney.messages import Event

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "min_tokens beside a stop string": {"min_tokens": 40, "stop": "e", "stop_token_ids": list(range(3, 100))},
    "presence penalty and bias": {"presence_penalty": 1.0, "logit_bias": {7: -100.0, 8: -100.0, 9: -100.0}},
    "repetition penalty and bad words": {"repetition_penalty": 1.5, "bad_words": ["a", "e", "t", "o"]},
}


def cuts(events: list[Event]) -> list[tuple[int, int]]:
    """At each takeover: how many choices were in the middle, and how many had ended."""
    found, begun, ended = list[tuple[int, int]](), set[int](), set[int]()
    for event in events:
        if event.type == "started" and begun:
            found.append((len(begun - ended), len(ended)))
        if event.type == "tokens":
            begun.add(event.choice)
            if event.finish_reason is not None:
                ended.add(event.choice)
    return found


@pytest.mark.parametrize("name", OPTIONS)
async def test_f1_a_worker_that_dies_amid_several_choices_costs_none_of_them_a_token(
    field: Arena, seed: int, name: str, report: Report
) -> None:
    """Three choices of each, which part ways by their noise; the next worker goes on with each where it stood."""
    fixed = {"n": 3, "temperature": 0.9, "seed": seed, **OPTIONS[name]}
    dying = {"w1": ["--at", "decode:36:die"]}
    victim, *_ = await field.start_workers("w1", "w2", options=dying, seats=36, max_num_batched_tokens=128)
    await field.load(seed, num_streams=24, num_bulk=0, asking=Asking(seed, (60, 120), fixed=fixed))
    assert await victim.ended() == -signal.SIGKILL
    figures = report(await field.finished(f"F1 three choices, {name} #{seed}"))
    assert figures.summary.num_finished == 24
    assert figures.summary.num_tokens == sum(answer.num_tokens for answer in field.answers.values())
    of_job = defaultdict(list)
    for line in field.ledger.of("event"):
        of_job[line.job].append(line.event)
    taken_over = [cut for events in of_job.values() for cut in cuts(events)]
    assert sum(num_open == 3 or num_ended > 0 for num_open, num_ended in taken_over) > 3, taken_over
    assert max(num_open for num_open, _ in taken_over) > 1
    await field.rests()


def test_the_choices_of_these_requests_differ(field: Arena, seed: int) -> None:
    """Else the rows above would prove nothing about which choice is which."""
    for options in OPTIONS.values():
        answer = field.alone.answer(
            Asking(seed, (60, 120), fixed={"n": 3, "temperature": 0.9, "seed": 1, **options}).one()
        )
        assert len({choice.token_ids for choice in answer.choices}) == 3

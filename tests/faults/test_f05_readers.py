"""F5, F15, F19: APIs that die, readers that take nothing, and readers that want no more."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time

from tests.faults.answers import Asked, Asking
from tests.faults.arena import Arena
from tests.faults.conftest import Report
from tests.faults.proxy import Proxy
from tests.faults.readers import HttpClient, PythonClient, ask


async def test_f5_a_killed_api_breaks_no_stream(field: Arena, seed: int, report: Report) -> None:
    """Readers go on at another one after the last event they saw."""
    await field.start_api("api2")
    await field.start_workers("w1", "w2", "w3")
    await field.load(seed)
    await field.streaming()
    victim, _ = field.apis["api"]
    victim.send(signal.SIGKILL)
    await victim.ended()
    await field.more_events(100)
    await field.start_api("api3")
    second, _ = field.apis["api2"]
    second.send(signal.SIGKILL)
    await second.ended()
    figures = report(await field.finished(f"F5 two APIs #{seed}"))
    assert figures.summary.num_finished == 70
    assert figures.summary.num_reconnects > 5
    await field.rests()


async def test_f5_the_death_of_an_api_is_nobodys_disconnect(field: Arena, seed: int, report: Report) -> None:
    """A chat whose reader leaves is cancelled; one whose API is killed is not."""
    await field.start_workers("w1", step_s=0.05)
    child, port = field.apis["api"]
    told = PythonClient(field.client(), field.ledger, "later")
    async with contextlib.AsyncExitStack() as streams:
        ids = []
        for asked in Asking(seed).some(5, messages=[{"role": "user", "content": "on"}], ignore_eos=True):
            asked.fields.pop("prompt", None)
            asked.fields.pop("logprobs", None)
            field.answers[asked.name] = field.alone.answer(asked)
            answer = await ask(port, "POST", "/v1/chat/completions", {"model": "hash", "stream": True, **asked.fields})
            streams.push_async_callback(answer.close)
            assert answer.status == 200, await answer.body()
            ids.append((asked, answer.headers["x-jitney-job-id"]))
        child.send(signal.SIGKILL)
        await child.ended()
        for asked, job_id in ids:
            field.ledger.accepted(asked.name, job_id)
            field.read(told, asked, job_id)
        assert report(await field.finished(f"F5 chat #{seed}")).summary.num_finished == 5


async def test_f15_a_reader_that_takes_nothing_is_cut_off_and_misses_nothing(
    field: Arena, seed: int, report: Report
) -> None:
    """Its connection fills up until the server ends it; the others notice nothing."""
    await field.redis.config_set("client-output-buffer-limit", "pubsub 1mb 512kb 1")
    await field.start_workers("w1", "w2", "w3")
    async with Proxy(field.server.port, receive_buffer=4_096) as proxy:
        stuck = PythonClient(field.client(proxy), field.ledger, "stuck")
        ids = await field.load(seed, num_bulk=0)
        others = len(field.reading)
        for job_id in ids:
            field.read(stuck, Asked(field.jobs[job_id], {}), job_id)
        await field.streaming()
        before = await subscribers(field)
        proxy.hang("down")
        field.ledger.fault("one reader takes nothing any more")
        channel = field.keys.tokens(ids[0])

        async def is_cut_off() -> bool:
            await field.redis.publish(channel, b"x" * 65_536)
            return len(await subscribers(field) & before) < len(before)

        await field.until(is_cut_off, "the server ends the connection of the one who takes nothing")
        await asyncio.wait(field.reading[:others], timeout=60)
        assert all(task.done() for task in field.reading[:others])
        proxy.heal()
        figures = report(await field.finished(f"F15 stuck reader #{seed}"))
    assert (figures.summary.num_accepted, figures.summary.num_finished) == (40, 40)
    await field.rests()


async def subscribers(field: Arena) -> set[bytes]:
    """Connections in subscriber mode, by id."""
    listed = await field.redis.execute_command("CLIENT", "LIST", "TYPE", "pubsub")
    text = listed if isinstance(listed, bytes) else b"\n".join(b"id=%b" % str(c["id"]).encode() for c in listed)
    return {line.split()[0] for line in text.splitlines() if line}


async def test_f15_subscriptions_that_are_cut_again_and_again_cost_nothing(
    field: Arena, seed: int, report: Report
) -> None:
    await field.start_workers("w1", "w2", "w3")
    await field.load(seed)
    num_cut = 0
    for _ in range(6):
        await field.more_events(80)
        num_cut += int(await field.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub"))
        field.ledger.fault("CLIENT KILL TYPE pubsub")
    assert report(await field.finished(f"F15 cut #{seed}", cut=num_cut)).summary.num_finished == 70
    assert num_cut > 6
    await field.rests()


NUM_CANCELS = 150


async def test_f19_a_cancel_at_any_moment_is_one_ending(field: Arena, seed: int, report: Report) -> None:
    """Some before anybody claimed, some in the middle, some on the very last event, and some after it."""
    chance = random.Random(seed)
    await field.start_workers("w1", "w2", seats=24)
    python, http = PythonClient(field.client(), field.ledger), field.http()
    cancelling: list[asyncio.Task[None]] = []
    answers = []
    for number, asked in enumerate(Asking(seed, (5, 40)).some(NUM_CANCELS)):
        client = http if number % 2 else python
        if chance.random() < 0.1:
            asked.fields["not_before"] = time.time() + 3_600
        job_id = await field.follow(client, asked)
        last = len(field.answers[asked.name].token_ids) + 2
        moment = 0 if "not_before" in asked.fields else chance.choice((0, chance.randint(1, last), last - 1, last))
        cancelling.append(asyncio.create_task(cancel_at(field, client, job_id, moment, answers)))
    await asyncio.gather(*cancelling)
    figures = report(
        await field.finished(f"F19 cancels #{seed}", may_end_otherwise=lambda _name, end: end.type == "cancelled")
    )
    summary = figures.summary
    figures.notes["cancelled"] = summary.num_otherwise
    assert summary.num_finished + summary.num_otherwise == NUM_CANCELS
    assert summary.num_otherwise == sum(answers)
    assert summary.num_otherwise > 50
    assert summary.num_finished > 10
    await field.rests()


async def cancel_at(
    field: Arena, client: PythonClient | HttpClient, job_id: str, seq: int, answers: list[bool]
) -> None:
    """Cancel once the reader has seen `seq`, or the end."""

    def is_there() -> bool:
        seen = [line.event for line in field.ledger.of("event") if line.job == job_id] if seq else []
        return field.progress[job_id] >= seq or bool(seen and seen[-1].is_terminal)

    await field.told(is_there, f"{seq} events of {job_id}")
    if isinstance(client, PythonClient):
        answers.append(await client.client.job(job_id).cancel())
        return
    before = await field.status(job_id)
    answer = await ask(field.ports()[0], "DELETE", f"/v1/jobs/{job_id}")
    assert answer.status == 200
    said = await answer.json()
    await answer.close()
    # Over HTTP the answer is how the job stands now: whether this call ended it, only the record can tell.
    assert said["status"] in ("cancelled", "finished"), said
    answers.append(said["status"] == "cancelled")
    assert before.reason in ("", said["status"])

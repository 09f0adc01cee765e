"""F5: APIs that die. Their readers go on elsewhere, and nobody takes the death of a process for a disconnect."""

from __future__ import annotations

import contextlib
import signal

from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.conftest import Report
from tests.faults.readers import PythonClient, ask


async def test_f5_a_killed_api_breaks_no_stream(field: Arena, seed: int, report: Report) -> None:
    """Readers go on at another one after the last event they saw."""
    await field.start_api("api2")
    await field.start_workers("w1", "w2", "w3")
    async with field.steady_load(Asking(seed)):
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
    assert figures.summary.num_finished == figures.summary.num_accepted
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

"""Embeddings whose worker is killed with a full batch: each comes from the next one, the same to the last bit."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tests.e2e.programs import program

from jitney import Client

NUM_JOBS = 120
NUM_TOKENS = 400


def prompt(number: int) -> list[int]:
    return [50 + (number * 31 + 7 * position) % 400 for position in range(NUM_TOKENS)]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_worker_killed_among_embeddings_changes_no_bit_of_them(
    redis_url: str, queue_name: str, tiny_model: Path, pooling: str
) -> None:
    options = ("--model", str(tiny_model), "--redis-url", redis_url, "--queue", queue_name, "--dtype", "float32")
    options += ("--num-kv-blocks", "600", "--num-threads", "1", "--lease-s", "4")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(program("worker", *options))
        first.until_line("ready ")
        client = stack.enter_context(Client(redis_url, queue=queue_name))
        undisturbed = [client.generate(prompt(number), pooling=pooling).embedding for number in (0, NUM_JOBS - 1)]
        jobs = [client.enqueue(prompt(number), pooling=pooling) for number in range(NUM_JOBS)]
        assert jobs[0].result(timeout_s=60).embedding == undisturbed[0]
        first.kill()
        first.wait()
        interrupted = [job for job in jobs if job.status().state == "running"]
        assert interrupted, "nothing was on board: the test proves nothing"
        stack.enter_context(program("worker", *options)).until_line("ready ")
        found = [job.result(timeout_s=60).embedding for job in jobs]
        tries = {job.status().tries for job in interrupted}
        logs = [[event.type for event in job.stream()] for job in jobs]
    assert tries == {2}
    assert (found[0], found[-1]) == tuple(undisturbed)
    assert len(set(found)) == NUM_JOBS
    assert logs == [["finished"]] * NUM_JOBS

"""Embeddings whose worker is killed with a full batch: each comes from the next one, the same to the last bit."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from tests.e2e.programs import program

from jitney import Client

NUM_JOBS = 40
NUM_TOKENS = 1_500


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
        before = [client.enqueue(prompt(number), pooling=pooling) for number in range(NUM_JOBS)]
        undisturbed = [job.result(timeout_s=60).embedding for job in before]
        os.kill(first.pid, signal.SIGSTOP)  # or it would be done with the first ones before the last are there
        # Salted, so that nothing is cached, and all of it has to be computed again.
        jobs = [client.enqueue(prompt(number), pooling=pooling, cache_salt="again") for number in range(NUM_JOBS)]
        os.kill(first.pid, signal.SIGCONT)
        jobs[0].result(timeout_s=60)
        first.kill()
        first.wait()
        interrupted = [job for job in jobs if job.status().state == "running"]
        assert interrupted, "nothing was on board: the test proves nothing"
        stack.enter_context(program("worker", *options)).until_line("ready ")
        found = [job.result(timeout_s=60).embedding for job in jobs]
        tries = {job.status().tries for job in interrupted}
        logs = [[event.type for event in job.stream()] for job in jobs]
    assert tries == {2}
    assert found == undisturbed
    assert len(set(found)) == NUM_JOBS
    assert logs == [["finished"]] * NUM_JOBS

"""The record of a real run, on a real model and a real server, against everybody else who saw that run."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, Ears, StartWorker, Turnstile

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.errors import SettingsError
from jitney.workers import Departure, list_workers
from jitney_worker.engine.protocol import ModelOutput, ModelRunner, SchedulerOutput
from jitney_worker.engine.witness import Left
from jitney_worker.model.runner import load_runner
from jitney_worker.record.reading import RecordedRun, read_runs
from jitney_worker.simulate.timeline import of_record

LENGTHS = (40, 9, 60, 33, 25, 12, 48, 5, 17, 30)
"""Of ten jobs on four seats; the cache has no room for the first and the third of them at once."""

NUM_BLOCKS = 8


@dataclass
class Seen:
    """A runner in front of another one: notes what it is asked to compute."""

    runner: ModelRunner
    steps: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)
    hidden_size: int = 0

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        self.steps[scheduled.step] = [
            (item.sequence.id.rsplit("/", 1)[0], item.start, item.stop) for item in scheduled.scheduled
        ]
        return self.runner.execute(scheduled)


@dataclass
class Lived:
    """A recorded run, and what the others say of it. logs: of each job, (tokens in its log, how it ended)."""

    record: RecordedRun
    seen: Seen
    departures: list[Departure]
    logs: dict[str, tuple[int, str]]
    cancelled: str

    def name(self, number: int) -> str:
        return self.record.came[number].id


async def departures(redis: Redis, queue: str, num_jobs: int) -> list[Departure]:
    """The worker's own list of who left, once all have."""
    async with asyncio.timeout(LIVENESS_S):
        while True:
            (view,) = await list_workers(redis, queue)
            if len(view.departures) >= num_jobs:
                return list(view.departures)
            await asyncio.sleep(0.05)


@pytest.fixture
async def lived(
    start_worker: StartWorker,
    client: AsyncClient,
    redis: Redis,
    queue_name: str,
    tiny_directory: Path,
    tmp_path: Path,
    ears: Ears,
) -> Lived:
    """Ten jobs on a tiny model; another one is cancelled when it has said something."""
    runner = load_runner(tiny_directory, dtype="float32", device="cpu", num_blocks=NUM_BLOCKS)
    seen = Seen(runner)
    turnstile = Turnstile(seen)
    engine: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": runner.block_size, "max_num_batched_tokens": 24}
    path = tmp_path / "run.jsonl"
    settings = {"worker": {"record": path, "snapshot_every_s": 0.05}}
    async with start_worker(turnstile, engine=engine, **settings):
        cancelled = await client.enqueue([3, 1, 4], max_tokens=100, ignore_eos=True)
        await turnstile.until_step()
        turnstile.pass_one()
        await turnstile.until_step()
        jobs = [
            await client.enqueue([n, *range(20, 30 + n)], max_tokens=length, ignore_eos=True)
            for n, length in enumerate(LENGTHS)
        ]
        await cancelled.cancel()
        await ears.until("job_cancelled")
        turnstile.open()
        results = [await job.result(LIVENESS_S) for job in jobs]
        left = await departures(redis, queue_name, len(jobs))
    logs = {
        f"{job.id}/0": (len(result.token_ids), str(result.choices[0].finish_reason))
        for job, result in zip(jobs, results, strict=True)
    }
    (record,) = read_runs(path)
    return Lived(record, seen, left, logs, f"{cancelled.id}/0")


async def test_the_record_of_a_real_run_is_what_model_worker_logs_and_timeline_show(lived: Lived) -> None:
    record = lived.record
    rows = {step.step: [(lived.name(row.number), row.start, row.stop) for row in step.rows] for step in record.steps}
    assert rows == lived.seen.steps, "what was computed"
    ended: dict[str, tuple[int, Left]] = {
        lived.name(left.number): (step.step, left) for step in record.steps for left in step.left
    }
    assert {name: (left.num_output_tokens, left.reason) for name, (_, left) in ended.items()} == lived.logs
    gained: Counter[str] = Counter()
    for step in record.steps:
        for row in step.rows:
            gained[lived.name(row.number)] += row.gained
    gained.pop(lived.cancelled)
    assert gained == {name: num_tokens for name, (num_tokens, _) in lived.logs.items()}
    joined = {lived.name(one.number): step.step for step in record.steps for one in step.joined if not one.again}
    assert {f"{left.job}/{left.choice}": (left.joined_step, left.left_step) for left in lived.departures} == {
        name: (joined[name], step) for name, (step, _) in ended.items()
    }
    drops = [lived.name(one.number) for boundary in record.boundaries for one in boundary.dropped]
    assert drops == [lived.cancelled]
    assert sum(len(step.preempted) for step in record.steps) > 0, (
        "nobody was preempted: the test shows less than it says"
    )


async def test_the_timeline_shows_the_seats_of_the_record_step_by_step(lived: Lived) -> None:
    (lane,) = of_record(lived.record).lanes
    for step in lived.record.steps:
        recorded: list[str | None] = [None] * lane.num_seats
        for row in step.rows:
            recorded[row.seat] = f"#{row.number}"
        assert [stay and stay.label for stay in lane.seats_in(step.step)] == recorded
    flags = [(stay.label, stay.end_step) for stay in lane.stays if stay.is_preempted]
    assert sorted(flags) == sorted(
        (f"#{one.number}", step.step - 1) for step in lived.record.steps for one in step.preempted
    )
    assert lane.num_steps == len(lived.record.steps)


async def test_a_record_holds_neither_prompt_nor_text_nor_fence(
    start_worker: StartWorker, client: AsyncClient, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    async with start_worker(worker={"record": path}):
        job = await client.enqueue("the secret word is xylophone", max_tokens=8, ignore_eos=True)
        result = await job.result(LIVENESS_S)
    written = path.read_text()
    assert job.id in written
    assert "xylophone" not in written
    assert result.text not in written
    (came,) = read_runs(path)[0].came.values()
    assert came.id == f"{job.id}/0"


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


async def test_without_being_asked_a_worker_writes_no_record(
    start_worker: StartWorker, client: AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    async with start_worker():
        await (await client.enqueue([1], max_tokens=2)).result(LIVENESS_S)
    assert files_in(tmp_path) == before


async def test_a_record_that_is_full_ends_and_the_run_goes_on(
    start_worker: StartWorker, client: AsyncClient, tmp_path: Path, ears: Ears
) -> None:
    path = tmp_path / "run.jsonl"
    async with start_worker(worker={"record": path, "record_max_bytes": 3_000}):
        result = await (await client.enqueue([1], max_tokens=40, ignore_eos=True)).result(LIVENESS_S)
    (run,) = read_runs(path)
    assert len(result.token_ids) == 40
    assert run.is_cut
    assert 0 < len(run.steps) < 40
    assert path.stat().st_size < 3_100
    await ears.until("record_full")
    assert len(ears.of("record_full")) == 1


async def test_a_record_that_cannot_be_written_is_refused_at_the_start(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=r"worker\.record='.*nowhere/run.jsonl' cannot be written: No such file"):
        async with start_worker(HashModel(), worker={"record": tmp_path / "nowhere" / "run.jsonl"}):
            raise AssertionError("it has started")

"""A worker whose model is a hash of everything before each token: the real runtime, engine, text and Redis."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tests.engine.scripted_model import solo

from jitney.tracing import Traces
from jitney_worker.crew import crew_of
from jitney_worker.engine.protocol import ModelOutput, ModelRunner, SchedulerOutput
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.runtime.choice import named
from jitney_worker.runtime.worker import Crew, Worker
from jitney_worker.settings import WorkerSettings, load_settings
from jitney_worker.text.tokenizer import Tokenizer

LIVENESS_S = 30.0
LONGER_THAN_A_PAUSE_S = 3.0
"""A lease that a busy machine does not let run out by itself: a third of it may pass in one pause."""
MAX_MODEL_LEN = 512
Value = TypeVar("Value")


@dataclass
class Turnstile:
    """A runner in front of another one: a step is computed only when the test lets it through.

    steps: the jobs of every step, in order.
    """

    runner: ModelRunner
    steps: list[list[str]] = field(default_factory=list)
    _permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _open: bool = False

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        self.steps.append([named(one.sequence.id).job_id for one in scheduled.scheduled])
        self._arrived.release()
        if not self._open:
            self._permits.acquire()
        return self.runner.execute(scheduled)

    @property
    def hidden_size(self) -> int:
        return getattr(self.runner, "hidden_size", 0)

    async def until_step(self) -> list[str]:
        """Wait until the engine stands before its next step; who is in it."""
        reached = await asyncio.to_thread(self._arrived.acquire, timeout=LIVENESS_S)
        assert reached, "the engine did not step"
        return self.steps[-1]

    def pass_one(self) -> None:
        self._permits.release()

    def open(self) -> None:
        """Let everything through from now on."""
        self._open = True
        self._permits.release()


class ByJob(dict[str, Value]):
    """For a double that asks by sequence: filled by job, because a test knows no fence beforehand."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(named(SequenceId(key)).job_id, default)


class Gated:
    """A tokenizer that waits for the test before it encodes a prompt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.arrived, self.gate = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_prompt(self, prompt: str) -> list[int]:
        self.arrived.set()
        assert self.gate.wait(LIVENESS_S)
        return self._tokenizer.encode_prompt(prompt)


class Ears:
    """Hears what is logged in this process, on whatever thread. events: all of it, with fields."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def __call__(self, event: MutableMapping[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the test is over
            self._loop.call_soon_threadsafe(self._hear, dict(event))

    def _hear(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self._news.set()

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    async def until(self, *names: str, num_times: int = 1) -> None:
        """Wait until one of these events has been logged so many times."""
        async with asyncio.timeout(LIVENESS_S):
            while all(len(self.of(name)) < num_times for name in names):
                self._news.clear()
                await self._news.wait()


class StartWorker(Protocol):
    def __call__(
        self,
        runner: ModelRunner | None = None,
        *,
        engine: dict[str, Any] | None = None,
        policy: str = "continuous",
        **settings: Any,
    ) -> AbstractAsyncContextManager[Worker]: ...


def crew(settings: WorkerSettings, tokenizer: Tokenizer, runner: ModelRunner, engine: dict[str, Any]) -> Crew:
    options = {"max_model_len": MAX_MODEL_LEN, "num_blocks": 256, "max_num_seqs": 4, "check": True, **engine}
    engine_settings = EngineSettings(policy=settings.engine.policy, **options)
    return crew_of(
        runner,
        engine_settings,
        tokenizer,
        model="hash",
        queue=settings.queue_name,
        fingerprint="hash.1",
        worker_id=settings.worker.id or "w1",
        hidden_size=getattr(runner, "hidden_size", 0),
        record=settings.worker.record,
        record_max_bytes=settings.worker.record_max_bytes,
    )


@contextlib.asynccontextmanager
async def working(
    redis_url: str,
    queue: str,
    tokenizer: Tokenizer,
    runner: ModelRunner,
    *,
    traces: Traces | None = None,
    **engine: Any,
) -> AsyncIterator[Worker]:
    """A worker that shows its metrics, writes after every step, and never learns of a lost job by its lease."""
    section = {"publish_interval_s": 0.0, "snapshot_every_s": 0.05, "metrics_port": 0, "claim_ahead": 0}
    settings = load_settings(redis_url=redis_url, queue=queue, lease={"duration_s": 3_600}, worker=section)
    worker, ready = Worker(settings, crew(settings, tokenizer, runner, engine), traces), asyncio.Event()
    run = asyncio.create_task(worker.run(ready.set))
    await asyncio.wait_for(ready.wait(), LIVENESS_S)
    try:
        yield worker
    finally:
        worker.drain()
        exit_code = await asyncio.wait_for(run, LIVENESS_S)
    assert exit_code == 0


def expected(prompt: list[int], max_tokens: int) -> tuple[int, ...]:
    """The hash model's answer, by no engine at all."""
    params = SequenceParams(max_tokens=max_tokens)
    return solo(SequenceRequest(SequenceId("solo"), tuple(prompt), params, (0, 0.0, 0, 0)))[0]

"""The worker: jobs come on board as there is room, ride the batch, and leave with one terminal event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import redis.exceptions

from jitney.cards import QueueCard
from jitney.connection import Redis, connect, connect_once
from jitney.errors import JitneyError
from jitney.keys import Fence, Keys
from jitney.logs import logger
from jitney.queue import Queue
from jitney.tasks import end_tasks
from jitney.tracing import Traces
from jitney.workers import unix_now
from jitney_worker.engine.protocol import Engine
from jitney_worker.record.recorder import Recorder
from jitney_worker.runtime.board import Board, Neighbours
from jitney_worker.runtime.bridge import Bridge
from jitney_worker.runtime.choice import SpellsLogprobs
from jitney_worker.runtime.claimer import Claimer
from jitney_worker.runtime.control import Control
from jitney_worker.runtime.engine_thread import EngineThread
from jitney_worker.runtime.heartbeat import Heartbeat, Leases
from jitney_worker.runtime.housekeeping import Housekeeping
from jitney_worker.runtime.intake import Intake, ModelLimits
from jitney_worker.runtime.meters import Meters
from jitney_worker.runtime.metrics_port import serving_metrics
from jitney_worker.runtime.pace import Pace
from jitney_worker.runtime.publisher import Publisher
from jitney_worker.runtime.rides import Ride
from jitney_worker.runtime.roster import Roster
from jitney_worker.runtime.server_time import ServerTime
from jitney_worker.runtime.server_watch import ServerWatch
from jitney_worker.runtime.spans import ride_stretch
from jitney_worker.runtime.stall import StallWatch
from jitney_worker.runtime.view import View
from jitney_worker.settings import WorkerSettings
from jitney_worker.text.rules import StopRules
from jitney_worker.text.structures import Structures
from jitney_worker.text.tokenizer import Tokenizer

MAX_FAULTS_IN_A_ROW = 2
"""Fewer than a job's attempts: a broken machine must not bury what a sound one could do."""

JOIN_TIMEOUT_S = 10.0

MAX_CONNECTIONS = 8
"""For writing. Endings are written side by side; what a burst of them opened stays open."""

FAREWELL_S = 2.0
"""For each of the last calls. Redis may be away, and whoever sent the SIGTERM does not wait for ever."""


@dataclass(frozen=True, slots=True)
class Crew:
    """What a worker is made of, put together by `crew.py`: the rooms that the runtime may not import."""

    engine: Engine
    tokenizer: Tokenizer
    stop_rules: StopRules
    structures: Structures
    spell_logprobs: SpellsLogprobs
    limits: ModelLimits
    model: str
    queue: str
    fingerprint: str
    features: dict[str, Any]
    worker_id: str
    recorder: Recorder | None = None

    @property
    def metric_labels(self) -> tuple[str, ...]:
        """Values for `WORKER_LABELS`."""
        return self.model, self.queue, self.worker_id

    def card(self) -> QueueCard:
        """What clients and the API must know of the queue before they write to it."""
        return QueueCard(
            model=self.model,
            max_model_len=self.limits.max_model_len,
            vocab_size=self.limits.vocab_size,
            bytes_per_token=self.tokenizer.bytes_per_token,
            fingerprint=self.fingerprint,
            tokenizer_digest=self.tokenizer.digest,
            created=int(unix_now()),
            hidden_size=self.limits.hidden_size,
        )


class Worker:
    """One worker of one queue. `run` serves until `drain`; its result is the exit code.

    traces: where rides are recorded; whoever made it closes it.
    """

    def __init__(self, settings: WorkerSettings, crew: Crew, traces: Traces | None = None) -> None:
        self._settings = settings
        self._crew = crew
        self._log = logger(part="worker", worker=crew.worker_id, queue=crew.queue)
        self._draining = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._heart_failed = asyncio.Event()
        self._leases = Leases()
        self._bridge = Bridge(settings.worker.max_unpublished_steps)
        self._thread = EngineThread(
            crew.engine,
            self._bridge,
            Pace(settings.worker.publish_interval_s, settings.worker.max_steps_held),
            snapshot_every_s=settings.worker.snapshot_every_s,
        )
        self._stall = StallWatch(self._thread, settings.lease.stall_after_s)
        self._roster = Roster(
            worker_id=crew.worker_id,
            queue=crew.queue,
            model=crew.model,
            fingerprint=crew.fingerprint,
            features=crew.features,
        )
        self._clock = ServerTime()
        self._traces = traces
        self._meters = Meters(
            self._clock,
            looks_up_prefixes=bool(crew.features.get("enable_prefix_caching")),
            on_left=None if traces is None else self._trace,
        )
        self.metrics_url: str | None = None

    def drain(self) -> None:
        """Once: claim no more, finish what fits in `drain_timeout_s`. Twice: hand everything back now."""
        if self._draining.is_set():
            self._hurrying.set()
        self._draining.set()

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> int:
        """Serve until `drain`. 0 after a clean end, 1 when a part of the worker broke, or the engine is stuck for good.

        The engine's thread may then be alive still. Raises SettingsError for a server that evicts jobs.
        """
        name = f"jitney-worker-{self._crew.worker_id}"
        async with contextlib.AsyncExitStack() as stack:
            if self._crew.recorder is not None:
                stack.callback(self._crew.recorder.close)
            redis = connect(self._settings.redis_url, name=name, max_connections=MAX_CONNECTIONS)
            stack.push_async_callback(redis.aclose)
            claims = connect_once(self._settings.redis_url, name=f"{name}-claim")
            stack.push_async_callback(claims.aclose)
            threads = self._settings.worker.num_tokenizer_threads
            pool = stack.enter_context(ThreadPoolExecutor(threads, "jitney-tokenizer"))
            structure_pool = stack.enter_context(ThreadPoolExecutor(1, "jitney-structures"))
            board = self._board(redis, pool, structure_pool)
            queue = Queue(redis, self._crew.queue)
            watch = ServerWatch(redis, queue=self._crew.queue)
            await watch.admit(allow_evicting=self._settings.worker.allow_evicting_server)
            await self._clock.ask(redis)
            view = View(
                self._settings,
                queue,
                self._roster,
                board,
                self._meters,
                self._clock,
                state=self._state,
                card=self._crew.card,
                tokenizer=self._crew.tokenizer,
            )
            self.metrics_url = stack.enter_context(
                serving_metrics(self._settings.worker, self._crew.metric_labels, view.readings)
            )
            house = Housekeeping(queue, self._crew.fingerprint, watch, self._settings)
            with self._running_threads(board):
                return await self._serve(board, view, house, claims, on_ready)

    def _board(self, redis_client: Redis, pool: Executor, structure_pool: Executor) -> Board:
        crew = self._crew
        queue = Queue(redis_client, crew.queue)
        intake = Intake(
            queue,
            crew.tokenizer,
            crew.limits,
            crew.engine.check_fits,
            crew.spell_logprobs,
            pool,
            structures=crew.structures,
            structure_pool=structure_pool,
            fingerprint=crew.fingerprint,
        )
        publisher = Publisher(queue, self._meters, is_held=self._leases.has)
        neighbours = Neighbours(
            queue,
            intake,
            publisher,
            self._bridge,
            self._leases,
            self._roster,
            crew.stop_rules,
            self._meters,
            self._stall.is_stuck,
        )
        return Board(self._settings, neighbours, crew.engine.capacity(), asyncio.Event())

    @contextlib.contextmanager
    def _running_threads(self, board: Board) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def on_lost(fences: set[Fence]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closing: then nobody computes any more
                loop.call_soon_threadsafe(board.lose, fences)

        def on_broken(error: Exception) -> None:
            self._log.error("heartbeat_broke", error=repr(error))
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._heart_failed.set)

        heartbeat = Heartbeat(
            self._settings.redis_url,
            self._crew.queue,
            self._leases,
            self._settings.lease,
            is_stuck=self._stall.is_stuck,
            on_lost=on_lost,
            on_broken=on_broken,
        )
        self._bridge.connect(loop, board.wake)
        self._thread.start()
        heartbeat.start()
        try:
            yield
        finally:
            self._bridge.stop()
            heartbeat.stop()
            self._thread.join(0.0 if self._stall.is_stuck() else JOIN_TIMEOUT_S)
            heartbeat.join(JOIN_TIMEOUT_S)

    def _trace(self, ride: Ride, how: str) -> None:
        if self._traces is not None and ride.job is not None:
            stretch = ride_stretch(ride, ride.job, how, self._clock.at, time.monotonic(), self._crew.model)
            self._traces.record(stretch, "consumer", ride.job.spec.traceparent)

    def _state(self) -> str:
        return "stuck" if self._stall.is_stuck() else "draining" if self._draining.is_set() else "ready"

    async def _serve(
        self, board: Board, view: View, house: Housekeeping, claims: Redis, on_ready: Callable[[], None]
    ) -> int:
        claimer = self._claimer(board, claims)
        control = Control(
            claims,
            Keys(self._crew.queue),
            self._crew.worker_id,
            on_cancel=board.cancel,
            on_call=board.call,
        )
        claiming = asyncio.create_task(claimer.run(), name="claimer")
        others: list[asyncio.Task[Any]] = [
            asyncio.create_task(board.publish(), name="publisher"),
            asyncio.create_task(control.run(), name="control"),
            asyncio.create_task(self._heart_failed.wait(), name="heartbeat"),
            asyncio.create_task(view.run(), name="view"),
            asyncio.create_task(house.run(), name="janitor"),
            asyncio.create_task(self._watch_faults(board), name="faults"),
            asyncio.create_task(self._stall.run(board), name="stall"),
        ]
        draining = asyncio.create_task(self._draining.wait(), name="drain")
        self._log.info("ready", model=self._crew.model, fingerprint=self._crew.fingerprint)
        on_ready()
        try:
            await asyncio.wait({draining, claiming, *others}, return_when=asyncio.FIRST_COMPLETED)
            broken = [task for task in (claiming, *others) if task.done()]
            for task in broken:
                self._log.error("part_ended", part_name=task.get_name(), error=repr(task.exception()))
            await end_tasks([claiming])
            self._log.info("draining", num_jobs=len(board))
            if not broken:
                await self._finish_what_fits(board, claimer)
            await claimer.stop()
            await self._hand_back(board, broken)
            return 1 if broken else 0
        finally:
            await end_tasks([draining, claiming, *others])
            await self._sign_off(view)
            self._log.info("stopped")

    def _claimer(self, board: Board, claims: Redis) -> Claimer:
        return Claimer(
            self._settings,
            self._crew.worker_id,
            self._crew.fingerprint,
            Queue(claims, self._crew.queue),
            room=board.room,
            credit=board.credit,
            take=board.take,
        )

    async def _finish_what_fits(self, board: Board, claimer: Claimer) -> None:
        """Until all is done, the time is over, or somebody asks a second time."""

        async def until_done() -> None:
            await claimer.until_settled()
            await board.until_empty()

        done = asyncio.create_task(until_done())
        hurry = asyncio.create_task(self._hurrying.wait())
        timeout_s = self._settings.worker.drain_timeout_s
        await asyncio.wait({done, hurry}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        await end_tasks([done, hurry])

    async def _hand_back(self, board: Board, broken: list[asyncio.Task[Any]]) -> None:
        """What is left; a lease that cannot be given back now runs out by itself."""
        with contextlib.suppress(redis.exceptions.RedisError, OSError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                if broken:  # perhaps by one of them: for none this was a clean hand-over
                    await board.retry_all(_cause(broken[0]))
                await board.release_all()

    async def _sign_off(self, view: View) -> None:
        """A view that cannot be removed now vanishes by itself."""
        with contextlib.suppress(redis.exceptions.RedisError, OSError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await view.remove()

    async def _watch_faults(self, board: Board) -> None:
        """Ends, and the worker with it, when steps keep failing: a fresh process may do better."""
        while board.reports.num_faults < MAX_FAULTS_IN_A_ROW:
            board.reports.fault.clear()
            await board.reports.fault.wait()
        raise RuntimeError(f"{board.reports.num_faults} steps in a row failed")


def _cause(broken: asyncio.Task[Any]) -> JitneyError:
    """Why the jobs have to go elsewhere."""
    error = broken.exception()
    if isinstance(error, JitneyError):
        return error
    return JitneyError(f"a part of the worker broke: {broken.get_name()}: {type(error).__name__}")

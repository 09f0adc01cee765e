"""A pool without processes: tasks wait for their jobs on one event loop, and need a thread only to be recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from billiard.einfo import ExceptionInfo
from celery.exceptions import SoftTimeLimitExceeded
from celery.worker import state

from jitney.celery.asking import answer, asked_of, cancel, key_of
from jitney.celery.outcome import Outcome, answered, failed
from jitney.celery.ride import Passenger, Ride
from jitney.celery.settings import CelerySettings
from jitney.celery.settling import Settlement
from jitney.celery.station import Station
from jitney.connection import pause_s
from jitney.logs import logger

T = TypeVar("T")
Post = Callable[[Callable[[], None]], object]


class HeldPool:
    """What Celery's requests need of a pool. Its methods are called by the thread that consumes messages.

    post: has that thread call something: Celery's requests are told of their ends there and nowhere else.
    qos: how many messages the broker may have outstanding, as Celery counts it just now.
    """

    def __init__(self, station: Station, settings: CelerySettings, *, post: Post, qos: Callable[[], Any]) -> None:
        self._station = station
        self._settings = settings
        self._post = post
        self._qos = qos
        self._rides: dict[str, Ride] = {}
        self._threads = ThreadPoolExecutor(settings.num_threads, thread_name_prefix="jitney-celery-record")
        self._log = logger(part="celery")
        self._telling = station.start(self._tell_for_ever())

    def __len__(self) -> int:
        return len(self._rides)

    def __iter__(self) -> Iterator[Ride]:
        return iter(list(self._rides.values()))

    def close(self) -> None:
        """When nothing is held any more."""
        self._telling.cancel()
        self._threads.shutdown()

    # --- what Celery calls --------------------------------------------------------------------------------

    def apply_async(
        self, target: Callable[..., Any], args: tuple[Any, ...] = (), *, correlation_id: str, **calls: Any
    ) -> Ride:
        """Hold the task of that id. One that is held already, because the broker has sent it again, is held once."""
        request = state.requests[correlation_id]
        key = key_of(request.id, request.request_dict.get("retries") or 0)
        passenger = Passenger(request, target, args, self._make_room(), **calls)
        ride = self._rides.get(key)
        is_new = ride is None
        if ride is None:
            ride = self._rides[key] = Ride(self, key, passenger)
        else:
            ride.passengers.append(passenger)
        request.ride = ride
        passenger.accept()
        state.reserved_requests.discard(request)  # with --disable-prefetch these count as slots that are taken
        if is_new and not ride.is_over:  # a revocation may have been waiting for this moment
            ride.future = self._station.start(self._carry(ride))
        return ride

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """There is no process to end: Celery ends the ride itself."""

    def forget(self, ride: Ride) -> None:
        """It is held no longer."""
        if self._rides.get(ride.key) is ride:
            del self._rides[ride.key]
            for passenger in ride.passengers:
                passenger.give_room_back()

    def _make_room(self) -> Any:
        """A held task takes no slot, so it takes nothing of what may be outstanding: until there are too many."""
        qos = self._qos() if len(self._rides) < self._settings.max_held else None
        if qos is not None:
            qos.increment_eventually()
        return qos

    # --- on the event loop --------------------------------------------------------------------------------

    async def _carry(self, ride: Ride) -> None:
        """From the message to the end of its job, and into the result backend."""
        passenger = ride.newest
        settlement = Settlement(self._station.client.redis, ride.key)
        try:
            async with asyncio.timeout(passenger.hard_limit_s) as limit:
                if await settlement.is_over(redelivered=passenger.is_redelivered):
                    self._post(ride.end_silently)
                    return
                outcome = await self._outcome(ride)
        except TimeoutError:
            assert limit.expired()
            self._post(lambda: passenger.timeout_callback(False, passenger.hard_limit_s))
            return
        # From here on it is recorded to the end: a message that went back half recorded would be recorded twice.
        ride.recording = asyncio.ensure_future(self._record(ride, outcome, settlement))
        await asyncio.shield(ride.recording)

    async def _outcome(self, ride: Ride) -> Outcome:
        passenger, client = ride.newest, self._station.client
        try:
            asked = asked_of(*passenger.call)
            async with asyncio.timeout(passenger.soft_limit_s) as limit:
                return answered(await answer(client, asked, ride.partial))
        except TimeoutError as error:
            if not limit.expired():
                return failed(error)
        except Exception as error:  # whatever it is: a task that nobody ends is held for ever
            return failed(error)
        self._post(lambda: passenger.timeout_callback(True, passenger.soft_limit_s))
        await cancel(client, asked)
        return failed(SoftTimeLimitExceeded())

    async def _record(self, ride: Ride, outcome: Outcome, settlement: Settlement) -> None:
        try:
            await self._until_backend_answers(ride)
            if not await settlement.claim():
                await self._in_thread(lambda: ride.restore(outcome))
                self._post(ride.end_silently)
                return
            ended = await self._in_thread(lambda: ride.record(outcome))
            await settlement.done()
        except Exception:
            error = ExceptionInfo()
            self._post(lambda: ride.end(lambda: ride.newest.error_callback(error)))
        else:
            self._post(lambda: ride.end(lambda: ride.newest.callback(ended)))

    async def _until_backend_answers(self, ride: Ride) -> None:
        """What is recorded while the result backend is away is lost: Celery makes a failure of it, and drops that."""
        num_failures = 0
        while True:
            try:
                await self._in_thread(ride.stored_state)
                return
            except Exception as error:
                self._log.warning("result_backend_away", error=type(error).__name__)
                await asyncio.sleep(pause_s(num_failures))
                num_failures += 1

    async def _tell_for_ever(self) -> None:
        """One after the other, and a pause: however many are held, they cost the backend no more than it can take."""
        while True:
            await asyncio.sleep(self._settings.tell_every_s)
            for ride in self:
                if ride.has_news:
                    await self._tell(ride, ride.partial.shape())

    async def _tell(self, ride: Ride, said: dict[str, Any]) -> None:
        try:
            await self._in_thread(lambda: ride.tell(said))
        except Exception as error:
            self._log.warning("partial_text_not_stored", error=type(error).__name__)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

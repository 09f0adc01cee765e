"""A task's message in this worker, and what becomes of its job when Celery gives the task up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.worker.request import Request
from celery.worker.state import task_ready

from jitney.celery.asking import asked_of, cancel
from jitney.celery.station import station
from jitney.errors import InvalidJob

if TYPE_CHECKING:
    from jitney.celery.ride import Ride


class HeldRequest(Request):  # type: ignore[misc]
    """ride: where it is held; None while it waits, and always in a worker whose pool runs it."""

    ride: Ride | None = None

    def terminate(self, pool: Any, signal: Any = None) -> None:
        super().terminate(self._pool_of(pool), signal)

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """The worker leaves, or has lost its broker: the message comes back, and finds the job, which goes on."""
        super().cancel(self._pool_of(pool), signal, emit_retry)
        if self.ride is not None:
            self.ride.leave()

    def on_timeout(self, soft: bool, timeout: float) -> None:
        if not soft:
            self._give_up()
        super().on_timeout(soft, timeout)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        # One that was never handed out has no job.
        if self.ride is not None or terminated or self.delivery_info["redelivered"]:
            self._give_up()
        super()._announce_revoked(reason, terminated, signum, expired)

    def _give_up(self) -> None:
        """Nobody waits for the answer any more: end the job. First, so that no partial text follows the last word."""
        if self.ride is not None:
            self.ride.leave()
            for passenger in self.ride.passengers:
                task_ready(passenger.request)
        try:
            asked = asked_of(self.id, self.request_dict.get("retries") or 0, self.args, self.kwargs)
        except InvalidJob:
            return  # it never was a job
        here = station()
        here.start(cancel(here.client, asked))

    def _pool_of(self, pool: Any) -> Any:
        return pool if self.ride is None else self.ride.pool

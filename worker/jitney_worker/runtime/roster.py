"""The passenger list that people see: seats now, and who left at which step."""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import Any

from jitney.workers import Departure, SeatView, WorkerView, unix_now
from jitney_worker.engine.protocol import EngineSnapshot, Seat, SequenceDelta
from jitney_worker.runtime.choice import named
from jitney_worker.runtime.seating import Seating

NUM_DEPARTURES_KEPT = 64


class Roster:
    """Builds the worker's view of itself out of deltas and snapshots."""

    def __init__(self, *, worker_id: str, queue: str, model: str, fingerprint: str, features: dict[str, Any]) -> None:
        self._departures: deque[Departure] = deque(maxlen=NUM_DEPARTURES_KEPT)
        self._seating = Seating()
        self._view = WorkerView(
            id=worker_id,
            queue=queue,
            model=model,
            fingerprint=fingerprint,
            host=socket.gethostname(),
            pid=os.getpid(),
            state="ready",
            started_at=unix_now(),
            written_at=unix_now(),
            max_num_seqs=int(features.get("max_num_seqs", 0)),
            features=features,
        )

    @property
    def worker_id(self) -> str:
        return self._view.id

    @property
    def max_num_seqs(self) -> int:
        return self._view.max_num_seqs

    def left(self, delta: SequenceDelta, num_output_tokens: int) -> None:
        """A sequence ended in this delta's step, with so many tokens in all."""
        reason = delta.error.code if delta.error is not None else str(delta.finish_reason)
        name = named(delta.id)
        self._departures.append(
            Departure(
                job=name.job_id,
                choice=name.choice,
                joined_step=delta.joined_step,
                left_step=delta.step,
                num_output_tokens=num_output_tokens,
                reason=reason,
            )
        )

    def seen(self, snapshot: EngineSnapshot) -> None:
        """Every snapshot, in order: who sits where is told by what has moved since the one before."""
        self._seating.see(snapshot, unix_now())

    def view(self, snapshot: EngineSnapshot | None, state: str) -> WorkerView:
        """The view as of now; without a snapshot only state and time change."""
        changes: dict[str, Any] = {
            "state": state,
            "written_at": unix_now(),
            "departures": tuple(self._departures),
        }
        if snapshot is not None:
            capacity = snapshot.capacity
            changes |= {
                "step": snapshot.step,
                "num_running": capacity.num_running,
                "num_waiting": capacity.num_waiting,
                "num_blocks": capacity.num_blocks,
                "num_free_blocks": capacity.num_free_blocks,
                "num_preemptions": snapshot.num_preemptions,
                "num_generated_tokens": snapshot.num_generated_tokens,
                "num_computed_tokens": snapshot.num_computed_tokens,
                "num_prefill_tokens": snapshot.num_prefill_tokens,
                "num_decode_tokens": snapshot.num_decode_tokens,
                "num_cached_blocks": snapshot.cache.num_cached,
                "num_shared_blocks": snapshot.cache.num_shared,
                "blocks": snapshot.cache.sample,
                "seats": tuple(_seat_view(seat, self._seating.number(seat.id)) for seat in snapshot.seats),
                "moves": tuple(self._seating.moves),
            }
        self._view = self._view.model_copy(update=changes)
        return self._view


def _seat_view(seat: Seat, number: int) -> SeatView:
    name = named(seat.id)
    return SeatView(
        job=name.job_id,
        choice=name.choice,
        joined_step=seat.joined_step,
        num_prompt_tokens=seat.num_prompt_tokens,
        num_computed_tokens=seat.num_computed_tokens,
        num_output_tokens=seat.num_output_tokens,
        number=number,
        max_output_tokens=seat.max_output_tokens,
    )

"""What happened in each step, said as plain values: who came, sat, computed, left and why, and what it cost.

The engine itself knows no seat numbers. Here a sequence takes the lowest free one when it joins.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jitney_worker.engine.protocol import ScheduledSequence, SchedulerOutput, SequenceDelta
from jitney_worker.engine.scheduler import Scheduler
from jitney_worker.engine.sequence import Sequence, SequenceId


class Row(NamedTuple):
    """One running sequence: tokens [start, stop) were computed, and it gained so many.

    recomputed: how many of them it had computed before it was preempted.
    """

    number: int
    seat: int
    start: int
    stop: int
    gained: int
    recomputed: int


@dataclass(frozen=True, slots=True)
class Came:
    """A sequence came in, and waits from here on. number: names it in all other entries.

    num_output_tokens: what earlier attempts had said. max_tokens: output tokens at most, those included.
    """

    number: int
    id: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    kind: Literal["came"] = "came"


@dataclass(frozen=True, slots=True)
class Dropped:
    """A sequence was taken out: cancelled, over its time, handed back or taken over. seat: None = it waited."""

    number: int
    seat: int | None
    kind: Literal["dropped"] = "dropped"


@dataclass(frozen=True, slots=True)
class Joined:
    """Took a seat in this step. num_cached_tokens: need not be computed. again: it had been preempted before."""

    number: int
    seat: int
    num_cached_tokens: int
    again: bool


@dataclass(frozen=True, slots=True)
class Preempted:
    """Lost its blocks, so that somebody before it in the order could grow or sit down; waits again."""

    number: int
    seat: int
    num_blocks: int
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class Left:
    """Ended with this step. reason: `stop`, `length`, or the code of its error."""

    number: int
    seat: int
    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: what was decided before it (preempted, joined, the budget), and who left after it.

    Token counts sum to the budget that was used. Waiting sequences and blocks are counted during the pass: used by
    somebody, free with content that a prompt may hit (cached), and free without.
    """

    step: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_recomputed_tokens: int
    preempted: tuple[Preempted, ...]
    joined: tuple[Joined, ...]
    rows: tuple[Row, ...]
    left: tuple[Left, ...]
    num_waiting: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    kind: Literal["step"] = "step"


@dataclass(slots=True)
class _Rider:
    """A sequence inside. reached: tokens it had computed at most; num_computed, num_blocks: while it rides."""

    number: int
    seat: int | None = None
    rides: bool = False
    has_ridden: bool = False
    num_blocks: int = 0
    num_computed: int = 0
    reached: int = 0


class Witness:
    """Watches a scheduler and tells `keep` of every arrival, drop and step, once each and in order.

    Costs time in proportion to the running sequences. What a step that raised had decided is told with the next one.
    """

    def __init__(self, scheduler: Scheduler, keep: Callable[[Came | Dropped | Step], None]) -> None:
        self._scheduler = scheduler
        self._keep = keep
        self._riders: dict[SequenceId, _Rider] = {}
        self._held: dict[SequenceId, int] = {}
        """Seats that nobody computes in and nobody may take: of ended ones, under the static policy."""
        self._free = list(range(scheduler.settings.max_num_seqs))
        self._blocks = (0, 0, 0)

    def added(self, sequence: Sequence) -> None:
        """It waits now."""
        self._riders[sequence.id] = _Rider(sequence.arrival)
        self._keep(
            Came(
                sequence.arrival,
                sequence.id,
                sequence.num_prompt_tokens,
                sequence.num_output_tokens,
                sequence.max_num_tokens - sequence.num_prompt_tokens,
            )
        )

    def dropped(self, sequence_id: SequenceId) -> None:
        """It is gone, wherever it was."""
        rider = self._riders.pop(sequence_id, None)
        if rider is not None:
            self._keep(Dropped(rider.number, rider.seat if rider.rides else None))
            self._stand_up(sequence_id, rider)

    def scheduled(self, output: SchedulerOutput) -> None:
        """Before the pass: blocks are looked at now, because who ends with it gives them back."""
        blocks = self._scheduler.blocks
        self._blocks = (blocks.num_blocks - blocks.num_free, blocks.num_cached, blocks.num_free - blocks.num_cached)
        self._tables = [len(item.sequence.block_table) for item in output.scheduled]

    def committed(self, output: SchedulerOutput, deltas: list[SequenceDelta]) -> None:
        """After the pass: tell the step."""
        gained = {delta.id: len(delta.token_ids) for delta in deltas}
        preempted = self._preempted({item.sequence.id for item in output.scheduled})
        self._open_held_seats()
        joined = [self._join(item) for item in output.scheduled if not self._riders[item.sequence.id].rides]
        rows = [
            self._row(item, num_blocks, gained.get(item.sequence.id, 0))
            for item, num_blocks in zip(output.scheduled, self._tables, strict=True)
        ]
        num_decode = sum(_decodes(item, row) for item, row in zip(output.scheduled, rows, strict=True))
        used, cached, free = self._blocks
        num_output = {item.sequence.id: item.sequence.num_output_tokens for item in output.scheduled}
        self._keep(
            Step(
                step=output.step,
                num_prefill_tokens=output.num_tokens - num_decode,
                num_decode_tokens=num_decode,
                num_recomputed_tokens=sum(row.recomputed for row in rows),
                preempted=tuple(preempted),
                joined=tuple(joined),
                rows=tuple(rows),
                left=tuple(self._leave(delta, num_output[delta.id]) for delta in deltas if _is_last(delta)),
                num_waiting=len(self._scheduler.waiting),
                num_used_blocks=used,
                num_cached_blocks=cached,
                num_free_blocks=free,
            )
        )

    def _preempted(self, scheduled: set[SequenceId]) -> list[Preempted]:
        """Whoever rode and does not any more; perhaps since a step that raised."""
        found = []
        for sequence_id, rider in self._riders.items():
            if rider.rides and sequence_id not in scheduled:
                seat = _taken(rider)
                found.append(Preempted(rider.number, seat, rider.num_blocks, rider.num_computed))
                self._stand_up(sequence_id, rider)
        return found

    def _open_held_seats(self) -> None:
        keeps = self._scheduler.keeps_seat
        for sequence_id in [one for one in self._held if not keeps(one)]:
            heapq.heappush(self._free, self._held.pop(sequence_id))

    def _join(self, item: ScheduledSequence) -> Joined:
        sequence_id = item.sequence.id
        rider = self._riders[sequence_id]
        held = self._held.pop(sequence_id, None)
        rider.seat = heapq.heappop(self._free) if held is None else held
        joined = Joined(rider.number, rider.seat, item.start, rider.has_ridden)
        rider.rides = rider.has_ridden = True
        return joined

    def _row(self, item: ScheduledSequence, num_blocks: int, gained: int) -> Row:
        rider = self._riders[item.sequence.id]
        recomputed = max(0, min(item.stop, rider.reached) - item.start)
        rider.num_blocks, rider.num_computed = num_blocks, item.stop
        rider.reached = max(rider.reached, item.stop)
        return Row(rider.number, _taken(rider), item.start, item.stop, gained, recomputed)

    def _leave(self, delta: SequenceDelta, num_output_tokens: int) -> Left:
        rider = self._riders.pop(delta.id)
        reason = delta.error.code if delta.error is not None else str(delta.finish_reason)
        left = Left(rider.number, _taken(rider), reason, num_output_tokens)
        self._stand_up(delta.id, rider)
        return left

    def _stand_up(self, sequence_id: SequenceId, rider: _Rider) -> None:
        if not rider.rides:
            return
        if self._scheduler.keeps_seat(sequence_id):
            self._held[sequence_id] = _taken(rider)
        else:
            heapq.heappush(self._free, _taken(rider))
        rider.seat, rider.rides = None, False


def _taken(rider: _Rider) -> int:
    assert rider.seat is not None, f"#{rider.number} rides without a seat"
    return rider.seat


def _is_last(delta: SequenceDelta) -> bool:
    return delta.finish_reason is not None or delta.error is not None


def _decodes(item: ScheduledSequence, row: Row) -> bool:
    """One new token after the last one that was said; everything else reads a prompt, or what was lost or inherited."""
    return row.stop - row.start == 1 and row.start >= item.sequence.num_prompt_tokens and not row.recomputed

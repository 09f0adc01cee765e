"""All that a page or a terminal shows of a deployment at one moment, read from Redis; and how fast it changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from redis.exceptions import ResponseError

from jitney.calls import is_wrong_kind
from jitney.cards import list_cards
from jitney.connection import Redis
from jitney.depth import read_queue
from jitney.keys import BANDS
from jitney.metrics.readings import Readings
from jitney.workers import SeatView, WorkerView, list_readings

RATE_WINDOW_S: Final = 2.0
LATENCY_WINDOW_S: Final = 30.0
NUM_POINTS: Final = 240
"""Of each curve: two minutes of looks, twice a second."""

TTFT: Final = "jitney_time_to_first_token_seconds"
ITL: Final = "jitney_inter_token_latency_seconds"


@dataclass(frozen=True, slots=True)
class SeatNow:
    """A seat with somebody in it. tokens_per_s: None before two looks have seen it. phase: `prefill` or `decode`."""

    number: int
    job: str
    choice: int
    phase: str
    joined_step: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_output_tokens: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """A worker: its view, without what a page has no use for, and what two views say together."""

    id: str
    state: str
    host: str
    pid: int
    started_at: float
    written_at: float
    step: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_shared_blocks: int
    block_size: int
    blocks: str
    num_preemptions: int
    num_takeovers: int
    tokens_per_s: float
    seats: list[SeatNow]
    moves: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class QueueNow:
    """A queue. waiting, running, returned, oldest_s: by band; later: jobs whose time has not come.

    ttft_s, itl_s: median and 95th percentile over the last half minute, None while nobody was served.
    """

    name: str
    model: str
    waiting: dict[str, int]
    oldest_s: dict[str, float]
    running: dict[str, int]
    returned: dict[str, int]
    later: int
    dead: int
    num_waiting_tokens: int
    drain_s: float
    tokens_per_s: float
    num_preemptions: int
    num_takeovers: int
    ttft_s: tuple[float, float] | None
    itl_s: tuple[float, float] | None
    workers: list[WorkerNow]


@dataclass(frozen=True, slots=True)
class Overview:
    """number: of the look, from 1. at: Unix seconds of whoever looked."""

    number: int
    at: float
    queues: list[QueueNow]

    def encode(self) -> bytes:
        """As JSON: the fields above, under their names."""
        return orjson.dumps(self)


@dataclass(slots=True)
class _Past:
    """What a worker's last views said. latencies: counts of both histograms, by when they were read."""

    tokens: deque[tuple[float, int, dict[tuple[str, int], int]]] = field(default_factory=deque)
    latencies: deque[tuple[float, dict[str, list[int]]]] = field(default_factory=deque)


class Lookout:
    """Looks at a deployment, again and again: rates and percentiles are differences of what it has seen.

    points: of each queue, what its curves are drawn from, oldest first: [at, tokens/s, TTFT, ITL, waiting, running].
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._pasts: dict[tuple[str, str], _Past] = {}
        """By queue and worker: the same name may work for two queues."""
        self._number = 0
        self.points: dict[str, deque[list[float | None]]] = {}

    async def look(self, only: str | None = None) -> Overview:
        """Raises what Redis raises. only: the one queue to look at.

        Costs what `read_queue` does for each queue, and one short call for each worker.
        """
        cards = {name: card for name, card in (await list_cards(self._redis)).items() if only in (None, name)}
        self._number += 1
        seconds, microseconds = await self._redis.time()
        now, alive = seconds + microseconds / 1e6, set[tuple[str, str]]()
        queues = []
        for name, card in cards.items():
            try:
                views = await list_readings(self._redis, name)
                depth = await read_queue(self._redis, name, [view for view, _ in views], now)
            except ResponseError as error:
                if is_wrong_kind(error):
                    continue  # what somebody has put under one queue's keys is no reason to be silent of the others
                raise
            alive |= {(name, view.id) for view, _ in views}
            queues.append(self._queue(name, card.model, depth, views, now))
        self._pasts = {who: past for who, past in self._pasts.items() if who in alive}
        self.points = {name: points for name, points in self.points.items() if name in cards}
        return Overview(self._number, now, queues)

    def _queue(
        self, name: str, model: str, depth: Readings, views: Sequence[tuple[WorkerView, Readings | None]], now: float
    ) -> QueueNow:
        workers = [self._worker(name, view, readings, now) for view, readings in views]
        pasts = [self._pasts[name, view.id] for view, _ in views]
        queue = QueueNow(
            name=name,
            model=model,
            waiting={band: int(depth.value("jitney_queue_lag", band)) for band in BANDS},
            oldest_s={band: depth.value("jitney_queue_oldest_seconds", band) for band in BANDS},
            running={band: int(depth.value("jitney_queue_running", band)) for band in BANDS},
            returned={band: int(depth.value("jitney_queue_returned", band)) for band in BANDS},
            later=int(depth.value("jitney_queue_later")),
            dead=int(depth.value("jitney_dead_letters")),
            num_waiting_tokens=int(depth.value("jitney_queue_tokens")),
            drain_s=depth.value("jitney_queue_drain_seconds"),
            tokens_per_s=sum(worker.tokens_per_s for worker in workers),
            num_preemptions=sum(worker.num_preemptions for worker in workers),
            num_takeovers=sum(worker.num_takeovers for worker in workers),
            ttft_s=_percentiles(pasts, TTFT),
            itl_s=_percentiles(pasts, ITL),
            workers=workers,
        )
        self.points.setdefault(name, deque(maxlen=NUM_POINTS)).append(_point(queue, now))
        return queue

    def _worker(self, queue: str, view: WorkerView, readings: Readings | None, now: float) -> WorkerNow:
        past = self._pasts.setdefault((queue, view.id), _Past())
        _remember(past, view, readings, now)
        (then, num_then, _), (until, num_until, _) = past.tokens[0], past.tokens[-1]
        span_s = until - then
        return WorkerNow(
            id=view.id,
            state=view.state,
            host=view.host,
            pid=view.pid,
            started_at=view.started_at,
            written_at=view.written_at,
            step=view.step,
            max_num_seqs=view.max_num_seqs,
            max_num_batched_tokens=int(view.features.get("max_num_batched_tokens", 0)),
            num_prefill_tokens=view.num_prefill_tokens,
            num_decode_tokens=view.num_decode_tokens,
            num_waiting=view.num_waiting,
            num_blocks=view.num_blocks,
            num_free_blocks=view.num_free_blocks,
            num_cached_blocks=view.num_cached_blocks,
            num_shared_blocks=view.num_shared_blocks,
            block_size=int(view.features.get("block_size", 0)),
            blocks=view.blocks,
            num_preemptions=view.num_preemptions,
            num_takeovers=0 if readings is None else int(readings.value("jitney_leases_reclaimed_total")),
            tokens_per_s=(num_until - num_then) / span_s if span_s > 0 else 0.0,
            seats=[_seat(seat, past, now) for seat in sorted(view.seats, key=lambda seat: seat.number)],
            moves=[move.model_dump() for move in view.moves],
        )


def _remember(past: _Past, view: WorkerView, readings: Readings | None, now: float) -> None:
    """By our own clock, and also when the view is the one we know: nothing new for two seconds is a rate of 0."""
    outputs = {(seat.job, seat.choice): seat.num_output_tokens for seat in view.seats}
    past.tokens.append((now, view.num_generated_tokens, outputs))
    _forget_before(past.tokens, now - RATE_WINDOW_S)
    if readings is not None:
        past.latencies.append((now, {name: _counts(readings, name) for name in (TTFT, ITL)}))
        _forget_before(past.latencies, now - LATENCY_WINDOW_S)


def _forget_before(kept: deque[Any], at: float) -> None:
    """All but the last one before it: there the window begins."""
    while len(kept) > 1 and kept[1][0] <= at:
        kept.popleft()


def _counts(readings: Readings, name: str) -> list[int]:
    return list(readings.histogram(name).counts)


def _seat(seat: SeatView, past: _Past, now: float) -> SeatNow:
    """Its rate is since the first look of the window that saw it: whoever has just come has one soon."""
    who = (seat.job, seat.choice)
    then, before = next((at, outputs[who]) for at, _, outputs in past.tokens if who in outputs)
    return SeatNow(
        number=seat.number,
        job=seat.job,
        choice=seat.choice,
        phase="decode" if seat.is_decoding else "prefill",
        joined_step=seat.joined_step,
        num_prompt_tokens=seat.num_prompt_tokens,
        num_computed_tokens=seat.num_computed_tokens,
        num_output_tokens=seat.num_output_tokens,
        max_output_tokens=seat.max_output_tokens,
        tokens_per_s=(seat.num_output_tokens - before) / (now - then) if now > then else None,
    )


def _percentiles(pasts: Sequence[_Past], name: str) -> tuple[float, float] | None:
    """Of what the workers have observed since their windows began."""
    gained = list[int]()
    for past in pasts:
        if past.latencies:
            first, last = past.latencies[0][1][name], past.latencies[-1][1][name]
            grown = [late - early for early, late in zip(first, last, strict=True)]
            gained = [sum(pair) for pair in zip(gained, grown, strict=True)] if gained else grown
    if sum(gained) <= 0:
        return None
    bounds = Readings().histogram(name).bounds
    return _quantile(bounds, gained, 0.5), _quantile(bounds, gained, 0.95)


def _quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Within its bucket as if spread evenly; what lies beyond the last bound is said to lie there."""
    wanted, below, lower = share * sum(counts), 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= wanted:
            return lower + (bound - lower) * (wanted - below) / count
        below, lower = below + count, bound
    return lower


def _point(queue: QueueNow, now: float) -> list[float | None]:
    return [
        round(now, 1),
        round(queue.tokens_per_s, 1),
        None if queue.ttft_s is None else round(queue.ttft_s[0], 4),
        None if queue.itl_s is None else round(queue.itl_s[0], 5),
        sum(queue.waiting.values()) + sum(queue.returned.values()),
        sum(queue.running.values()),
    ]

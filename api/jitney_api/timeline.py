"""What became of a job, in order: from its record, its log, and what living workers remember of their seats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from jitney.errors import InvalidJob
from jitney.follower import parse
from jitney.keys import JobId, Keys, queue_of
from jitney.messages import Event, JobSpec
from jitney.records import JobStatus
from jitney.workers import WorkerView, list_workers
from jitney_api.service import Service, answering

MAX_CHARS: Final = 16_384
"""Of a prompt, and of each text: what a page shows, not what was said in all."""

MAX_EVENTS: Final = 65_536
"""Of a log, from its start. A page looks again and again, and must not hold up those who wait for words."""


@dataclass(slots=True)
class _Log:
    """What the log says, without its tokens."""

    starts: list[Event] = field(default_factory=list)
    texts: dict[int, list[str]] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    finish_reasons: dict[int, str] = field(default_factory=dict)


async def timeline_of(service: Service, status: JobStatus, *, with_texts: bool) -> dict[str, Any]:
    """entries: `what` happened, `at` (Unix seconds, None if nobody noted when), and what else is known of it.

    Seats come from the last moves that living workers show: those of long ago, or of dead workers, are forgotten.
    Raises QueueUnavailable.
    """
    name = queue_of(status.id)
    async with answering():
        log = await _read(service, status.id)
        workers = await list_workers(service.client.redis, name)
        body: Any = await service.client.redis.get(Keys(name).body(status.id)) if with_texts else None
    entries = [*_entries(status, log), *_moves(status.id, workers), *_ending(status, log)]
    told: dict[str, Any] = {"entries": entries, "seats": list(_seats(status.id, workers))}
    if with_texts:
        told["prompt"] = _prompt(body)
        told["texts"] = ["".join(log.texts[choice])[:MAX_CHARS] for choice in sorted(log.texts)]
        told["error"] = log.error
    return told


async def _read(service: Service, id: JobId) -> _Log:
    queue, log, seq = service.client.queue(queue_of(id)), _Log(), 0
    while seq < MAX_EVENTS and (payloads := await queue.read_log(id, seq)):
        for message in map(parse, payloads):
            if message is None:
                return log
            _note(log, message.event)
        seq += len(payloads)
    return log


def _note(log: _Log, event: Event) -> None:
    if event.type == "started":
        log.starts.append(event)
    elif event.type == "tokens":
        log.texts.setdefault(event.choice, []).append(event.text)
        if event.finish_reason is not None:
            log.finish_reasons[event.choice] = event.finish_reason
    else:
        log.error = event.error


def _entries(status: JobStatus, log: _Log) -> Iterator[dict[str, Any]]:
    """Up to its seats. A worker's first word is `started`; of a later one it says what was kept."""
    yield {"what": "queued", "at": status.created_at, "band": status.band}
    if status.started_at is not None:
        yield {"what": "claimed", "at": status.started_at}
    for number, event in enumerate(log.starts):
        facts = {"attempt": event.attempt, "prompt_tokens": event.prompt_tokens, "cached_tokens": event.cached_tokens}
        if number:
            yield {"what": "handed over", "at": None, **facts, "resumed_tokens": event.resumed_tokens}
        else:
            yield {"what": "prefill", "at": None, **facts}


def _moves(id: JobId, workers: list[WorkerView]) -> list[dict[str, Any]]:
    """One entry for each time that it took a seat, lost it, or left it."""
    moves = [(move, view.id) for view in workers for move in view.moves if move.job == id]
    return [
        {"what": move.kind, "at": move.at, "worker": worker, "seat": move.seat, "step": move.step}
        | ({"choice": move.choice} if move.choice else {})
        for move, worker in sorted(moves, key=lambda one: (one[0].at, one[0].step, one[0].kind == "joined"))
    ]


def _ending(status: JobStatus, log: _Log) -> Iterator[dict[str, Any]]:
    if status.ended_at is not None:
        reasons = [log.finish_reasons[choice] for choice in sorted(log.finish_reasons)]
        yield {"what": status.reason, "at": status.ended_at, "num_tokens": status.num_tokens, "reasons": reasons}


def _seats(id: JobId, workers: list[WorkerView]) -> Iterator[dict[str, Any]]:
    """Where it sits now."""
    for view in workers:
        for seat in view.seats:
            if seat.job == id:
                yield {"worker": view.id, **seat.model_dump(), "phase": "decode" if seat.is_decoding else "prefill"}


def _prompt(body: bytes | None) -> Any:
    """Text, token ids or messages; None if it is not kept any more, or nobody can read it."""
    try:
        spec = None if body is None else JobSpec.decode(bytes(body))
    except InvalidJob:
        return None
    if spec is None:
        return None
    if spec.messages is not None:
        return "\n\n".join(f"{one['role']}: {_content(one.get('content'))}" for one in spec.messages)[:MAX_CHARS]
    return spec.prompt[:MAX_CHARS] if isinstance(spec.prompt, str) else f"{len(spec.prompt or ())} token ids"


def _content(content: Any) -> str:
    """Of a message: text, or parts with text."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)

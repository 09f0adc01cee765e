"""What must be true of a queue, said without its scripts: jobs as a plain model, and checks against Redis."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from jitney.keys import BANDS, Band, JobId
from jitney.messages import TERMINAL, Event
from jitney.queue import Queue

NUM_CHOICES = 2
LETTERS = "abcdefghijklmnopqrstuvwxyzäé🙂"


class Violation(AssertionError):
    """The queue did what it must not do."""


def expect(truth: bool, message: str, *facts: Any) -> None:
    if not truth:
        raise Violation(f"{message}: {facts}")


@dataclass(frozen=True)
class Answer:
    """What a model would say to a job: per choice its tokens, their text, and where text is held back."""

    tokens: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[str, ...], ...]
    holds: tuple[frozenset[int], ...]

    @classmethod
    def drawn(cls, rng: random.Random) -> Answer:
        lengths = [rng.randint(2, 7) for _ in range(NUM_CHOICES)]
        return cls(
            tokens=tuple(tuple(rng.randrange(1_000) for _ in range(length)) for length in lengths),
            pieces=tuple(tuple(rng.choice(LETTERS) * rng.randint(1, 2) for _ in range(length)) for length in lengths),
            holds=tuple(frozenset(k for k in range(1, length) if rng.random() < 0.3) for length in lengths),
        )

    def shown(self, choice: int, num_tokens: int) -> str:
        """Text that may be shown after so many tokens: the last piece may still be held back."""
        held = num_tokens in self.holds[choice]
        return "".join(self.pieces[choice][: num_tokens - held])


@dataclass
class Job:
    """The model of one job: the state it must be in, and what its record must say."""

    id: JobId
    band: Band
    tenant: str
    est: int
    body: bytes
    answer: Answer
    state: str
    order: int = 0
    seq: int = 0
    num_tokens: int = 0
    cseq: int = 0
    tries: int = 0
    strikes: int = 0
    fence: str = ""
    fp: str = ""
    was: tuple[str, ...] = ()
    reason: str = ""
    lease_ended: bool = False
    is_due: bool = False
    is_late: bool = False
    prompt_ids: bytes | None = None
    hook: str = ""

    @property
    def is_bound(self) -> bool:
        return self.seq > 0 and self.fp != ""

    @property
    def written_by(self) -> tuple[str, ...]:
        if self.fp == "" or self.seq == self.cseq or self.was[-1:] == (self.fp,):
            return self.was
        return (*self.was, self.fp)

    def strikes_if_claimed(self) -> int:
        if self.state != "running":
            return self.strikes
        return self.strikes + 1 if self.seq == self.cseq else 0

    def can_go_to(self, fp: str) -> bool:
        """True if a claim of a worker with this fingerprint, with scan, must find the job."""
        if self.state == "waiting":
            return True
        if self.state == "returned":
            return not self.is_bound or self.fp == fp
        return self.state == "running" and self.lease_ended and (not self.is_bound or self.fp == fp or self.is_late)


@dataclass
class Model:
    """All jobs of a history, and everything a fence was ever given to."""

    jobs: dict[JobId, Job] = field(default_factory=dict)
    fences: set[str] = field(default_factory=set)
    pushes: int = 0

    def next_order(self) -> int:
        self.pushes += 1
        return self.pushes

    def in_state(self, *states: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.state in states]


async def check_places(queue: Queue, model: Model, tenants: tuple[str, ...], fingerprints: tuple[str, ...]) -> None:
    """Each job is in exactly the place its state names, with the record the model has; counts and fair sets agree."""
    found, streams = await _places(queue, tenants, fingerprints)
    records = await _records(queue, list(model.jobs))
    for job in model.jobs.values():
        record = records[job.id]
        _check_record(job, record)
        expect(found.pop(job.id, []) == _place_of(job, record), "a job is not where its state says", job, record)
    expect(not found, "places name jobs that nobody enqueued", found)
    waiting = model.in_state("waiting")
    expect(
        await queue.counts() == (len(waiting), sum(job.est for job in waiting)),
        "counts are wrong",
        await queue.counts(),
        waiting,
    )
    for band in BANDS:
        fair = {name.decode() for name in await queue.redis.zrange(queue.keys.fair(band), 0, -1)}
        expect(fair == streams[band], "the fair set is not the tenants with waiting work", band, fair, streams[band])


async def check_announcements(queue: Queue, model: Model) -> None:
    """Whoever asked to be told of such an ending is in the outbox, nobody else is, and it says what happened."""
    wanted = {
        job.id: tuple(job.hook.split(" ")[1:])
        for job in model.in_state("done")
        if job.reason in job.hook.partition(" ")[0].split(",")
    }
    found = [id.decode() for id in await queue.redis.zrange(queue.keys.hooks, 0, -1)]
    expect(sorted(found) == sorted(wanted), "the outbox is not those who asked", found, wanted)
    pipe = queue.redis.pipeline(transaction=False)
    for id in wanted:
        pipe.hmget(queue.keys.hook(id), "object", "url", "ending")
    for id, told in zip(wanted, await pipe.execute(), strict=True):
        said = [None if value is None else value.decode() for value in told]
        expect(said == [*wanted[id], model.jobs[id].reason], "an announcement says something else", said, id)


async def _places(
    queue: Queue, tenants: tuple[str, ...], fingerprints: tuple[str, ...]
) -> tuple[dict[str, list[str]], dict[str, set[str]]]:
    pipe, names = queue.redis.pipeline(transaction=False), list[tuple[str, str, str]]()
    for band in BANDS:
        for tenant in tenants:
            pipe.xrange(queue.keys.jobs(band, tenant))
            names.append(("stream", band, tenant))
        pipe.zrange(queue.keys.leases(band), 0, -1)
        names.append(("leases", band, ""))
        for fp in fingerprints:
            pipe.zrange(queue.keys.held(band, fp), 0, -1)
            names.append(("held", band, fp))
    pipe.zrange(queue.keys.later, 0, -1)
    names.append(("later", "", ""))
    found: dict[str, list[str]] = {}
    streams: dict[str, set[str]] = {band: set() for band in BANDS}
    for (kind, band, name), members in zip(names, await pipe.execute(), strict=True):
        for member in members:
            if kind == "stream":
                streams[band].add(name)
                id, place = member[1][b"j"].decode(), f"stream {band} {name} {member[0].decode()}"
            else:
                id, place = member.decode(), f"{kind} {band} {name}".rstrip()
            found.setdefault(id, []).append(place)
    return found, streams


def _place_of(job: Job, record: dict[str, str]) -> list[str]:
    if job.state == "waiting":
        return [f"stream {job.band} {job.tenant} {record.get('eid')}"]
    if job.state == "later":
        return ["later"]
    if job.state == "running" or (job.state == "returned" and not job.is_bound):
        return [f"leases {job.band}"]
    if job.state == "returned":
        return [f"held {job.band} {job.fp}"]
    return []


async def _records(queue: Queue, ids: list[JobId]) -> dict[JobId, dict[str, str]]:
    pipe = queue.redis.pipeline(transaction=False)
    for id in ids:
        pipe.hgetall(queue.keys.job(id))
    replies = await pipe.execute()
    return {
        id: {name.decode(): value.decode() for name, value in reply.items()}
        for id, reply in zip(ids, replies, strict=True)
    }


def _check_record(job: Job, record: dict[str, str]) -> None:
    expect(record.get("state") == job.state, "wrong state", job, record)
    expect(record.get("fence", "") == job.fence, "wrong fence", job, record)
    expect((record.get("fence", "") != "") == (job.state == "running"), "a fence without an owner", job, record)
    for name, value in (("seq", job.seq), ("n", job.num_tokens), ("tries", job.tries), ("strikes", job.strikes)):
        expect(int(record.get(name, 0)) == value, f"wrong {name}", job, record)
    expect(record.get("reason", "") == job.reason, "wrong reason", job, record)


def check_log(job: Job, ids: list[bytes], events: list[Event]) -> None:
    """One terminal event, the last; seqs dense and equal to ids; tokens, indices and text exactly the answer's."""
    expect(ids == [f"{seq}-0".encode() for seq in range(1, job.seq + 1)], "log ids are not dense", job, ids)
    expect([event.seq for event in events] == list(range(1, job.seq + 1)), "seqs are not dense", job, events)
    kinds = [event.type for event in events]
    expect([kind in TERMINAL for kind in kinds] == [False] * (len(kinds) - 1) + [True], "not one end", job, kinds)
    expect(kinds[-1] == job.reason, "another end than the record's", job, kinds)
    total = 0
    for choice in range(NUM_CHOICES):
        mine = [event for event in events if event.type == "tokens" and event.choice == choice]
        total += _check_choice(job, choice, mine)
    expect(total == job.num_tokens, "tokens in the log and in the record differ", job, total)
    usage = events[-1].usage
    expect(usage is not None and usage["completion_tokens"] == total, "usage is wrong", job, usage)


def _check_choice(job: Job, choice: int, events: list[Event]) -> int:
    said, text = 0, ""
    for event in events:
        expect(event.index == said, "index is not the tokens before", job, event)
        wanted = job.answer.tokens[choice][said : said + len(event.token_ids)]
        expect(event.token_ids == wanted, "tokens repeated, lost or foreign", job, event, wanted)
        said += len(event.token_ids)
        text += event.text
        is_end = said == len(job.answer.tokens[choice])
        expect((event.finish_reason is not None) == is_end, "finish_reason not on the last event", job, event)
        shown = "".join(job.answer.pieces[choice]) if is_end else job.answer.shown(choice, said)
        expect(text == shown, "text repeated, lost or shown too early", job, event, text, shown)
    if job.reason == "finished":
        expect(said == len(job.answer.tokens[choice]), "finished before its end", job, choice, said)
    return said

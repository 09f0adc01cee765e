"""Random histories of one queue: clients, three workers of two builds, and the ghosts of those who lost a job.

Scripts are atomic, so one caller that interleaves everybody's calls at random covers what many would do.
Nothing waits: leases, delays and deadlines are ended by writing an early time.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from contract_driver import LEASE_S, digest_of
from oracle import NUM_CHOICES, Answer, Job, Model, check_announcements, check_log, check_places, expect

from jitney.errors import IdempotencyConflict
from jitney.keys import BANDS, JobId
from jitney.messages import Event, usage_of
from jitney.queue import Append, Claimed, Delivery, Ending, Entry, Held, Queue, Refusal, Swept, pack_ids

TENANTS = ("ann", "bob", "cy", "-")
BUILDS = {"w0": "fpA", "w1": "fpA", "w2": "fpB"}
FINGERPRINTS = ("fpA", "fpB")
MAX_STRIKES, MAX_TRIES = 2, 6
FAR_FUTURE = 4_000_000_000.0
STEPS, CHECK_EVERY = 120, 6
HOOKS = (
    "",
    "finished,failed,cancelled,expired job https://all.example/",
    "failed,expired response https://some.example/?a=b",
)


@dataclass
class Handle:
    """A worker's view of a job it claimed: rebuilt from the log alone, and kept after the job is lost."""

    worker: str
    job: Job
    delivery: Delivery
    seq: int
    tokens: list[int] = field(default_factory=lambda: [0] * NUM_CHOICES)
    letters: list[int] = field(default_factory=lambda: [0] * NUM_CHOICES)
    has_started: bool = False

    @property
    def is_owner(self) -> bool:
        return self.job.fence == self.delivery.fence

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    def unfinished(self) -> list[int]:
        return [c for c in range(NUM_CHOICES) if self.tokens[c] < len(self.job.answer.tokens[c])]

    def copy(self) -> Handle:
        return replace(self, tokens=list(self.tokens), letters=list(self.letters))

    def read(self, events: list[Event]) -> None:
        """Start over from the log."""
        self.seq, self.tokens, self.letters = 0, [0] * NUM_CHOICES, [0] * NUM_CHOICES
        for event in events:
            self.seq = event.seq
            if event.type == "tokens":
                self.tokens[event.choice] += len(event.token_ids)
                self.letters[event.choice] += len(event.text)

    def start(self) -> bytes:
        self.seq += 1
        self.has_started = True
        return Event("started", self.seq, attempt=self.delivery.tries, prompt_tokens=3).encode()

    def speak(self, choice: int, num_tokens: int) -> bytes:
        """The next tokens of one choice, with as much text as may be shown after them."""
        answer, before = self.job.answer, self.tokens[choice]
        ids = answer.tokens[choice][before : before + num_tokens]
        after = before + len(ids)
        is_end = after == len(answer.tokens[choice])
        shown = "".join(answer.pieces[choice]) if is_end else answer.shown(choice, after)
        text, self.letters[choice] = shown[self.letters[choice] :], len(shown)
        self.tokens[choice] = after
        self.seq += 1
        reason = "stop" if is_end else None
        return Event("tokens", self.seq, choice, before, token_ids=ids, text=text, finish_reason=reason).encode()

    def end(self, kind: str) -> bytes:
        self.seq += 1
        return Event(kind, self.seq, usage=usage_of(3, self.num_tokens)).encode()  # type: ignore[arg-type]


class History:
    """One history. `run` raises oracle.Violation as soon as the queue breaks a promise."""

    def __init__(self, queue: Queue, seed: int) -> None:
        self.queue, self.redis, self.keys = queue, queue.redis, queue.keys
        self.rng = random.Random(seed)
        self.model = Model()
        self.handles: list[Handle] = []
        self.nonces = 0
        self.tally: dict[str, int] = {}
        self.ops: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.enqueue, 16),
            (self.enqueue_again, 3),
            (self.claim, 16),
            (self.claim_and_lose_the_reply, 5),
            (self.end_leases, 7),
            (self.make_due, 3),
            (self.make_late, 1),
            (self.append, 30),
            (self.append_twice, 4),
            (self.skip_an_append, 3),
            (self.finish, 6),
            (self.write_as_a_ghost, 9),
            (self.release, 6),
            (self.retry, 4),
            (self.cancel, 4),
            (self.renew, 4),
            (self.janitor, 3),
            (self.lose_a_build, 3),
            (self.repair, 2),
            (self.lose_indexes, 1),
        ]

    async def run(self) -> None:
        ops, weights = zip(*self.ops, strict=True)
        for step in range(STEPS):
            await self.rng.choices(ops, weights)[0]()
            if step % CHECK_EVERY == 0:
                await self.check()
        await self.drain()
        await self.check()
        await self.check_the_end()

    def count(self, what: str, number: int = 1) -> None:
        self.tally[what] = self.tally.get(what, 0) + number

    async def check(self) -> None:
        await check_places(self.queue, self.model, TENANTS, FINGERPRINTS)
        await check_announcements(self.queue, self.model)

    # --- clients ------------------------------------------------------------------------------------------

    async def enqueue(self) -> None:
        is_delayed = self.rng.random() < 0.15
        body = f'{{"v":1,"prompt":"{self.rng.random()}"}}'.encode()
        entry = Entry(
            id=self._new_id(),
            body=body,
            digest=digest_of(body),
            band=self.rng.choice(BANDS),
            tenant=self.rng.choice(TENANTS),
            num_prompt_tokens=self.rng.randint(1, 50),
            max_tokens=self.rng.choice((None, 8, 4_096)),
            not_before=FAR_FUTURE if is_delayed else None,
            deadline=FAR_FUTURE if self.rng.random() < 0.3 else None,
            hook=HOOKS[len(self.model.jobs) % len(HOOKS)],
        )
        enqueued = await self.queue.enqueue(entry)
        expect(enqueued.id == entry.id and not enqueued.duplicate, "a new job is no duplicate", enqueued)
        await self.redis.hset(self.keys.job(entry.id), "at", 1_000 + len(self.model.jobs))
        job = Job(
            id=entry.id,
            band=entry.band,
            tenant=entry.tenant,
            est=entry.num_prompt_tokens,
            body=body,
            answer=Answer.drawn(self.rng),
            state="later" if is_delayed else "waiting",
            order=0 if is_delayed else self.model.next_order(),
            hook=entry.hook,
        )
        self.model.jobs[job.id] = job

    def _new_id(self) -> JobId:
        """Drawn from the seed, like all that decides an order, so that a seed names one history."""
        return JobId(f"{self.queue.name}.{self.rng.randrange(10**22):022}")

    async def enqueue_again(self) -> None:
        """The reply was lost; or somebody uses the id for another body. Neither changes anything."""
        if not self.model.jobs:
            return
        job = self.rng.choice(list(self.model.jobs.values()))
        entry = Entry(id=job.id, body=job.body, digest=digest_of(job.body), band=job.band, tenant=job.tenant)
        if self.rng.random() < 0.7:
            enqueued = await self.queue.enqueue(entry)
            expect(enqueued.duplicate, "a repeated enqueue made a second job", enqueued)
            return
        try:
            await self.queue.enqueue(replace(entry, digest="another"))
        except IdempotencyConflict:
            return
        expect(False, "another body took the id of a job", job)

    async def cancel(self) -> None:
        if not self.model.jobs:
            return
        job = self.rng.choice(list(self.model.jobs.values()))
        cancelled = await self.queue.cancel(job.id)
        if job.state == "done":
            expect((cancelled.outcome, cancelled.was) == ("done", job.reason), "a second end", job, cancelled)
            return
        expect((cancelled.outcome, cancelled.was) == ("cancelled", job.state), "cancel failed", job, cancelled)
        self.count(f"cancelled {job.state}")
        self.ended(job, "cancelled")

    # --- time ---------------------------------------------------------------------------------------------

    async def end_leases(self) -> None:
        running = [job for job in self.model.in_state("running") if not job.lease_ended]
        for job in self.rng.sample(running, min(len(running), self.rng.randint(1, 3))):
            await self.redis.zadd(self.keys.leases(job.band), {job.id: 1}, xx=True)
            job.lease_ended = True

    async def make_due(self) -> None:
        for job in self.model.in_state("later"):
            if self.rng.random() < 0.5:
                await self.redis.zadd(self.keys.later, {job.id: 1}, xx=True)
                job.is_due = True

    async def make_late(self) -> None:
        open_jobs = self.model.in_state("waiting", "later", "running", "returned")
        if not open_jobs:
            return
        job = self.rng.choice(open_jobs)
        await self.redis.hset(self.keys.job(job.id), "deadline", 1)
        await self.redis.zadd(self.keys.deadlines, {job.id: 1})
        job.is_late = True

    # --- claims -------------------------------------------------------------------------------------------

    async def claim(self) -> None:
        await self._claim(self.rng.choice(list(BUILDS)), self.rng.randint(0, 6), scan=self.rng.random() < 0.8)

    async def claim_and_lose_the_reply(self) -> None:
        worker = self.rng.choice(list(BUILDS))
        claimed = await self._claim(worker, self.rng.randint(1, 6), scan=True)
        adopted = await self.queue.adopt(worker, self._nonce)
        expect(
            [replace(job, time_left_ms=None) for job in adopted]
            == [replace(job, time_left_ms=None) for job in claimed.deliveries],
            "adopt is not what the claim handed out",
            claimed,
            adopted,
        )
        other = await self.queue.adopt(worker, "never-used")
        expect(other == (), "adopt handed out what another claim took", other)
        self.count("adopted", len(adopted))

    @property
    def _nonce(self) -> str:
        return f"c{self.nonces}"

    async def _claim(self, worker: str, credit: int, *, scan: bool) -> Claimed:
        self.nonces += 1
        fp = BUILDS[worker]
        claimed = await self.queue.claim(
            worker,
            self._nonce,
            credit=credit,
            fingerprint=fp,
            lease_s=LEASE_S,
            scan=scan,
            max_strikes=MAX_STRIKES,
            max_tries=MAX_TRIES,
        )
        if scan:
            self._pass_due_jobs()
        candidates = {
            job.id: job for job in self.model.jobs.values() if (scan or job.state == "waiting") and job.can_go_to(fp)
        }
        foreign = [job for job in self.model.in_state("running") if job.lease_ended and not job.can_go_to(fp)]
        for id in claimed.gone:
            self._check_gone(self.model.jobs[id])
            candidates.pop(id, None)
        self._check_order(claimed, candidates, credit)
        for delivery in claimed.deliveries:
            await self._deliver(worker, fp, delivery)
        await self._check_moved(foreign, claimed)
        expect(claimed.num_waiting == len(self.model.in_state("waiting")), "num_waiting is wrong", claimed)
        expect((claimed.next_due_ms is None) == (not self.model.in_state("later")), "next_due_ms is wrong", claimed)
        return claimed

    def _pass_due_jobs(self) -> None:
        for job in sorted(self.model.in_state("later"), key=lambda job: job.id):
            if job.is_due:
                job.is_due = False
                job.state = "returned" if job.seq else "waiting"
                job.order = self.model.next_order()

    def _check_gone(self, job: Job) -> None:
        strikes = job.strikes_if_claimed()
        is_worn_out = strikes >= MAX_STRIKES or job.tries >= MAX_TRIES
        expect(job.state != "done" and (job.is_late or is_worn_out), "a claim ended a healthy job", job)
        if job.is_late:
            self.count("expired")
            self.ended(job, "expired")
        else:
            self.count("dead")
            job.strikes = strikes
            self.ended(job, "failed")

    def _check_order(self, claimed: Claimed, candidates: dict[JobId, Job], credit: int) -> None:
        """By band; in a band what came back before what is new; of a tenant the oldest first; all that there is."""
        taken = [self.model.jobs[delivery.id] for delivery in claimed.deliveries]
        ranks = [(BANDS.index(job.band), job.state == "waiting") for job in taken]
        expect(ranks == sorted(ranks), "bands or returned jobs out of order", taken)
        left = [job for job in candidates.values() if job not in taken]
        suspects = [job for job in taken if job.strikes_if_claimed()]
        expect(not suspects or len(taken) == 1, "a suspect came with others", taken)
        is_closed = bool(suspects) or (bool(taken) and any(job.strikes_if_claimed() for job in left))
        if len(taken) < credit and not is_closed:
            expect(not left, "a claim with room left jobs behind", taken, left)
        self.count("suspects alone", len(suspects))
        for job in left:
            rank = (BANDS.index(job.band), job.state == "waiting")
            expect(not ranks or rank >= ranks[-1], "a later band or a new job came first", taken, job)
        for lane in {(job.band, job.tenant) for job in taken}:
            mine = [job.order for job in taken if (job.band, job.tenant) == lane and job.state == "waiting"]
            rest = [job.order for job in left if (job.band, job.tenant) == lane and job.state == "waiting"]
            expect(mine == sorted(mine), "a tenant's jobs out of order", taken)
            expect(not mine or not rest or max(mine) < min(rest), "a younger job of a tenant came first", taken, left)

    async def _deliver(self, worker: str, fp: str, delivery: Delivery) -> None:
        job = self.model.jobs[delivery.id]
        expect(job.state != "running" or job.lease_ended, "claimed under a live lease", job)
        expect(job.state in ("waiting", "returned", "running"), "claimed what is not to be had", job)
        expect(not job.is_bound or job.fp == fp, "claimed by a worker of another build", job, fp)
        expect(not job.is_late, "claimed after its deadline", job)
        expect(delivery.fence not in self.model.fences, "a fence was given twice", delivery)
        strikes = job.strikes_if_claimed()
        expect(strikes < MAX_STRIKES and job.tries < MAX_TRIES, "claimed too often", job)
        expected = (
            job.band,
            job.tenant,
            job.body,
            job.seq,
            job.num_tokens,
            job.tries + 1,
            strikes,
            job.written_by,
            job.prompt_ids,
        )
        got = (
            delivery.band,
            delivery.tenant,
            delivery.body,
            delivery.seq,
            delivery.num_tokens,
            delivery.tries,
            delivery.strikes,
            delivery.fingerprints,
            delivery.prompt_ids,
        )
        expect(got == expected, "a delivery does not tell the truth", job, delivery)
        self.count("first attempts" if job.tries == 0 else "later attempts")
        self.model.fences.add(delivery.fence)
        job.was = job.written_by
        job.state, job.fence, job.fp, job.lease_ended = "running", delivery.fence, fp, False
        job.tries, job.strikes, job.cseq = delivery.tries, strikes, job.seq
        handle = Handle(worker, job, delivery, delivery.seq)
        await self._read_log(handle)
        self.handles.append(handle)

    async def _check_moved(self, foreign: list[Job], claimed: Claimed) -> None:
        moved = 0
        for job in foreign:
            if await self.redis.hget(self.keys.job(job.id), "state") == b"returned":
                moved += 1
                job.strikes = job.strikes_if_claimed()
                job.state, job.fence, job.lease_ended = "returned", "", False
        expect(moved == claimed.num_moved, "num_moved is wrong", foreign, claimed)
        self.count("moved", moved)

    # --- owners -------------------------------------------------------------------------------------------

    def owners(self) -> list[Handle]:
        return [handle for handle in self.handles if handle.is_owner]

    async def _read_log(self, handle: Handle) -> None:
        payloads = await self.queue.read_log(handle.job.id, count=10_000)
        handle.read([Event.decode(payload) for payload in payloads or ()])

    def _next_append(self, handle: Handle) -> Append:
        """One to three events; the first append of a claim begins with `started`, and of a job with its prompt."""
        first, events = handle.seq + 1, list[bytes]()
        prompt_ids = None
        if not handle.has_started:
            if handle.delivery.prompt_ids is None:
                prompt_ids = pack_ids((1, 2, 3))
            events.append(handle.start())
        for _ in range(self.rng.randint(1, 2)):
            choices = handle.unfinished()
            if choices:
                events.append(handle.speak(self.rng.choice(choices), self.rng.randint(1, 2)))
        num_prompt_tokens = 3 if prompt_ids else None
        return Append(
            handle.job.id, handle.delivery.fence, first, handle.num_tokens, events, prompt_ids, num_prompt_tokens
        )

    def _accept(self, handle: Handle, append: Append) -> None:
        handle.job.seq, handle.job.num_tokens = handle.seq, handle.num_tokens
        if append.prompt_ids is not None:
            handle.job.prompt_ids = append.prompt_ids

    async def append(self) -> None:
        """One step of one worker: owned jobs and lost ones in the same call."""
        speakers = [handle for handle in self.handles if handle.unfinished()]
        if not speakers:
            return
        worker = self.rng.choice(speakers).worker
        mine = [handle for handle in speakers if handle.worker == worker]
        mine.sort(key=lambda handle: not handle.is_owner)
        chosen = mine[: self.rng.randint(1, 4)]
        appends = [self._next_append(handle) for handle in chosen]
        refused = {
            refusal.id + append.fence: refusal
            for refusal, append in self._pair(await self.queue.append(appends), appends)
        }
        for handle, append in zip(chosen, appends, strict=True):
            refusal = refused.pop(handle.job.id + append.fence, None)
            if handle.is_owner:
                expect(refusal is None, "an owner's append was refused", handle, refusal)
                self._accept(handle, append)
                self.count("appended")
            else:
                expect(refusal is not None and refusal.reason == "fence", "a ghost's append", handle, refusal)
                self.count("refused by fence")
                self._bury_some(handle)
        expect(not refused, "refusals of jobs that were not written", refused)

    def _pair(self, refusals: list[Refusal], appends: list[Append]) -> list[tuple[Refusal, Append]]:
        """A worker may hold one job twice, as owner and as ghost: refusals come in the order of the appends."""
        rest = list(appends)
        pairs: list[tuple[Refusal, Append]] = []
        for refusal in refusals:
            owner_fences = {job.fence for job in self.model.jobs.values()}
            match = next((a for a in rest if a.id == refusal.id and a.fence not in owner_fences), None) or next(
                (a for a in rest if a.id == refusal.id), None
            )
            expect(match is not None, "a refusal that answers nothing", refusal)
            assert match is not None
            rest.remove(match)
            pairs.append((refusal, match))
        return pairs

    def _bury_some(self, handle: Handle) -> None:
        """Ghosts stay for a while, but not for ever: a history has room for other things."""
        if self.rng.random() < 0.3:
            self.handles.remove(handle)

    async def append_twice(self) -> None:
        """The reply was lost, the client sent it again."""
        owners = [handle for handle in self.owners() if handle.unfinished()]
        if not owners:
            return
        handle = self.rng.choice(owners)
        append = self._next_append(handle)
        expect(await self.queue.append([append]) == [], "an owner's append was refused", handle)
        self._accept(handle, append)
        expect(await self.queue.append([append]) == [], "a repeated append was reported", handle)
        self.count("appended twice")

    async def skip_an_append(self) -> None:
        """Events are lost on the way: what follows is refused, and the log says where to go on."""
        owners = [handle for handle in self.owners() if len(handle.unfinished()) == NUM_CHOICES]
        if not owners:
            return
        handle = self.rng.choice(owners)
        self._next_append(handle)
        late = handle.copy()
        if late.unfinished():
            refused = await self.queue.append([self._next_append(late)])
            facts = [(refusal.reason, refusal.seq) for refusal in refused]
            expect(facts == [("seq", handle.job.seq)], "a gap was accepted", handle, refused)
            self.count("refused by seq")
        ending = Ending(handle.job.id, handle.delivery.fence, handle.seq + 1, handle.num_tokens, "failed", [b"{}"])
        expect(await self.queue.finish(ending) == "seq", "an end after a gap was accepted", handle)
        await self._read_log(handle)
        handle.has_started = handle.job.seq > handle.job.cseq

    async def finish(self) -> None:
        """All that is left to say, and the end, in one call; sent twice as often as not."""
        owners = self.owners()
        if not owners:
            return
        handle = self.rng.choice(owners)
        ending = self._ending(handle)
        expect(await self.queue.finish(ending) == "ok", "an owner could not finish", handle)
        handle.job.num_tokens = ending.num_tokens
        self.ended(handle.job, ending.reason, seq=handle.seq)
        self.count("finished")
        if self.rng.random() < 0.5:
            expect(await self.queue.finish(ending) == "ok", "a repeated finish was not recognised", handle)

    def _ending(self, handle: Handle) -> Ending:
        first, events = handle.seq + 1, list[bytes]()
        is_whole = self.rng.random() < 0.8
        while is_whole and handle.unfinished():
            events.append(handle.speak(handle.unfinished()[0], 2))
        kind = "finished" if not handle.unfinished() else "failed"
        events.append(handle.end(kind))
        return Ending(handle.job.id, handle.delivery.fence, first, handle.num_tokens, kind, events)

    def ended(self, job: Job, reason: str, *, seq: int | None = None) -> None:
        job.seq = job.seq + 1 if seq is None else seq
        job.state, job.reason, job.fence, job.lease_ended, job.is_due = "done", reason, "", False, False

    async def release(self) -> None:
        owners = self.owners()
        if not owners:
            return
        handle = self.rng.choice(owners)
        delay_s = self.rng.choice((0.0, 0.0, 1_000.0))
        job = handle.job
        outcome = await self.queue.release(job.id, handle.delivery.fence, delay_s=delay_s)
        expect(outcome == "ok", "an owner could not release", handle, outcome)
        job.tries -= 1
        if job.seq > job.cseq:
            job.strikes = 0
        self._returned(job, delay_s)

    async def retry(self) -> None:
        owners = self.owners()
        if not owners:
            return
        handle = self.rng.choice(owners)
        delay_s = self.rng.choice((0.0, 1_000.0))
        job = handle.job
        outcome = await self.queue.retry(
            job.id, handle.delivery.fence, delay_s=delay_s, max_strikes=MAX_STRIKES, max_tries=MAX_TRIES
        )
        job.strikes = job.strikes + 1 if job.seq == job.cseq else 0
        if job.strikes >= MAX_STRIKES or job.tries >= MAX_TRIES:
            expect(outcome == "dead", "too many attempts", job, outcome)
            self.count("dead")
            self.ended(job, "failed")
        else:
            expect(outcome == "ok", "an owner could not hand back", job, outcome)
            self._returned(job, delay_s)

    def _returned(self, job: Job, delay_s: float) -> None:
        job.state, job.fence, job.lease_ended, job.is_due = "later" if delay_s else "returned", "", False, False

    async def renew(self) -> None:
        worker = self.rng.choice(list(BUILDS))
        mine = [handle for handle in self.handles if handle.worker == worker]
        if not mine:
            return
        lost = await self.queue.renew(LEASE_S, [Held(h.job.id, h.delivery.fence, h.job.band) for h in mine])
        owned = {handle.job.id for handle in mine if handle.is_owner}
        expect(lost == {h.job.id for h in mine if not h.is_owner}, "renew is wrong about what is lost", mine, lost)
        for id in owned:
            self.model.jobs[id].lease_ended = False

    async def write_as_a_ghost(self) -> None:
        """A worker that lost a job long ago tries everything it could do as its owner."""
        ghosts = [handle for handle in self.handles if not handle.is_owner]
        if not ghosts:
            return
        ghost = self.rng.choice(ghosts).copy()
        job, fence = ghost.job, ghost.delivery.fence
        expected = {"done"} if job.state == "done" else {"fence"}
        if ghost.unfinished():
            refused = await self.queue.append([self._next_append(ghost)])
            expect([refusal.reason for refusal in refused] == ["fence"], "a ghost wrote tokens", ghost, refused)
        ending = replace(self._ending(ghost), first_seq=self.rng.choice((job.seq + 1, ghost.seq)))
        finished = await self.queue.finish(ending)
        if job.state == "done" and finished == "ok":
            by = await self.redis.hget(self.keys.job(job.id), "by")
            expect(by == fence.encode(), "a ghost was told that it ended a job", ghost, by)
        else:
            expect({finished} == expected, "a ghost ended a job", ghost, finished)
        released = await self.queue.release(job.id, fence)
        expect({released} == expected, "a ghost released a job", ghost, released)
        retried = await self.queue.retry(job.id, fence)
        expect({retried} == expected, "a ghost retried a job", ghost, retried)
        lost = await self.queue.renew(LEASE_S, [Held(job.id, fence, job.band)])
        expect(lost == {job.id}, "a ghost renewed a lease", ghost)
        self.count("ghosts refused")

    # --- upkeep -------------------------------------------------------------------------------------------

    async def janitor(self) -> None:
        self._swept(await self.queue.janitor(fingerprint=self.rng.choice(FINGERPRINTS)))

    def _swept(self, swept: Swept) -> None:
        """What every janitor call does: delayed jobs fall due; whoever is late ends, its owner's grace being over."""
        self._pass_due_jobs()
        late = [job for job in self.model.in_state("waiting", "later", "running", "returned") if job.is_late]
        expect(swept.num_expired == len(late), "late jobs were overlooked", late, swept)
        expect(swept.num_tidied == 0, "there was something to tidy", swept)
        for job in late:
            self.ended(job, "expired")

    async def lose_a_build(self) -> None:
        """No worker of a build has been seen for long: what is bound to it ends, or goes on elsewhere."""
        fp = self.rng.choice(FINGERPRINTS)
        held = [job for job in self.model.in_state("returned") if job.is_bound and job.fp == fp and not job.is_late]
        for job in held:
            await self.redis.hset(self.keys.job(job.id), "since", 1)
        await self.redis.zadd(self.keys.fingerprints, {fp: 1}, xx=True)
        await self.redis.set(self.keys.looked, "1", px=30_000)
        policy = self.rng.choice(("fail", "continue"))
        swept = await self.queue.janitor(resume_mismatch=policy, slice_size=1_000)  # type: ignore[arg-type]
        self._swept(swept)
        expect(swept.num_orphans == len(held), "orphans were overlooked", held, swept)
        self.count("orphans", len(held))
        for job in held:
            if policy == "fail":
                self.ended(job, "failed")
            else:
                job.was, job.fp = job.written_by, ""

    async def repair(self) -> None:
        if self.model.jobs:
            job = self.rng.choice(list(self.model.jobs.values()))
            outcome = await self.queue.repair(job.id)
            expect(outcome == "ok", "repair changed a job that was in its place", job, outcome)

    async def lose_indexes(self) -> None:
        """Somebody deletes some of what names the jobs: a pass of the janitor puts each back into its place."""
        names = [self.keys.later, self.keys.deadlines, self.keys.fingerprints, self.keys.counts]
        for band in BANDS:
            names += [self.keys.fair(band), self.keys.leases(band)]
            names += [self.keys.jobs(band, tenant) for tenant in TENANTS]
            names += [self.keys.held(band, fp) for fp in FINGERPRINTS]
        lost = set(self.rng.sample(names, self.rng.randint(1, len(names))))
        await self.redis.delete(*lost)
        num_repaired = await self._pass()
        self.count("repaired", num_repaired)
        expect(await self._pass() == 0, "a second pass found something to repair", lost)
        await self._follow_repairs(lost)
        if num_repaired:
            await self.check()
        await self.janitor()  # for the counts, where they alone were lost
        await self.check()

    async def _pass(self) -> int:
        """From the beginning: a round of the janitor may have stopped anywhere."""
        await self.redis.delete(self.keys.sweep)
        num_repaired = await self.queue.sweep()
        while await self.redis.exists(self.keys.sweep):
            num_repaired += await self.queue.sweep()
        return num_repaired

    async def _follow_repairs(self, lost: set[str]) -> None:
        """Queued again in no promised order; leases are new; what was delayed is due when it was to be."""
        entries = {}
        for job in self.model.in_state("waiting"):
            stamp, _, number = (await self.redis.hget(self.keys.job(job.id), "eid")).decode().partition("-")
            entries[job.id] = (int(stamp), int(number))
        for id in sorted(entries, key=lambda id: entries[id]):
            self.model.jobs[id].order = self.model.next_order()
        for job in self.model.in_state("running"):
            job.lease_ended = job.lease_ended and self.keys.leases(job.band) not in lost
        for job in self.model.in_state("later"):
            job.is_due = job.is_due and self.keys.later not in lost

    # --- the end ------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Everything that is open is claimed by somebody who may have it, and ended."""
        while open_jobs := self.model.in_state("waiting", "later", "returned", "running"):
            for job in open_jobs:
                if job.state == "later":
                    await self.redis.zadd(self.keys.later, {job.id: 1}, xx=True)
                    job.is_due = True
                elif job.state == "running":
                    await self.redis.zadd(self.keys.leases(job.band), {job.id: 1}, xx=True)
                    job.lease_ended = True
            for worker in ("w0", "w2"):
                await self._claim(worker, 100, scan=True)
            while self.owners():
                await self.finish()

    async def check_the_end(self) -> None:
        for job in self.model.jobs.values():
            entries = await self.redis.xrange(self.keys.tokens(job.id))
            events = [Event.decode(fields[b"e"]) for _, fields in entries]
            check_log(job, [id for id, _ in entries], events)
        await self._check_ledger()
        await self.queue.janitor()
        await self._check_leftovers()

    async def _check_ledger(self) -> None:
        lines = [fields for _, fields in await self.redis.xrange(self.keys.usage)]
        ledger = sorted((line[b"j"].decode(), int(line[b"c"]), line[b"r"].decode()) for line in lines)
        jobs = sorted((job.id, job.num_tokens, job.reason) for job in self.model.jobs.values())
        expect(ledger == jobs, "the ledger has not one line per job", ledger, jobs)

    async def _check_leftovers(self) -> None:
        names = [name.decode() async for name in self.redis.scan_iter(f"{self.keys.prefix}:*", count=10_000)]
        suffixes = {name.removeprefix(self.keys.prefix + ":").split(":")[0] for name in names}
        # Dead jobs keep their body, ended ones their record and log; all of them with an end.
        allowed = {"job", "tokens", "body", "usage", "dead", "ended", "vt", "last", "idle", "bell", "counts", "sweep"}
        allowed |= {"hooks", "hook"}  # somebody is still to be told
        expect(suffixes <= allowed, "keys were left behind", suffixes - allowed)
        expect(await self.queue.counts() == (0, 0), "counts of nothing", await self.queue.counts())
        lasting = [name for name in names if name.split(":")[2] in ("job", "tokens", "body", "sweep")]
        for name in lasting:
            expect(await self.redis.pttl(name) > 0, "a key would live for ever", name)


async def forget(queue: Queue) -> None:
    """Delete a history's keys, so that a thousand of them need no memory."""
    names = [name async for name in queue.redis.scan_iter(f"{queue.keys.prefix}:*", count=10_000)]
    if names:
        await queue.redis.unlink(*names)

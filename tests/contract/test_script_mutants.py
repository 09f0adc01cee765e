"""Each guard of the scripts is needed, and the checker would see it gone: scripts without it are caught.

A mutant is a script in which one piece of text is replaced. Where the text is missing the test fails:
then the script has changed and the mutant must follow it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from histories import History, forget
from oracle import Violation

from jitney import scripts
from jitney.connection import Redis
from jitney.queue import Queue
from jitney.scripts import Script

SEEDS = int(os.environ.get("JITNEY_MUTANT_SEEDS", "40"))
"""Most mutants are caught by the first or second history, the rarest by about the tenth."""


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in the scripts named."""

    name: str
    scripts: tuple[str, ...]
    old: str
    new: str


SHARED_ENDING = ("claim", "finish", "retry", "cancel", "janitor", "repair")
NO_FENCE = ("if fence == '' or job.fence ~= fence then", "if false then")
NOT_OVER = ("if job.state == 'done' then return {'done', job.reason} end", "")

MUTANTS = (
    Mutant("append accepts any fence", ("append",), "fence == '' or has[1] ~= fence", "false"),
    Mutant("append accepts any seq", ("append",), "first ~= seq + 1", "false"),
    Mutant("append forgets the token count", ("append",), "'n', n)", "'n', 0)"),
    Mutant("append forgets the prompt", ("append",), "if ARGV[at + 4] ~= ''", "if false"),
    Mutant("append forgets its seq", ("append",), "redis.call('HSET', job, 'seq', int(first + k - 1), 'n', n)", ""),
    Mutant("finish accepts any fence", ("finish",), *NO_FENCE),
    Mutant("finish accepts any seq", ("finish",), "if first ~= job.seq + 1", "if false"),
    Mutant("finish ends what has ended", ("finish",), "if job.state == 'done'", "if false"),
    Mutant("release accepts any fence", ("release",), *NO_FENCE),
    Mutant("release keeps the fence", ("release", "retry"), "'owner', '', 'fence', '', 'since'", "'since'"),
    Mutant(
        "release with delay leaves the lease",
        ("release", "retry"),
        "    redis.call('ZREM', P .. ':leases:' .. job.band, job.id)\n    redis.call('ZADD', P .. ':later'",
        "    redis.call('ZADD', P .. ':later'",
    ),
    Mutant("release burns the attempt", ("release",), "job.tries - 1", "job.tries"),
    Mutant("retry accepts any fence", ("retry",), *NO_FENCE),
    Mutant("retry burns no attempt", ("retry",), "job.strikes + 1 or 0", "job.strikes or 0"),
    Mutant(
        "renew accepts any fence",
        ("renew",),
        "fence == '' or redis.pcall('HGET', P .. ':job:' .. id, 'fence') ~= fence",
        "false",
    ),
    Mutant(
        "claim takes jobs of another build", ("claim",), "is_bound(job) and job.fp ~= fp and not is_late(job)", "false"
    ),
    Mutant(
        "claim takes jobs under a live lease",
        ("claim",),
        "leases, '-inf', NOW, 'LIMIT'",
        "leases, '-inf', '+inf', 'LIMIT'",
    ),
    Mutant("claim overlooks expired leases", ("claim",), "leases, '-inf', NOW, 'LIMIT'", "leases, '-inf', -1, 'LIMIT'"),
    Mutant("claim leaves the entry", ("claim",), "    redis.call('XDEL', stream, unpack(served))\n", ""),
    Mutant("claim leaves the count", ("claim",), "    add_counts(-#served, -tokens)\n", ""),
    Mutant("claim gives all the same fence", ("claim",), "nonce .. '.' .. (#taken + 1)", "'always'"),
    Mutant(
        "claim takes no lease",
        ("claim",),
        "  redis.call('ZADD', P .. ':leases:' .. job.band, NOW + lease_ms, job.id)\n",
        "",
    ),
    Mutant("claim ignores deadlines", ("claim",), "  if is_late(job) then", "  if false then"),
    Mutant("claim never gives up", ("claim",), "job.strikes >= max_strikes or job.tries >= max_tries", "false"),
    Mutant("claim counts no strikes", ("claim",), "job.strikes + 1 or 0", "job.strikes or 0"),
    Mutant(
        "claim hands out a suspect with others",
        ("claim",),
        "    closed = true\n    if #taken > 0 then return false end\n",
        "",
    ),
    Mutant(
        "claim takes others along with a suspect",
        ("claim",),
        "return closed or #taken >= credit",
        "return #taken >= credit",
    ),
    Mutant(
        "claim forgets a held suspect",
        ("claim",),
        "and not take(job, 0) and closed then return end",
        "then take(job, 0) end",
    ),
    Mutant("claim leaves what was held", ("claim",), "      redis.call('ZREM', held, id)\n", ""),
    Mutant(
        "claim moves a job with its fence",
        ("claim",),
        "save(job, 'state', 'returned', 'owner', '', 'fence', '', 'strikes'",
        "save(job, 'state', 'returned', 'strikes'",
    ),
    Mutant(
        "a bound job stays among the leases",
        ("claim", "release", "retry", "janitor"),
        "  redis.call('ZREM', leases, job.id)\n",
        "",
    ),
    Mutant("adopt asks for no nonce", ("adopt",), "if word() ~= nonce then\n", "nonce = word() or ''\nif false then\n"),
    Mutant("cancel keeps the fence", ("cancel",), "'owner', '', 'fence', '', 'seq'", "'seq'"),
    Mutant("cancel leaves the job in its place", ("cancel",), "  unplace(job)\n", ""),
    Mutant("cancel leaves the count", ("cancel",), "    add_counts(-1, -job.est)\n", ""),
    Mutant(
        "cancel forgets held jobs",
        ("cancel",),
        "if job.fp ~= '' then redis.call('ZREM', P .. ':held:'",
        "if false then redis.call('ZREM', P .. ':held:'",
    ),
    Mutant("cancel ends what has ended", ("cancel",), *NOT_OVER),
    Mutant("an end without its seq", SHARED_ENDING, "  job.seq = job.seq + #events\n", ""),
    Mutant(
        "an end without a ledger line",
        SHARED_ENDING,
        "redis.call('XADD', P .. ':usage'",
        "redis.call('XADD', P .. ':elsewhere'",
    ),
    Mutant("an ended job lives for ever", SHARED_ENDING, "  redis.call('PEXPIRE', hash, keep)\n", ""),
    Mutant("a body outlives its job", SHARED_ENDING, "    redis.call('DEL', P .. ':body:' .. job.id)\n", ""),
    Mutant(
        "an end that is announced to nobody",
        SHARED_ENDING,
        "  if job.hook ~= '' then tell(job, events[#events]) end\n",
        "",
    ),
    Mutant(
        "an end that is announced whatever it is",
        SHARED_ENDING,
        "not string.find(',' .. wanted .. ',', ',' .. ending .. ',', 1, true)",
        "false",
    ),
    Mutant("a job forgets who is to be told", ("enqueue",), "  if new.hook ~= '' then add('hook', new.hook) end\n", ""),
    Mutant("due jobs are not counted", ("claim", "janitor"), "  add_counts(1, job.est)\n", ""),
    Mutant("due jobs stay delayed", ("claim", "janitor"), "    redis.call('ZREM', P .. ':later', id)\n", ""),
    Mutant("a tenant does not join", ("enqueue",), "  redis.call('ZADD', fair, start, tenant)\n", ""),
    Mutant("a tenant does not leave", ("claim", "cancel"), "  leave(band, tenant)\n", ""),
    Mutant(
        "enqueue makes a second job of a repeated call", ("enqueue",), "if known then return", "if false then return"
    ),
    Mutant("the janitor ends no late jobs", ("janitor",), "\nend_late()\n", "\n"),
    Mutant("the janitor overlooks orphans", ("janitor",), "if job.since + wait_ms", "if false and job.since + wait_ms"),
    Mutant("repair queues no waiting job", ("repair",), "  if not is_entry_of(job, stream) then", "  if false then"),
    Mutant("repair forgets the new entry", ("repair",), "    save(job, 'eid', job.eid)\n    ring", "    ring"),
    Mutant("repair counts nothing", ("repair",), "if #done > 0 then recount() end", ""),
    Mutant("repair joins no tenant", ("repair",), "  join(band, tenant)\n  ring(P .. ':bell')\n", ""),
    Mutant("repair leases no running job", ("repair",), "  redis.call('ZADD', leases, int(longest), job.id)\n", ""),
    Mutant("repair hands nothing back", ("repair",), "  hand(job)\n  return 'handed'", "  return 'handed'"),
    Mutant("repair makes delayed jobs due", ("repair",), "math.max(job.due, NOW)", "NOW"),
    Mutant(
        "repair forgets deadlines", ("repair",), "  redis.call('ZADD', P .. ':deadlines', int(first), job.id)\n", ""
    ),
    Mutant(
        "repair takes jobs out of their place",
        ("repair",),
        "  if placed and (is_held or num(placed) <= NOW) then return nil end\n",
        "",
    ),
    Mutant("repair never sees a lease", ("repair",), "  if expiry and num(expiry)", "  if false and num(expiry)"),
    Mutant("a retry forgets when it is due", ("release", "retry"), "    save(job, 'due', int(NOW + delay_ms))\n", ""),
    Mutant(
        "a delayed job forgets when it is due",
        ("enqueue",),
        "  if new.is_later then add('due'",
        "  if false then add('due'",
    ),
    Mutant("a freed orphan stays bound", ("janitor",), ", 'fp', '')", ")"),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
async def test_a_script_without_a_guard_is_caught(
    redis: Redis, queue_name: str, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {name: mutated(name, mutant) for name in mutant.scripts}
    unchanged = {name: scripts.load(name) for name in scripts.NAMES}
    monkeypatch.setattr(scripts, "load", lambda name: (unchanged | changed)[name])
    with pytest.raises(Violation):
        await run_histories(redis, queue_name)


async def run_histories(redis: Redis, queue_name: str) -> None:
    for seed in range(SEEDS):
        queue = Queue(redis, f"{queue_name}-{seed}")
        try:
            await History(queue, seed).run()
        finally:
            await forget(queue)


def mutated(name: str, mutant: Mutant) -> Script:
    source = scripts.assemble(name)
    assert mutant.old in source, f"{name}.lua no longer contains what {mutant.name!r} replaces"
    return scripts.as_script(name, source.replace(mutant.old, mutant.new))

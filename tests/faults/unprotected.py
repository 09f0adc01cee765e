"""Protections switched off in the memory of one process of a test: the product has no switch for any of them.

In the scripts by a change of their text (`mutate_scripts`), in a worker by another method in the place of one.
"""

from __future__ import annotations

from collections.abc import Callable

from jitney import scripts
from jitney_worker.runtime.intake import Intake
from jitney_worker.runtime.past import Past
from jitney_worker.runtime.running import RunningJob
from jitney_worker.runtime.view import View

NO_FENCE = "append=fence == '' or has[1] ~= fence=>false"
NO_SEQ = "append=first ~= seq + 1=>false"
ANY_ID = "append=local id, event = int(first + j) .. '-0'=>local id, event = '*'"
NO_LOG = "append=added = redis.pcall('XADD', log, 'NOMKSTREAM', id, 'e', event)=>added = id"
NO_REFUSAL_AT_THE_END = "finish=local job, refusal = owned(id, fence)=>local job, refusal = load_job(id), {'gone'}"
NO_SEQ_AT_THE_END = "finish=first ~= job.seq + 1=>false"
NO_EXPIRY = "claim=leases, '-inf', NOW, 'LIMIT'=>leases, '-inf', -1, 'LIMIT'"
NO_RENEWAL = "renew=for band, members in pairs(leases) do=>for band, members in pairs({}) do"
SUSPECTS_WITH_OTHERS = "claim=if job.strikes > 0 then=>if false then"
ENDLESS_ATTEMPTS = "claim=return job.strikes >= max_strikes or job.tries >= max_tries=>return false"
NO_IDEMPOTENCY = "enqueue=if KEYS[4] then=>if false then"


def mutate_scripts(mutations: list[str]) -> None:
    """Each `script=old=>new`: the named script without one of its guards, in this process alone."""
    changed: dict[str, scripts.Script] = {}
    load = scripts.load
    for mutation in mutations:
        name, _, change = mutation.partition("=")
        old, _, new = change.partition("=>")
        source = changed[name].source if name in changed else scripts.assemble(name)
        assert old in source, f"{name}.lua no longer contains {old!r}"
        changed[name] = scripts.as_script(name, source.replace(old, new))
    if changed:
        scripts.load = lambda name: changed.get(name) or load(name)  # type: ignore[assignment]


def replace_in(owner: type, name: str, value: object) -> None:
    """Another value in the place of a method, which must be there: else the protection is elsewhere by now."""
    assert hasattr(owner, name), f"{owner.__name__} has no {name}"
    setattr(owner, name, value)


def _forget_the_log() -> None:
    """Whoever takes a job over begins it anew."""

    async def nothing(_intake: Intake, _delivery: object) -> Past:
        return Past()

    replace_in(Intake, "_past", nothing)


def _trust_suspects() -> None:
    """A job that may have killed its last workers runs in the batch like any other."""
    replace_in(RunningJob, "is_suspect", False)


def _ignore_epochs() -> None:
    """A worker does not ask whether the data set is still the one it knew."""

    async def nothing(_view: View) -> None:
        return None

    replace_in(View, "_mind_epoch", nothing)


WITHOUT: dict[str, Callable[[], None]] = {
    "resume": _forget_the_log,
    "suspects": _trust_suspects,
    "epoch": _ignore_epochs,
}

"""The Lua scripts: read from the package, put together, run by their digest.

`-- with: base fair` in a script names the pieces (`_base.lua`, ...) that stand between its first line and
its body. The shebang stays the first line: without it a stale replica would answer a guard's refusal
instead of READONLY, and a live owner would drop good jobs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from redis.exceptions import ClusterDownError, NoScriptError, ReadOnlyError

from jitney.connection import Redis

NAMES: Final = (
    "enqueue",
    "requeue",
    "drop",
    "claim",
    "adopt",
    "renew",
    "append",
    "finish",
    "release",
    "retry",
    "cancel",
    "janitor",
    "repair",
    "fold",
    "hook_add",
    "hook_claim",
    "hook_settle",
    "hook_retry",
    "hook_drop",
)

ROOM: Final = "jitney"

Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Script:
    """A whole script as the server gets it, and the digest that names it there."""

    name: str
    source: str
    sha: str


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a script. keys[0] routes it; args[0] is the prefix of the queue's keys."""

    keys: Sequence[str]
    args: Sequence[Argument]


def assemble(name: str, *, room: str = ROOM) -> str:
    """The source of script `name`: its shebang, the pieces it names, its body. room: the package of its `scripts/`."""
    shebang, pieces, body = _text(room, f"{name}.lua").split("\n", 2)
    assert shebang.startswith("#!lua"), f"{name}.lua must begin with a shebang"
    assert pieces.startswith("-- with: "), f"the second line of {name}.lua must name its pieces"
    included = [_text(room, f"_{piece}.lua") for piece in pieces.removeprefix("-- with: ").split()]
    return "\n".join((shebang, *included, body))


def _text(room: str, file_name: str) -> str:
    return resources.files(room).joinpath("scripts", file_name).read_text(encoding="utf-8")


def as_script(name: str, source: str) -> Script:
    """`source` under its digest."""
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


@cache
def load(name: str, *, room: str = ROOM) -> Script:
    """The script `name`, assembled once per process."""
    return as_script(name, assemble(name, room=room))


async def run(redis: Redis, script: Script, call: Call) -> Any:
    """Run a script by its digest; load it first where the server does not know it (new, or restarted)."""
    try:
        return await redis.evalsha(script.sha, len(call.keys), *call.keys, *call.args)
    except NoScriptError:
        await redis.script_load(script.source)
        return await redis.evalsha(script.sha, len(call.keys), *call.keys, *call.args)


async def run_each(redis: Redis, script: Script, calls: Iterable[Call]) -> list[Any]:
    """Run a script several times, in order, in one round trip. Raises the first error after all have run."""
    wanted = list(calls)
    if len(wanted) == 1:
        return [await run(redis, script, wanted[0])]
    pipeline = redis.pipeline(transaction=False)
    for call in wanted:
        pipeline.execute_command("EVALSHA", script.sha, len(call.keys), *call.keys, *call.args)
    replies = await pipeline.execute(raise_on_error=False)
    for number, reply in enumerate(replies):
        # None of these did anything. The last two are an old primary's: a call of its own leaves its connection.
        if isinstance(reply, NoScriptError | ReadOnlyError | ClusterDownError):
            replies[number] = await run(redis, script, wanted[number])
        elif isinstance(reply, Exception):
            raise reply
    return list(replies)

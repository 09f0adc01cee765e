"""Which shapes of Redis are served: one server, a primary with replicas, a cluster of one node.

Every client here speaks to one address. In a cluster of several nodes that one holds only some of the slots, and the
list of queues lies in other slots than the queues do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from redis.exceptions import AskError, ResponseError

from jitney.connection import Redis
from jitney.errors import SettingsError

SERVED: Final = "use a server, a primary with replicas, or a cluster of one node"


async def cluster_facts(redis: Redis) -> dict[str, str]:
    """CLUSTER INFO as a dict; empty where there is no cluster, or where this user may not ask."""
    try:
        answer: Any = await redis.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
    except ResponseError:
        return {}
    if isinstance(answer, dict):
        return {_text(name): _text(value) for name, value in answer.items()}
    return dict(line.split(":", 1) for line in _text(answer).splitlines() if ":" in line)


def num_nodes(facts: Mapping[str, Any]) -> int:
    """Nodes that own slots; 0 for what is no cluster."""
    size = str(facts.get("cluster_size", 0))
    return int(size) if size.isdigit() else 0


async def refuse_several_nodes(redis: Redis) -> None:
    """Raises SettingsError for a cluster of several nodes; passes where the server does not say."""
    number = num_nodes(await cluster_facts(redis))
    if number > 1:
        raise SettingsError(f"this Redis is a cluster of {number} nodes, and jitney speaks to one alone: {SERVED}")


def redirection(error: BaseException) -> str | None:
    """What a MOVED or ASK means here; None for any other error. `error`'s text: slot and address of the other node."""
    if not isinstance(error, AskError):  # MovedError is one too
        return None
    return f"it sends us to another node of its cluster ({error}), and jitney speaks to one alone: {SERVED}"


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

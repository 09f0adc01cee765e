"""`python -m jitney_worker.health`: exit 0 if a worker of this host is alive and not stuck. For exec probes.

Looks for the worker named by JITNEY_WORKER__ID, otherwise for any worker of this host.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from jitney.connection import connect
from jitney.errors import JitneyError
from jitney.joblog import PASSING_ERRORS
from jitney.keys import QUEUES
from jitney.workers import WorkerView, list_workers
from jitney_worker.settings import WorkerSettings, load_settings


async def find(settings: WorkerSettings) -> WorkerView | None:
    """This host's worker, or the one that JITNEY_WORKER__ID names; None if it does not beat."""
    redis = connect(settings.redis_url, name="jitney-health")
    try:
        for name in await redis.hkeys(QUEUES):
            queue = name.decode() if isinstance(name, bytes) else name
            for view in await list_workers(redis, queue):
                if view.id == settings.worker.id or (settings.worker.id is None and view.host == socket.gethostname()):
                    return view
        return None
    finally:
        await redis.aclose()


def main() -> int:
    try:
        view = asyncio.run(find(load_settings()))
    except (JitneyError, *PASSING_ERRORS) as error:
        print(f"cannot ask Redis: {error}", file=sys.stderr)
        return 1
    if view is None:
        print("no worker of this host is beating", file=sys.stderr)
        return 1
    print(f"{view.id} is {view.state}", file=sys.stderr)
    return 1 if view.state == "stuck" else 0


if __name__ == "__main__":
    sys.exit(main())

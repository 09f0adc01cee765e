"""`python -m jitney.rq.health`: exit 0 if RQ knows of a worker of this host that gives signs of life. For exec probes."""

from __future__ import annotations

import socket
import sys
from datetime import UTC, datetime, timedelta
from typing import Final

from redis import Redis
from redis.exceptions import RedisError
from rq.serializers import JSONSerializer
from rq.worker import Worker

from jitney.errors import JitneyError
from jitney.rq.settings import RqSettings

MOST_SILENT: Final = timedelta(seconds=120)
"""A worker that waits for jobs says so in every minute or sooner."""

TIMEOUT_S: Final = 5.0


def names(connection: Redis) -> list[str]:
    """The workers of this host that live. A name in RQ's set whose hash has expired is that of a dead one."""
    since, host = datetime.now(UTC) - MOST_SILENT, socket.gethostname()
    return [
        worker.name
        for worker in Worker.all(connection=connection, serializer=JSONSerializer)
        if worker.hostname == host and worker.last_heartbeat is not None and worker.last_heartbeat >= since
    ]


def main() -> int:
    try:
        url = RqSettings.load().rq_url
        with Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as connection:
            found = names(connection)
    except (JitneyError, RedisError, OSError) as error:
        print(f"cannot ask RQ's Redis: {type(error).__name__}", file=sys.stderr)
        return 1
    print(", ".join(found) if found else "no RQ worker of this host gives a sign of life", file=sys.stderr)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())

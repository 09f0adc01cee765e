"""`jitney rq-worker`: an RQ worker that holds many jobs at once, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from redis import Redis
from redis.exceptions import RedisError

from jitney.errors import QueueUnavailable, first_line
from jitney.logs import configure
from jitney.rq.settings import DEFAULT_QUEUE, RqSettings
from jitney.rq.worker import HoldingWorker
from jitney.settings import usable_url

Queues = Annotated[list[str] | None, typer.Argument(help=f"RQ queues, in order (default: {DEFAULT_QUEUE}).")]
Concurrency = Annotated[int | None, typer.Option(help="Jobs held at once (default: 512).")]
RqUrl = Annotated[str | None, typer.Option(help="RQ's Redis (default: JITNEY_RQ__URL, RQ_REDIS_URL, --redis-url).")]
RedisUrl = Annotated[str | None, typer.Option(help="jitney's Redis (default: JITNEY_REDIS_URL, the local stack).")]
DrainTimeout = Annotated[float | None, typer.Option(help="Seconds that jobs may go on after SIGTERM (default: 20).")]
Name = Annotated[str | None, typer.Option(help="The worker's name in `rq info` (default: a random one).")]
Burst = Annotated[bool, typer.Option("--burst", help="Leave when the queues are empty and all jobs have ended.")]
Scheduler = Annotated[
    bool, typer.Option("--scheduler/--no-scheduler", help="Run RQ's scheduler, for retries later on.")
]


def rq_worker(
    queues: Queues = None,
    concurrency: Concurrency = None,
    rq_url: RqUrl = None,
    redis_url: RedisUrl = None,
    drain_timeout_s: DrainTimeout = None,
    name: Name = None,
    burst: Burst = False,
    scheduler: Scheduler = True,
) -> None:
    """Take RQ jobs that jitney generates, many at once, and finish each as RQ's own workers do."""
    configure()
    settings = RqSettings.load(url=rq_url or redis_url, concurrency=concurrency, drain_timeout_s=drain_timeout_s)
    client_url = None if redis_url is None else usable_url(redis_url)
    try:
        worker = AnnouncingWorker(
            queues or [DEFAULT_QUEUE],
            settings=settings,
            client_url=client_url,
            name=name,
            connection=Redis.from_url(settings.rq_url),
        )
    except (RedisError, OSError) as error:
        raise QueueUnavailable(f"RQ's Redis does not answer: {first_line(error)}") from None
    worker.work(burst=burst, with_scheduler=scheduler, logging_level=os.environ.get("JITNEY_LOG_LEVEL", "info").upper())
    if worker.holdings:  # given back; what awaited them would complain of being dropped
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class AnnouncingWorker(HoldingWorker):
    """Says that it works once it does: that line is what scripts wait for."""

    def bootstrap(self, *args: Any, **kwargs: Any) -> None:
        """As RQ's."""
        super().bootstrap(*args, **kwargs)
        names = ",".join(self.queue_names())
        print(f"ready rq-worker={self.name} queues={names}", file=sys.stderr, flush=True)

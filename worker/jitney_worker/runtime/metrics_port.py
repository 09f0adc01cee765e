"""The worker's own `/metrics`, where it was asked for: a thread that answers, and reads what the event loop counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jitney.errors import SettingsError
from jitney.metrics.readings import Readings
from jitney.metrics.table import OF_WORKER, WORKER_LABELS
from jitney_worker.settings import WorkerSection


@contextlib.contextmanager
def serving_metrics(
    settings: WorkerSection, labels: tuple[str, ...], read: Callable[[], Readings]
) -> Iterator[str | None]:
    """Serve until the end of the block; the address of the page, None where no port was asked for.

    Raises SettingsError for a port that cannot be had.
    """
    if settings.metrics_port is None:
        yield None
        return
    # Only now: a worker that serves no metrics needs no library for them.
    from prometheus_client import start_http_server

    from jitney.metrics.exposition import Source, registry_of

    registry = registry_of(lambda: [Source(OF_WORKER, WORKER_LABELS, [(labels, read())])])
    try:
        server, thread = start_http_server(settings.metrics_port, settings.metrics_host, registry)
    except OSError as error:
        raise SettingsError(
            f"worker.metrics_port={settings.metrics_port} cannot be served on {settings.metrics_host}: "
            f"{error.strerror or error}. Give another one (--metrics-port)"
        ) from None
    host = f"[{settings.metrics_host}]" if ":" in settings.metrics_host else settings.metrics_host
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A Celery application that is ready to run: `celery -A jitney.celery.app worker -B`.

Its broker, its results and the jobs lie on one server, unless `JITNEY_CELERY__…` or Celery's own variables say
otherwise. See docs/CELERY.md.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

from celery import Celery

from jitney.celery.installing import install
from jitney.celery.settings import CelerySettings, celery_settings
from jitney.settings import client_settings


def make_app(settings: CelerySettings, url: str) -> Celery:
    """url: the server where the jobs are."""
    app = Celery("jitney", set_as_current=True)
    app.conf.update(_configuration(settings, url))
    install(app)
    return app


def _configuration(settings: CelerySettings, url: str) -> dict[str, Any]:
    broker, results = settings.broker_url, settings.result_backend
    transport = {"visibility_timeout": settings.visibility_timeout_s}
    return {
        "broker_url": spelled(url) if broker is None else broker.get_secret_value(),
        "result_backend": spelled(url) if results is None else results.get_secret_value(),
        "task_default_queue": settings.queue,
        # JSON, everywhere: what is never loaded cannot run.
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        "broker_transport_options": transport,
        "result_backend_transport_options": transport,
        "broker_connection_retry_on_startup": True,
        # Held tasks need no process; the threads are for upkeep. Threads start at once, and share the event loop.
        "worker_pool": "threads",
        "worker_concurrency": 4,
        "task_send_sent_event": True,
        "worker_send_task_events": True,
    }


def spelled(url: str) -> str:
    """A Redis address as Celery spells it: a socket's has another scheme there."""
    parts = urlsplit(url)
    if parts.scheme != "unix":
        return url
    number = parse_qs(parts.query).get("db", ["0"])[0]
    login = parts.netloc.rpartition("@")[0]
    return f"redis+socket://{login}{'@' if login else ''}{parts.path}?virtual_host={number}"


app = make_app(celery_settings(), client_settings().url)

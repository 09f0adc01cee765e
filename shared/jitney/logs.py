"""Logs: events with fields, on standard error; JSON when it is not a terminal.

Ids, counts and durations only: never a prompt, generated text, a key or a password (`redaction`). docs/LOGS.md lists
every event. A program that merely imports jitney hears of warnings, and its own structlog configuration is not touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import structlog

from jitney.errors import SettingsError
from jitney.redaction import redacted

Listener = Callable[[MutableMapping[str, Any]], None]
"""Hears every event with its fields, whatever its level, on the thread that logs it."""

_LEVELS = logging.getLevelNamesMapping()
_threshold = logging.WARNING
_listeners: list[Listener] = []


def configure(level: str = "info") -> None:
    """Say from which level on this process logs. JITNEY_LOG_LEVEL overrides it. Raises SettingsError."""
    global _threshold
    name = os.environ.get("JITNEY_LOG_LEVEL", level)
    if name.upper() not in _LEVELS:
        raise SettingsError(f"JITNEY_LOG_LEVEL={name!r} is not one of debug, info, warning, error")
    _threshold = _LEVELS[name.upper()]


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let `listener` hear what is logged meanwhile."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def logger(**fields: Any) -> Any:
    """A logger that carries `fields` in every line."""
    return structlog.wrap_logger(
        _StandardError(),
        processors=[
            _heard,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            redacted,
            _render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        context_class=dict,
        cache_logger_on_first_use=True,
        **fields,
    )


class _StandardError:
    """Where lines go. Looked up anew for each: tests and programs replace `sys.stderr`."""

    def msg(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    debug = info = warning = error = critical = exception = msg


def _heard(_: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for listener in list(_listeners):
        listener(event)
    if _LEVELS["ERROR" if method == "exception" else method.upper()] < _threshold:
        raise structlog.DropEvent
    return event


def _render(target: Any, method: str, event: MutableMapping[str, Any]) -> Any:
    renderer: Any = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    return renderer(target, method, event)

"""Logs: events with fields, on standard error; JSON when it is not a terminal.

Ids, counts and durations only: never a prompt or generated text at info level.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import structlog

from jitney.errors import SettingsError


def configure(level: str = "info") -> None:
    """Set structlog up for this process. Call once, from a command. JITNEY_LOG_LEVEL overrides `level`."""
    level = os.environ.get("JITNEY_LOG_LEVEL", level).upper()
    known = logging.getLevelNamesMapping()
    if level not in known:
        raise SettingsError(f"JITNEY_LOG_LEVEL={level.lower()!r} is not one of debug, info, warning, error")
    is_terminal = sys.stderr.isatty()
    renderer: Any = structlog.dev.ConsoleRenderer() if is_terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(known[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def logger(**fields: Any) -> Any:
    """A logger that carries `fields` in every line."""
    return structlog.get_logger(**fields)

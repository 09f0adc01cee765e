"""What the HTTP server says, as events like all others: a log in two formats is read by no machine."""

from __future__ import annotations

import logging

from jitney.logs import logger

_TOLD_BY_US = "Exception in ASGI application"
"""`request_failed` and `stream_failed` have said so, with the request's id."""


class _AsEvents(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._log = logger(part="server")

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(_TOLD_BY_US):
            return
        fields = {"said": record.getMessage(), "exc_info": record.exc_info or None}
        if record.levelno >= logging.ERROR:
            self._log.error("server_said", **fields)
        else:
            self._log.warning("server_said", **fields)


def hear_the_server() -> None:
    """From now on, instead of what uvicorn would print."""
    said = logging.getLogger("uvicorn")
    said.handlers, said.propagate = [_AsEvents()], False

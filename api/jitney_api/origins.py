"""Web pages of other origins: a form is the one body that a browser sends for them without asking first."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from jitney_api.failures import BadBody
from jitney_api.settings import ApiSettings

CODE: Final = "origin_not_allowed"


def refuse_foreign_page(request: Request, settings: ApiSettings) -> None:
    """Raises BadBody (403) for a page that `cors_origins` does not name: it could fill this server's disk."""
    origin = request.headers.get("origin")
    if origin is not None and origin not in settings.cors_origins and "*" not in settings.cors_origins:
        raise BadBody(f"no page of {origin[:64]} may upload here: name it in cors_origins", code=CODE)

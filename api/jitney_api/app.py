"""The application: routes, handlers and the one client behind them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from jitney.errors import JitneyError
from jitney.tracing import traces_if_wanted
from jitney_api import (
    routes_admin,
    routes_batches,
    routes_embeddings,
    routes_files,
    routes_health,
    routes_jobs,
    routes_metrics,
    routes_openai,
    routes_page,
    routes_reference,
    routes_responses,
    routes_tokens,
)
from jitney_api.access import admit, check_table
from jitney_api.documents import openapi_of
from jitney_api.edge import RequestEdge
from jitney_api.failures import JOB_ID_HEADER, on_bug, on_client_gone, on_http_error, on_jitney_error, on_wrong_query
from jitney_api.service import Service
from jitney_api.settings import ApiSettings
from jitney_api.trace_context import TraceContext
from jitney_api.traffic import Traffic, traffic_readings

ROUTERS = (
    routes_openai.router,
    routes_responses.router,
    routes_embeddings.router,
    routes_files.router,
    routes_batches.router,
    routes_jobs.router,
    routes_tokens.router,
    routes_health.router,
    routes_metrics.router,
    routes_reference.router,
    routes_page.router,
    routes_admin.router,
)

DESCRIPTION = (
    "Durable LLM generation by continuous batching. Every answer is a job: it can be left, watched from any "
    "cursor, resumed after a lost connection, and cancelled. Errors have OpenAI's shape everywhere."
)


def create_app(settings: ApiSettings | None = None) -> FastAPI:
    """The ASGI application. Connections are opened when it starts and closed when it stops."""
    settings = settings or ApiSettings.load()
    check_table(ROUTERS)
    traces = traces_if_wanted("jitney-api")

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = Service(settings)
        try:
            yield
        finally:
            await app.state.service.aclose()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    app = _Application(
        title="jitney",
        version=version("jitney"),
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        dependencies=[Depends(admit)],
        # Both would load their scripts from somebody else's host; routes_reference.py has a page that does not.
        docs_url=None,
        redoc_url=None,
    )
    for router in ROUTERS:
        app.include_router(router)
    app.state.asks_for_keys = settings.asks_for_keys
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, **_cors(settings))
    app.add_middleware(RequestEdge, settings=settings)
    app.state.traffic = traffic_readings()
    app.add_middleware(TraceContext, traces=traces)
    app.add_middleware(Traffic, readings=app.state.traffic)
    app.add_exception_handler(JitneyError, on_jitney_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_wrong_query)
    app.add_exception_handler(ClientDisconnect, on_client_gone)
    app.add_exception_handler(Exception, on_bug)
    return app


def _cors(settings: ApiSettings) -> dict[str, Any]:
    """No cookies are meant by any of it: a page sends its key itself."""
    return {
        "allow_origins": settings.cors_origins,
        "allow_methods": ("GET", "POST", "DELETE"),
        "allow_headers": ("*",),
        "expose_headers": ("x-request-id", JOB_ID_HEADER, "retry-after", "retry-after-ms"),
    }


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        return openapi_of(self)

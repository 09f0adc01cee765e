"""`jitney api`: serve HTTP until told to stop."""

from __future__ import annotations

import signal
import socket
import sys
from typing import Annotated

import typer
import uvicorn

from jitney.logs import configure
from jitney_api.connections import server_config
from jitney_api.server_logs import hear_the_server
from jitney_api.settings import ApiSettings

MAX_CONNECTIONS = 65_536
"""For which files are asked of the system; more than one process serves well."""


class _AnnouncingServer(uvicorn.Server):
    """Says where it serves once it does: that line is what scripts wait for."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            return
        for server in self.servers:
            for listening in server.sockets:
                host, port = listening.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                print(f"ready api=http://{shown}:{port}", file=sys.stderr, flush=True)
                return


def api(
    host: Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one (default: 8000).")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis to talk to (default: JITNEY_REDIS_URL, the local stack, localhost).")
    ] = None,
) -> None:
    """Serve the OpenAI endpoints and the job endpoints over HTTP."""
    configure()
    settings = ApiSettings.load(host=host, port=port, redis_url=redis_url)
    serve(settings)


def serve(settings: ApiSettings) -> None:
    """Serve until SIGTERM or SIGINT; open streams may go on for `drain_timeout_s`."""
    _allow_connections()
    # uvicorn sends the signal once more after it has stopped in good order, which is no way to die of it.
    signal.signal(signal.SIGTERM, _leave)
    hear_the_server()
    _AnnouncingServer(server_config(settings, log_config=None)).run()


def _allow_connections() -> None:
    """As many open files as the system lets us have: a stream is one, and shells hand out 1,024."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, MAX_CONNECTIONS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(0)

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
from jitney_api.settings import ApiSettings


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
    # uvicorn sends the signal once more after it has stopped in good order, which is no way to die of it.
    signal.signal(signal.SIGTERM, _leave)
    _AnnouncingServer(server_config(settings)).run()


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(0)

"""`python -m ops.bench.streams_bare`: the same streams from the web server alone, out of memory: no Redis, no queue.

What an event costs here is what it costs to write it at all.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys

import orjson
import uvicorn
from ops.bench.streams_worker import Script
from starlette.types import Receive, Scope, Send

HEADERS = [(b"content-type", b"text/event-stream"), (b"x-jitney-job-id", b"none")]
CHUNK = {"id": "chatcmpl-none", "object": "chat.completion.chunk", "created": 0, "model": "scripted"}


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers every request with what the script in its chat says."""
    if scope["type"] != "http":
        raise NotImplementedError(scope["type"])
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    script = Script.of(orjson.loads(body)["messages"][-1]["content"])
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    clock = asyncio.get_running_loop().time
    start = clock()
    for number in range(script.num_events):
        await asyncio.sleep(max(0.0, start + number * script.every_s - clock()))
        await send({"type": "http.response.body", "body": frame(script, number), "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def frame(script: Script, number: int) -> bytes:
    """As the API writes it."""
    choice = {"index": 0, "delta": {"content": script.text(number)}, "logprobs": None, "finish_reason": None}
    return b"id: %d\ndata: %b\n\n" % (number + 1, orjson.dumps({**CHUNK, "choices": [choice]}))


class Announcing(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                print(f"ready api=http://127.0.0.1:{listening.getsockname()[1]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="streams_bare").parse_args()
    logging.disable()
    Announcing(uvicorn.Config(application, port=0, ws="none", access_log=False, lifespan="off")).run()

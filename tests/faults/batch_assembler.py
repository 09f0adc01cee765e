"""`python -m tests.faults.batch_assembler`: one batch, assembled in a process of its own, which may be killed."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from tests.faults.points import say

from jitney import AsyncClient
from jitney.logs import configure
from jitney.webhooks.settings import WebhookSettings
from jitney_api.batches.assembly import Assembler
from jitney_api.batches.files import DirectoryStore
from jitney_api.batches.records import Batch
from jitney_api.batches.settings import BatchSettings
from jitney_api.tokenizers import Tokenizers


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="batch_assembler")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--files", required=True, type=Path)
    parser.add_argument("--batch", required=True)
    parser.add_argument("--window", type=int, default=64)
    return parser.parse_args()


async def assemble(asked: argparse.Namespace) -> None:
    async def show(batch: Batch) -> None:
        say(f"done {batch.completed}")

    async with AsyncClient(asked.redis_url) as client:
        tokenizers = Tokenizers(client.redis, max_loaded=1, num_threads=1)
        settings = BatchSettings(window=asked.window)
        assembler = Assembler(
            client,
            DirectoryStore(asked.files),
            settings,
            tokenizers=tokenizers,
            webhooks=WebhookSettings(),
            show=show,
        )
        ended = await assembler.assemble(asked.batch)
        say(f"ended {ended.state}")


if __name__ == "__main__":
    configure()
    asyncio.run(assemble(arguments()))

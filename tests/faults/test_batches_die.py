"""Everything that a batch needs is killed in the middle of it, one after the other, and each line is answered once."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
from tests.faults.answers import Asked
from tests.faults.arena import Arena
from tests.faults.children import Child
from tests.faults.conftest import MakeArena, ServerMaker

from jitney_api.batches.catalog import Catalog
from jitney_api.batches.files import DirectoryStore
from jitney_api.batches.ledger import Ledger, Order
from jitney_api.batches.records import Batch, FileRecord, new_file_id

NUM_LINES = 600


def asked(number: int, model: str) -> Asked:
    fields = {"model": model, "prompt": f"the river {number}", "max_tokens": 2 + number % 7, "temperature": 0.0}
    return Asked(f"line {number}", fields)


async def make_batch(field: Arena, store: DirectoryStore) -> Batch:
    """Of NUM_LINES completions."""

    async def parts() -> AsyncIterator[bytes]:
        for number in range(NUM_LINES):
            one = asked(number, field.queue_name)
            line = {"custom_id": one.name, "method": "POST", "url": "/v1/completions", "body": one.fields}
            yield orjson.dumps(line) + b"\n"

    file = FileRecord(new_file_id(), "-", "in.jsonl", "batch", 0)
    await store.put(file.id, parts())
    await Catalog(field.redis).keep(file, None)
    return await Ledger(field.redis).create(Order("-", "/v1/completions", file.id))


async def start_assembler(field: Arena, batch: Batch, files: Path, name: str) -> Child:
    child = await Child.start(
        name,
        "tests.faults.batch_assembler",
        *("--redis-url", field.server.url, "--files", str(files), "--batch", batch.id),
        ledger=field.ledger,
    )
    field.workers[name] = child  # gone at the end, like them
    return child


async def reaches(assembler: Child, num_completed: int) -> None:
    def says(line: str) -> bool:
        return line.startswith("done ") and int(line.split()[1]) >= num_completed

    await assembler.until_any(says, what=f"{num_completed} lines done")


async def test_assembler_worker_and_server_are_killed_and_every_line_is_answered_once(
    make_arena: MakeArena, make_server: ServerMaker, tmp_path: Path
) -> None:
    server = make_server(appendfsync="always")
    files = tmp_path / "files"
    async with make_arena(server) as field:
        store = DirectoryStore(files)
        await field.start_workers("w1", "w2", step_s=0.001)
        batch = await make_batch(field, store)
        first = await start_assembler(field, batch, files, "a1")
        await reaches(first, 30)
        first.send(signal.SIGKILL)
        await first.ended()
        second = await start_assembler(field, batch, files, "a2")
        await reaches(second, 100)
        field.workers["w1"].send(signal.SIGKILL)
        await reaches(second, 200)
        await asyncio.to_thread(server.kill)
        assert second.said("ended") == []
        await asyncio.to_thread(server.start)
        await second.until("ended completed")
        ended = await Ledger(field.redis).find(batch.id)
        assert (ended.completed, ended.failed, ended.error_file_id) == (NUM_LINES, 0, None)
        assert ended.output_file_id is not None
        output = [orjson.loads(line) for line in (files / ended.output_file_id).read_bytes().splitlines()]
        assert Counter(line["custom_id"] for line in output) == Counter(f"line {n}" for n in range(NUM_LINES))
        said = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in output}
        for number in range(0, NUM_LINES, 5):
            one = asked(number, field.queue_name)
            assert said[one.name] == field.alone.answer(one).text

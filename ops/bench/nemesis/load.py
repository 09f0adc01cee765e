"""A load that never ebbs: whoever has its whole answer asks the next question at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.faults.answers import WORDS, Alone, Answer, Asked, Asking
from tests.faults.arena import Arena
from tests.faults.proxy import Proxy
from tests.faults.readers import HttpClient, PythonClient

from jitney import AsyncClient
from jitney.tasks import end_tasks

BULK: Mapping[str, Any] = {"band": "bulk"}


class Source(Protocol):
    """What is asked, without end, and what a run alone answers to it."""

    def next(self, fixed: Mapping[str, Any]) -> Asked: ...

    def answer(self, asked: Asked) -> Answer: ...


@dataclass(slots=True)
class Scripted:
    """Requests that are all different; answers are computed here, without an engine."""

    asking: Asking
    alone: Alone

    def next(self, fixed: Mapping[str, Any]) -> Asked:
        return self.asking.one(**fixed)

    def answer(self, asked: Asked) -> Answer:
        return self.alone.answer(asked)


@dataclass(slots=True)
class Repeated:
    """The same few requests over and over, each time under another name; answers were heard from one worker alone."""

    requests: list[Asked]
    answers: Mapping[str, Answer]
    _number: int = 0

    def next(self, fixed: Mapping[str, Any]) -> Asked:
        one = self.requests[self._number % len(self.requests)]
        self._number += 1
        return Asked(f"{one.name}#{self._number}", {**one.fields, **fixed})

    def answer(self, asked: Asked) -> Answer:
        return self.answers[asked.name.partition("#")[0]]


def requests(seed: int, count: int, max_tokens: tuple[int, int]) -> list[Asked]:
    """For a real model: every other one greedy, the others sampled."""
    least, most = max_tokens
    made = []
    for number in range(count):
        words = " ".join(WORDS[(number + seed) % 7 :])
        sampled = {"temperature": 0.8, "seed": seed * 1_000 + number} if number % 2 else {"temperature": 0.0}
        length = least + (most - least) * number // max(1, count - 1)
        made.append(Asked(f"m{seed}-{number}", {"prompt": f"{number} {words}", "max_tokens": length, **sampled}))
    return made


async def heard_alone(client: AsyncClient, asked: Iterable[Asked]) -> dict[str, Answer]:
    """What one undisturbed worker says to each request, one after the other."""
    answers = {}
    for one in asked:
        result = await client.generate(**one.fields)
        assert result.finish_reason is not None
        ids, prompt_tokens = result.token_ids, result.usage["prompt_tokens"]
        answers[one.name] = Answer(ids, result.text, result.finish_reason, prompt_tokens)
    return answers


@dataclass(slots=True)
class Load:
    """So many streams, every other one over HTTP, and so many bulk jobs, all of them read to the end."""

    arena: Arena
    source: Source
    num_streams: int
    num_bulk: int
    proxy: Proxy | None = None
    asked: list[Asked] = field(default_factory=list)
    _seats: list[asyncio.Task[None]] = field(default_factory=list)
    _is_over: bool = False

    def begin(self) -> None:
        python, http = PythonClient(self.arena.client(self.proxy), self.arena.ledger), self.arena.http()
        readers = [http if number % 2 else python for number in range(self.num_streams)]
        self._seats = [asyncio.create_task(self._ask(reader, {})) for reader in readers]
        self._seats += [asyncio.create_task(self._ask(python, BULK)) for _ in range(self.num_bulk)]

    async def under_way(self) -> None:
        """Until every seat has been told something."""
        wanted = self.num_streams + self.num_bulk
        await self.arena.told(lambda: self._failed() or len(self.arena.progress) >= wanted, "every stream has begun")

    async def end(self, patience_s: float) -> None:
        """Ask nothing more; until all that was asked has been answered."""
        self._is_over = True
        done, pending = await asyncio.wait(self._seats, timeout=patience_s)
        await end_tasks(pending)
        assert not pending, f"{len(pending)} streams had no end within {patience_s:g} s"
        for seat in done:
            seat.result()
        self.arena.answers.update({asked.name: self.source.answer(asked) for asked in self.asked})

    async def _ask(self, reader: PythonClient | HttpClient, fixed: Mapping[str, Any]) -> None:
        while not self._is_over:
            asked = self.source.next(fixed)
            self.asked.append(asked)
            job_id = await reader.submit(asked)
            self.arena.read(reader, asked, job_id)
            await self.arena.reading[-1]

    def _failed(self) -> bool:
        return any(seat.done() for seat in self._seats)

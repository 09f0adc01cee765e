"""The lines of a record: one JSON object for each thing that happened. Ids alone; no prompt and no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, with_config

from jitney_worker.engine.settings import EngineSettings, Policy
from jitney_worker.engine.witness import Came, Dropped, Step


@dataclass(frozen=True, slots=True)
class Began:
    """A worker began to record: who it is, and what its engine may use. at: seconds of the Unix clock."""

    worker: str
    queue: str
    model: str
    policy: Policy
    num_seats: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    at: float
    kind: Literal["began"] = "began"
    v: Literal[1] = 1

    @classmethod
    def of(cls, settings: EngineSettings, *, worker: str, queue: str, model: str, at: float) -> Began:
        return cls(
            worker=worker,
            queue=queue,
            model=model,
            policy=settings.policy,
            num_seats=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            at=at,
        )


@dataclass(frozen=True, slots=True)
class Full:
    """The record has reached its bound; the run went on without it."""

    kind: Literal["full"] = "full"


Entry = Began | Came | Dropped | Step | Full


@with_config({"extra": "forbid"})
@dataclass(frozen=True, slots=True)
class Line:
    """at_s: seconds since the record began."""

    at_s: Annotated[float, Field(ge=0)]
    entry: Annotated[Entry, Field(discriminator="kind")]


LINE: TypeAdapter[Line] = TypeAdapter(Line)

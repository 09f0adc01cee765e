"""Drives the real engine with a real runner, and says what each sequence got."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from jitney.structured import StructuredOutputs
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import ModelRunner, ScheduledSequence, TokenLogprobs
from jitney_worker.engine.sequence import Sequence as EngineSequence
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.model.batch import step_batch
from jitney_worker.model.runner import TorchRunner, runner_over
from jitney_worker.text.rules import StopRules
from jitney_worker.text.structures import Structures


@dataclass(frozen=True)
class Ask:
    """One sequence to run. Ends by length alone unless stop strings, stop tokens or a structure are given."""

    prompt_ids: tuple[int, ...]
    max_tokens: int = 32
    output_ids: tuple[int, ...] = ()
    salt: str = ""
    stop: tuple[str, ...] = ()
    group: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    structure: StructuredOutputs | None = None


@dataclass
class Answer:
    """What came of it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: bytes | None = None


def prompt(length: int, *, seed: int, vocab_size: int = 512) -> tuple[int, ...]:
    """Random token ids, control tokens left out."""
    draw = random.Random(seed)
    return tuple(draw.randrange(3, vocab_size) for _ in range(length))


def engine_for(runner: TorchRunner, *, model: ModelRunner | None = None, **settings: Any) -> LocalEngine:
    """An engine that checks its laws after every step. model: executes instead of `runner`; rules: for stop strings."""
    hash_block, rules = settings.pop("hash_block", None), settings.pop("rules", None)
    limits = {
        "max_model_len": runner.max_model_len,
        "num_blocks": runner.num_blocks,
        "block_size": runner.block_size,
        "enable_prefix_caching": False,
        "check": True,
    }
    extra = {} if hash_block is None else {"hash_block": hash_block}
    return LocalEngine(EngineSettings(**(limits | settings)), model or runner, rules, **extra)


def run(
    engine: LocalEngine,
    asks: Sequence[Ask],
    *,
    every: int = 0,
    rules: StopRules | None = None,
    structures: Structures | None = None,
) -> list[Answer]:
    """Run all to the end. every: add one at a time with so many steps between (0 = all before the first step)."""
    answers = {f"job{i}/0": Answer() for i in range(len(asks))}
    waiting = [(name, i, ask) for i, (name, ask) in enumerate(zip(answers, asks, strict=True))]
    steps = 0
    while waiting or engine.has_work():
        while waiting and (every == 0 or steps % every == 0 or not engine.has_work()):
            name, arrival, ask = waiting.pop(0)
            if rules is not None:
                structure = None
                if ask.structure is not None and structures is not None:
                    structure = structures.begin(ask.structure, ask.output_ids)
                rules.register(name, ask.stop, structure=structure)
            engine.add(
                SequenceRequest(
                    SequenceId(name),
                    ask.prompt_ids,
                    SequenceParams(
                        max_tokens=ask.max_tokens,
                        has_stop_strings=bool(ask.stop),
                        has_structure=ask.structure is not None,
                        **ask.options,
                    ),
                    (0, 0.0, 0, arrival),
                    ask.output_ids,
                    ask.salt,
                    ask.group,
                )
            )
            if every:
                break
        for delta in engine.step():
            answer = answers[delta.id]
            answer.token_ids += delta.token_ids
            answer.logprobs += [found.logprob for found in delta.logprobs]
            answer.prompt_logprobs += delta.prompt_logprobs
            answer.num_cached_tokens = delta.num_cached_tokens
            answer.finish_reason = delta.finish_reason
            answer.embedding = delta.embedding
            answer.error = delta.error.code if delta.error else None
        steps += 1
    return list(answers.values())


def tokens(engine: LocalEngine, asks: Sequence[Ask], *, every: int = 0) -> list[list[int]]:
    """The token ids alone, after checking that nothing failed."""
    answers = run(engine, asks, every=every)
    assert [answer.error for answer in answers] == [None] * len(asks)
    return [answer.token_ids for answer in answers]


def alone(runner: TorchRunner, ask: Ask) -> list[int]:
    """The sequence by itself, whole prompt at once, no prefix cache: what every other way must equal.

    In a cache of its own: another engine may hold blocks in the runner's.
    """
    return tokens(engine_for(with_own_cache(runner), max_num_batched_tokens=4_096), [ask])[0]


def logits_of(runner: TorchRunner, token_ids: Sequence[int]) -> torch.Tensor:
    """[length, vocab] of one sequence, computed at once in the runner's first blocks."""
    sequence = EngineSequence.of(
        SequenceRequest(SequenceId("s/0"), tuple(token_ids), SequenceParams(1), (0, 0.0, 0, 0))
    )
    sequence.block_table = list(range(-(-len(token_ids) // runner.block_size)))
    batch = step_batch(
        [ScheduledSequence(sequence, 0, len(token_ids), True)],
        block_size=runner.block_size,
        scratch_block=runner.cache.scratch_block,
        device=runner.cache.device,
    )
    with torch.inference_mode():
        hidden = runner.decoder.forward(batch.token_ids, batch.positions, runner.attention.plan(batch))
        return runner.decoder.logits(hidden)


def with_own_cache(runner: TorchRunner, num_blocks: int = 40) -> TorchRunner:
    """The same weights over an empty cache."""
    old = runner.cache
    return runner_over(runner.decoder, num_blocks, old.block_size, old.dtype, old.device, runner.team)

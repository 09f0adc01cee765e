"""Doubles for the engine's two neighbours, through their protocols, and a way to drive an engine to its end.

`HashModel` is a model whose every token depends on every token before it, read through the block table from a
simulated KV cache. A wrong table, a stale hit or a position nobody computed is an assertion at once, and would
change the tokens besides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any

from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import (
    BlockCopy,
    ModelOutput,
    RowFailure,
    Sampled,
    ScheduledSequence,
    SchedulerOutput,
    SequenceDelta,
    TokenLogprobs,
)
from jitney_worker.engine.sequence import FinishReason, Pooling, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.engine.settings import EngineSettings

VOCAB = 97
EOS = 0
FAILURE = RowFailure("nan_logits", "the logits are not numbers")


def prefix_hash(before: int, token_id: int) -> int:
    """Digest of a prefix from that of the prefix one shorter."""
    return ((before ^ (token_id + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**61


def next_token(digest: int, choice: int = 0) -> int:
    """The model: a token id from 0 (the end token) to 96. Choices of one prompt part ways at once."""
    return (digest >> 17) % VOCAB if choice == 0 else (digest >> (17 + choice)) * (choice + 1) % VOCAB


def as_bytes(digests: Iterable[int]) -> bytes:
    """What a pooled sequence gives."""
    return b"".join(digest.to_bytes(8, "little") for digest in digests)


def pooled(request: SequenceRequest) -> bytes:
    """What it gives with no engine at all."""
    digests, digest = [], 0
    for token_id in request.prompt_ids:
        digest = prefix_hash(digest, token_id)
        digests.append(digest)
    return as_bytes(digests if request.params.pooling == "mean" else digests[-1:])


def prompt_logprob(position: int, token_id: int) -> TokenLogprobs:
    """What the model thinks of a prompt's token."""
    return TokenLogprobs(-float(position * VOCAB + token_id))


def solo(request: SequenceRequest, max_model_len: int = 10**9) -> tuple[tuple[int, ...], FinishReason]:
    """What a sequence says with no engine at all: its output, earlier attempts' tokens included, and its ending."""
    digest = 0
    for token_id in (*request.prompt_ids, *request.output_ids):
        digest = prefix_hash(digest, token_id)
    output = list(request.output_ids)
    most = min(request.params.max_tokens, max_model_len - len(request.prompt_ids))
    least = request.params.min_tokens
    while not (len(output) > least and output[-1] in request.params.stop_token_ids):
        if len(output) >= most:
            return tuple(output), "length"
        output.append(next_token(digest, request.params.choice))
        digest = prefix_hash(digest, output[-1])
    return tuple(output), "stop"


class StepBroke(Exception):
    """What a runner raises when a forward pass fails as a whole."""


@dataclass
class HashModel:
    """A runner that keeps, for every slot of the cache, (token id, position, digest of the prefix up to it).

    fails_at: sequence id -> number of the output token in whose place its row fails.
    steps: every step it was asked to compute, as (step, {sequence id: tokens computed}).
    copies: every copy it was asked to make. breaks: numbers of the calls that raise, each after some of the work.
    """

    block_size: int = 16
    fails_at: dict[SequenceId, int] = field(default_factory=dict)
    cache: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    steps: list[tuple[int, dict[SequenceId, int]]] = field(default_factory=list)
    preempted: list[tuple[int, SequenceId]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    breaks: frozenset[int] = frozenset()
    num_calls: int = 0

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        self.num_calls += 1
        if self.num_calls in self.breaks:
            self._break(scheduled)
        self.steps.append((scheduled.step, {i.sequence.id: i.stop - i.start for i in scheduled.scheduled}))
        self.preempted += [(scheduled.step, sequence_id) for sequence_id in scheduled.preempted]
        self.copies += scheduled.copies
        for copy in scheduled.copies:
            self._copy(copy)
        written: set[int] = set()
        for item in scheduled.scheduled:
            self._write(item, written)
        rows = [self._sample(item) for item in scheduled.scheduled if item.samples]
        wanting = [item for item in scheduled.scheduled if item.num_prompt_logprobs is not None]
        pooled = {item.sequence.id: self._pool(item) for item in scheduled.scheduled if item.pooling is not None}
        return ModelOutput(rows, {item.sequence.id: self._prompt_logprobs(item) for item in wanting}, pooled)

    def _pool(self, item: ScheduledSequence) -> bytes | RowFailure:
        """As an embedding: the digests of the prefixes that end in these tokens, one after the other."""
        if item.is_pooled and item.sequence.id in self.fails_at:
            return FAILURE
        digests = [self.cache[self._slot(item, position)][2] for position in range(item.start, item.stop)]
        return item.pooled + as_bytes(digests if item.pooling == "mean" else digests[-1:])

    def _prompt_logprobs(self, item: ScheduledSequence) -> list[TokenLogprobs]:
        """Position and token of each prompt token from the second one on, as one number."""
        prompt = item.sequence.request.prompt_ids
        last = min(item.stop, len(prompt) - 1)
        return [prompt_logprob(position, prompt[position]) for position in range(item.start + 1, last + 1)]

    def _break(self, scheduled: SchedulerOutput) -> None:
        """Fail as late as possible on odd calls, with everything written; at once on even ones."""
        if self.num_calls % 2:
            for copy in scheduled.copies:
                self._copy(copy)
            written: set[int] = set()
            for item in scheduled.scheduled:
                self._write(item, written)
        raise StepBroke

    def _copy(self, copy: BlockCopy) -> None:
        assert 0 < copy.num_tokens < self.block_size
        for offset in range(self.block_size):
            source, target = (block * self.block_size + offset for block in (copy.source, copy.target))
            self.cache.pop(target, None)
            if offset < copy.num_tokens:
                self.cache[target] = self.cache[source]

    def _slot(self, item: ScheduledSequence, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return item.sequence.block_table[block] * self.block_size + offset

    def _write(self, item: ScheduledSequence, written: set[int]) -> None:
        digest = self.cache[self._slot(item, item.start - 1)][2] if item.start else 0
        for position in range(item.start, item.stop):
            slot, token_id = self._slot(item, position), item.sequence.token_ids[position]
            assert slot not in written, "two sequences write to one slot"
            written.add(slot)
            digest = prefix_hash(digest, token_id)
            self.cache[slot] = (token_id, position, digest)

    def _sample(self, item: ScheduledSequence) -> Sampled | RowFailure:
        """Look at every position, as attention would, after all rows have written."""
        sequence, digest = item.sequence, 0
        for position in range(item.stop):
            digest = prefix_hash(digest, sequence.token_ids[position])
            found = self.cache.get(self._slot(item, position))
            expected = (sequence.token_ids[position], position, digest)
            assert found == expected, f"{sequence.id}: position {position} holds {found}, not {expected}"
        if self.fails_at.get(sequence.id) == sequence.num_output_tokens:
            return FAILURE
        token_id = next_token(digest, sequence.params.choice)
        return Sampled(token_id, TokenLogprobs(-float(token_id)) if sequence.params.num_logprobs is not None else None)


@dataclass
class ScriptedModel:
    """A runner that says what the script says, token by token; after its end, token 1."""

    script: dict[str, list[int | RowFailure]]

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        return ModelOutput([self._say(item) for item in scheduled.scheduled if item.samples])

    def _say(self, item: ScheduledSequence) -> Sampled | RowFailure:
        lines = self.script.get(str(item.sequence.id), [])
        index = item.sequence.num_output_tokens
        said = lines[index] if index < len(lines) else 1
        return said if isinstance(said, RowFailure) else Sampled(said)


@dataclass
class PhraseRules:
    """Text rules that end a sequence when its output ends in a phrase of token ids."""

    phrases: dict[str, tuple[int, ...]]
    heard: dict[SequenceId, list[int]] = field(default_factory=dict)
    dropped: list[SequenceId] = field(default_factory=list)

    def start(self, sequence_id: SequenceId, output_ids: ListLike[int]) -> None:
        assert sequence_id not in self.heard
        self.heard[sequence_id] = list(output_ids)

    def advance(self, sequence_id: SequenceId, token_id: int) -> FinishReason | None:
        self.heard[sequence_id].append(token_id)
        phrase = self.phrases[str(sequence_id)]
        return "stop" if tuple(self.heard[sequence_id][-len(phrase) :]) == phrase else None

    def mask(self, sequence_id: SequenceId) -> bytes | None:
        return None

    def failure(self, sequence_id: SequenceId) -> str | None:
        return None

    def drop(self, sequence_id: SequenceId) -> None:
        del self.heard[sequence_id]
        self.dropped.append(sequence_id)


def settings(**options: object) -> EngineSettings:
    """Roomy settings that check themselves after every step."""
    given: dict[str, object] = {"max_model_len": 4096, "num_blocks": 4096, "check": True, **options}
    return EngineSettings(**given)  # type: ignore[arg-type]


def request(
    name: str,
    prompt: int | Iterable[int],
    max_tokens: int = 16,
    *,
    arrival: int = 0,
    virtual_time: float = 0.0,
    output: Iterable[int] = (),
    salt: str = "",
    stop_ids: Iterable[int] = (),
    stop_strings: bool = False,
    num_logprobs: int | None = None,
    min_tokens: int = 0,
    group: str = "",
    choice: int = 0,
    num_prompt_logprobs: int | None = None,
    pooling: Pooling | None = None,
    band: int = 0,
) -> SequenceRequest:
    """A request called `name`; a whole number as prompt means that many tokens peculiar to the name."""
    if isinstance(prompt, int):
        own = sum(ord(letter) * 31**place for place, letter in enumerate(name))
        prompt = [(own + 7 * position) % VOCAB for position in range(prompt)]
    return SequenceRequest(
        id=SequenceId(name),
        prompt_ids=tuple(prompt),
        params=SequenceParams(
            max_tokens,
            stop_token_ids=frozenset(stop_ids),
            has_stop_strings=stop_strings,
            num_logprobs=num_logprobs,
            min_tokens=min_tokens,
            choice=choice,
            num_prompt_logprobs=num_prompt_logprobs,
            pooling=pooling,
        ),
        order_key=(band, virtual_time, 0, arrival),
        output_ids=tuple(output),
        cache_salt=salt,
        group=group,
    )


def choices(
    name: str,
    prompt: int | Iterable[int],
    max_tokens: int = 16,
    *,
    n: int,
    outputs: Iterable[Iterable[int]] = (),
    **options: Any,
) -> list[SequenceRequest]:
    """The n choices of one job, `name/0` and so on. outputs: of earlier attempts, those of the first choices."""
    prompt_ids = request(name, prompt).prompt_ids
    earlier = [*map(tuple, outputs)] + [()] * n
    return [
        request(
            f"{name}/{choice}",
            prompt_ids,
            max_tokens,
            group=name,
            choice=choice,
            output=earlier[choice],
            **options,
        )
        for choice in range(n)
    ]


@dataclass
class Outcome:
    """All that came out of a run, by sequence."""

    tokens: dict[SequenceId, list[int]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[SequenceId, list[int]] = field(default_factory=lambda: defaultdict(list))
    endings: dict[SequenceId, SequenceDelta] = field(default_factory=dict)
    prompt_logprobs: dict[SequenceId, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))

    def take(self, deltas: Iterable[SequenceDelta]) -> None:
        for delta in deltas:
            assert delta.id not in self.endings, f"{delta.id} goes on after its end"
            self.tokens[delta.id] += delta.token_ids
            self.prompt_logprobs[delta.id] += delta.prompt_logprobs
            self.steps[delta.id] += [delta.step] * len(delta.token_ids)
            if delta.finish_reason is not None or delta.error is not None:
                assert delta.finish_reason is None or delta.error is None
                self.endings[delta.id] = delta

    def said(self, name: str) -> tuple[tuple[int, ...], FinishReason | None]:
        """Output and ending of one sequence."""
        sequence_id = SequenceId(name)
        return tuple(self.tokens[sequence_id]), self.endings[sequence_id].finish_reason


def run(
    engine: LocalEngine,
    requests: Iterable[SequenceRequest] = (),
    *,
    max_steps: int = 20_000,
    each_step: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """Add the requests and step until nothing is left to do.

    each_step: called before every step with the number of steps done.
    """
    for one in requests:
        engine.add(one)
    outcome = Outcome()
    for step in range(max_steps):
        each_step(step)
        if not engine.has_work():
            return outcome
        outcome.take(engine.step())
    raise AssertionError(f"still at work after {max_steps} steps")


def run_alone(one: SequenceRequest, **options: object) -> tuple[tuple[int, ...], FinishReason | None]:
    """What a sequence says in an engine of its own: roomy, no prefix cache, no chunks."""
    engine = LocalEngine(settings(enable_prefix_caching=False, max_num_batched_tokens=100_000, **options), HashModel())
    return run(engine, [one]).said(one.id)

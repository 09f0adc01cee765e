"""What the engine asks of its neighbours (`ModelRunner`, `TextRules`), and what it offers them (`Engine`).

Plain values only: nothing here is shared between threads or tied to a process.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any, Protocol

from jitney_worker.engine.movements import Movement
from jitney_worker.engine.sequence import FinishReason, Pooling, Sequence, SequenceId, SequenceRequest


@dataclass(slots=True)
class ScheduledSequence:
    """Tokens [start, stop) of one sequence are computed in this step; earlier ones are in the cache.

    samples: stop == num_tokens, so the logits at stop - 1 choose the next token. num_prompt_logprobs: if not None,
    the log probabilities of all prompt tokens from start + 1 to stop are wanted, with so many others. mask: if not
    None, the tokens that may be sampled, bit i % 8 of byte i // 8 for token i. pooling: if not None, the hidden states
    of these tokens go into an embedding; pooled is what the runner gave back for the tokens before start.
    The runner reads `sequence.token_ids` and `sequence.block_table` and changes neither.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: bool
    num_prompt_logprobs: int | None = None
    mask: bytes | None = None
    pooling: Pooling | None = None
    pooled: bytes = b""

    @property
    def is_pooled(self) -> bool:
        """True if the embedding is whole after this step."""
        return self.pooling is not None and self.stop == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first `num_tokens` tokens of block `source` are copied to block `target`; the rest of it becomes zeros.

    A mask does not stop a NaN that stands where nobody has written yet: 0 * NaN = NaN.
    """

    source: int
    target: int
    num_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step: who computes what. Falsy when there is nothing to do.

    copies: made before anything is computed. If the step fails they come again with the next one.
    """

    step: int
    scheduled: list[ScheduledSequence]
    num_tokens: int
    preempted: list[SequenceId] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the unfiltered distribution (temperature 1).

    top: the k most probable (token id, logprob), most probable first. rank: of a prompt's token, how many tokens are
    at least as probable, itself included; None of tokens that were sampled.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RowFailure:
    """This row's logits cannot be sampled from (NaN, +Inf, or nothing but −Inf). Only its sequence fails."""

    code: str
    message: str


@dataclass(slots=True)
class ModelOutput:
    """rows: one for each scheduled sequence that samples, in the order of `SchedulerOutput.scheduled`.

    prompt_logprobs: for each sequence that wants them, those of this step's part of its prompt.
    pooled: for each sequence that is pooled, its embedding if that is whole now: float32, little-endian, of length one.
    Before that, what the runner wants to see again with the tokens that follow.
    """

    rows: list[Sampled | RowFailure]
    prompt_logprobs: dict[SequenceId, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[SequenceId, bytes | RowFailure] = field(default_factory=dict)


class ModelRunner(Protocol):
    """Computes a step: copies blocks, writes K and V of every scheduled token, samples or pools where a row asks it to.

    A runner that cannot pool is given no sequence that asks for it: the worker's limits say so.
    """

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput: ...


class TextRules(Protocol):
    """Stop strings and structures, for the sequences that have them. Called on the engine thread."""

    def start(self, sequence_id: SequenceId, output_ids: ListLike[int]) -> None:
        """A sequence enters, with the output it already has. Its rules were registered beforehand."""
        ...

    def advance(self, sequence_id: SequenceId, token_id: int) -> FinishReason | None:
        """One more token; the reason if it ends the sequence. Not called for a token that is a stop token id."""
        ...

    def mask(self, sequence_id: SequenceId) -> bytes | None:
        """The tokens that may come next, as in `ScheduledSequence`; asked once a step for those with a structure."""
        ...

    def failure(self, sequence_id: SequenceId) -> str | None:
        """Why the mask holds no token; None if that is not the structure's doing."""
        ...

    def drop(self, sequence_id: SequenceId) -> None:
        """The sequence has left."""
        ...


@dataclass(slots=True)  # frozen, making one for each seat would be a third of what a step costs outside the model
class SequenceDelta:
    """What one sequence gained in one step, or how it ended.

    Exactly one of `finish_reason` and `error` is set on a sequence's last delta, neither before.
    num_cached_tokens: prompt tokens served from the prefix cache at its first admission.
    prompt_logprobs: with its first token, if it wants them: of its prompt's tokens from the second one on.
    embedding: on the last delta, the only one, of a sequence that is pooled; as in `ModelOutput.pooled`.
    """

    id: SequenceId
    step: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: RowFailure | None = None
    num_cached_tokens: int = 0
    joined_step: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: bytes | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much room there is now. `free_seats` counts what running and waiting sequences leave over.

    waiting_band: of the first one that waits; None if nobody does.
    """

    free_seats: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    waiting_band: int | None = None

    @property
    def room(self) -> tuple[int, int, int | None]:
        """What decides whether more may be taken."""
        return self.free_seats, self.num_waiting, self.waiting_band


@dataclass(frozen=True, slots=True)
class Seat:
    """One line of a snapshot: a running sequence."""

    id: SequenceId
    joined_step: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_output_tokens: int


@dataclass(frozen=True, slots=True)
class CacheView:
    """The KV blocks at a glance. cached: free, with content that a prompt may hit; shared: used by several.

    sample: as `BlockManager.sample`.
    """

    num_cached: int = 0
    num_shared: int = 0
    sample: str = ""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The batch as it stands after a step, for pages and `top`.

    num_displacements: of the preemptions, those for somebody of a more urgent band who came in.
    num_prefill_tokens, num_decode_tokens: what the last step's budget went into. movements: since the snapshot before.
    """

    step: int
    seats: tuple[Seat, ...]
    capacity: Capacity
    num_preemptions: int
    num_displacements: int
    num_generated_tokens: int
    num_computed_tokens: int
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    movements: tuple[Movement, ...] = ()
    cache: CacheView = CacheView()


class Engine(Protocol):
    """What the runtime sees of an engine. One thread calls it; nothing awaits."""

    @property
    def features(self) -> dict[str, Any]:
        """Facts for the worker's heartbeat: max_num_seqs, max_model_len, num_blocks, policy and so on."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens computed since the start. A step that leaves it as it was, and ends nobody, was no progress."""
        ...

    def capacity(self) -> Capacity: ...

    def check_fits(self, request: SequenceRequest) -> None:
        """Raise PromptTooLong (with the numbers) or InvalidJob for what can never run. Callable from any thread.

        A `max_tokens` beyond the model's context is capped, not refused; one beyond the cache is refused.
        """
        ...

    def add(self, request: SequenceRequest) -> None:
        """Take a sequence in; it joins at the next step that has room. Raises as `check_fits`.

        ValueError if its id is here already. If its output is whole, the next step returns its ending alone.
        """
        ...

    def abort(self, sequence_id: SequenceId) -> bool:
        """Drop a sequence and free its blocks at once. False if it is unknown (already gone)."""
        ...

    def has_work(self) -> bool: ...

    def step(self) -> list[SequenceDelta]:
        """Run one iteration; what each sequence gained. What the model raises passes through, nothing committed."""
        ...

    def snapshot(self) -> EngineSnapshot: ...

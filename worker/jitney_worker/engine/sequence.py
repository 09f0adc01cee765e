"""A sequence: a run of token ids that asks to be continued, and how far it has been computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NewType

from jitney.keys import BANDS

SequenceId = NewType("SequenceId", str)
"""One choice of one claim of a job, named by whoever adds it: a job with n = 4 has four."""

FinishReason = Literal["stop", "length"]
Pooling = Literal["last", "mean"]
OrderKey = tuple[int, float, int, int]
"""(band, tenant's virtual time, priority, arrival): lower runs sooner, the last one is preempted first."""
BULK: Final = BANDS.index("bulk")
"""The band in which nobody waits for words."""
Rank = tuple[OrderKey, int]
"""(order key, number of the sequence in this engine): no two are equal."""


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What changes the logits before a token is chosen, named as in vLLM; each default changes nothing.

    allowed_token_ids: nothing else is chosen; empty = everything may be.
    bad_words: token sequences; the last token of one is not chosen where the output ends in those before it.
    logit_bias: (token id, what is added to its logit), each id once.
    repetition_penalty: divides positive logits and multiplies others, of tokens that prompt or output hold.
    frequency_penalty: taken off once for each time the output holds the token; presence_penalty: once if it does.
    """

    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """What the engine and the sampler must know of a job's options; everything resolved, nothing optional.

    max_tokens: output tokens at most, those of earlier attempts included. min_tokens: so many come before any
    ending but `length`: neither a stop token nor a stop string among them ends the sequence.
    stop_token_ids: ids that end the sequence (the model's own end tokens are in it unless they are ignored).
    eos_token_ids: the model's own end tokens. min_tokens holds them off also where they are ignored, as vLLM does.
    num_logprobs: None = none; k = the chosen token's log probability and the k most probable ones.
    num_prompt_logprobs: the same for the prompt's tokens, from the second one on.
    has_stop_strings: True if `TextRules` must look at every new token.
    has_structure: it must do that too, and says which tokens may come next.
    rules: None if the logits are taken as they are.
    pooling: nothing is sampled: the sequence ends with its prompt, and what it gives is an embedding.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None
    has_stop_strings: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    num_prompt_logprobs: int | None = None
    rules: LogitRules | None = None
    has_structure: bool = False
    pooling: Pooling | None = None

    @property
    def needs_text_rules(self) -> bool:
        return self.has_stop_strings or self.has_structure


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """A sequence on its way into the engine. `output_ids` are the tokens of earlier attempts.

    group: name of the job whose choices share this prompt and salt; they share its blocks too. Empty = nobody does.
    """

    id: SequenceId
    prompt_ids: tuple[int, ...]
    params: SequenceParams
    order_key: OrderKey
    output_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    group: str = ""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine. Only the scheduler and the block manager write to it.

    token_ids: prompt and output. num_computed_tokens: how many of them have their K and V in the cache;
    it chases len(token_ids), and prefill, decode, resumption and recomputation are all that one difference.
    max_num_tokens: prompt and output at most, set on entry. arrival: how many sequences entered before it.
    block_keys: chained hash of each full block, kept for ever, since tokens never change. block_serials: which
    cached content each block of the table equals, for as long as the table lasts; both belong to `BlockManager`.
    """

    request: SequenceRequest
    token_ids: list[int]
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    joined_step: int | None = None
    num_preemptions: int = 0
    max_num_tokens: int = 0
    arrival: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    block_serials: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: SequenceRequest) -> Sequence:
        return cls(request, [*request.prompt_ids, *request.output_ids])

    @property
    def id(self) -> SequenceId:
        return self.request.id

    @property
    def params(self) -> SequenceParams:
        return self.request.params

    @property
    def order_key(self) -> OrderKey:
        return self.request.order_key

    @property
    def band(self) -> int:
        """0 is the most urgent: it takes seats and blocks from those above it."""
        return self.request.order_key[0]

    @property
    def rank(self) -> Rank:
        """Total order of the engine: equal order keys (choices of one job) go by entry, once and for all."""
        return (self.request.order_key, self.arrival)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

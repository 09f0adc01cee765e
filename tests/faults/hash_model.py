"""A model that is a hash of everything before each token, and of the seed: what it says alone needs no engine.

On top of `HashModel`'s checks of the KV cache, whose every position is read back before a token is drawn. It has no
logits for options to change: what they forbid, or make less probable, it passes over.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass

from tests.engine.scripted_model import HashModel, prefix_hash

from jitney_worker.engine.protocol import RowFailure, Sampled, ScheduledSequence, TokenLogprobs
from jitney_worker.engine.sequence import Sequence, SequenceParams

CRASH, HANG, NAN = 509, 510, 511
"""Token ids that no model says. In a prompt they are the poison of the fault of that name."""

NUM_SAID = 509
MAX_MODEL_LEN = 512


def digest_of(token_ids: Iterable[int]) -> int:
    digest = 0
    for token_id in token_ids:
        digest = prefix_hash(digest, token_id)
    return digest


@dataclass(frozen=True, slots=True)
class Dice:
    """What a draw depends on besides the prefix. Greedy: on nothing; otherwise on the seed and the choice."""

    temperature: float
    seed: int
    choice: int

    @classmethod
    def of(cls, params: SequenceParams) -> Dice:
        return cls(params.temperature, params.seed, params.choice)


def draw(digest: int, dice: Dice, position: int, passed_over: Container[int] = ()) -> int:
    """The next token: of those that a prefix, and the dice with a position, bring up in turn, the first allowed one."""
    own = "" if dice.temperature == 0 else f"{dice.seed} {dice.choice} {position}"
    for turn in itertools.count():
        words = f"{digest} {own} {turn}"
        token_id = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest()) % NUM_SAID
        if token_id not in passed_over:
            return token_id
    raise AssertionError


def passed_over(sequence: Sequence) -> set[int]:
    """What the options of a sequence forbid as its next token, by what it has said: earlier attempts' tokens, too."""
    params, num_prompt_tokens = sequence.params, len(sequence.request.prompt_ids)
    output = tuple(sequence.token_ids[num_prompt_tokens:])
    over = set(params.stop_token_ids) if len(output) < params.min_tokens else set()
    rules = params.rules
    if rules is None:
        return over
    over |= {token_id for token_id, bias in rules.logit_bias if bias < 0}
    over |= {word[-1] for word in rules.bad_words if output[len(output) - len(word) + 1 :] == word[:-1]}
    if rules.presence_penalty > 0:
        over |= set(output)
    if rules.frequency_penalty > 0:
        over |= {token_id for token_id, count in Counter(output).items() if count > 1}
    if rules.repetition_penalty > 1:
        over |= {*output, *sequence.request.prompt_ids}
    return over


def logprob_of(token_id: int) -> float:
    return -(token_id + 1) / 64


@dataclass
class SeededHashModel(HashModel):
    """A runner. salt: another value is another model. nan_at: a row whose prompt holds NAN fails with this output."""

    salt: int = 0
    nan_at: int = 3

    def _sample(self, item: ScheduledSequence) -> Sampled | RowFailure:
        super()._sample(item)
        sequence = item.sequence
        if NAN in sequence.request.prompt_ids and sequence.num_output_tokens >= self.nan_at:
            return RowFailure("nan_logits", "the logits are not numbers")
        # The cache holds digests without salt; the salt is mixed in where a token is drawn.
        _, _, digest = self.cache[self._slot(item, item.stop - 1)]
        dice = Dice.of(sequence.params)
        token_id = draw(digest ^ self.salt, dice, sequence.num_output_tokens, passed_over(sequence))
        wanted = sequence.params.num_logprobs is not None
        return Sampled(token_id, TokenLogprobs(logprob_of(token_id)) if wanted else None)

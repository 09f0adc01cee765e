"""A model that is a hash of everything before each token, and of the seed: what it says alone needs no engine.

On top of `HashModel`'s checks of the KV cache, whose every position is read back before a token is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from tests.engine.scripted_model import HashModel, prefix_hash

from jitney_worker.engine.protocol import RowFailure, Sampled, ScheduledSequence, TokenLogprobs
from jitney_worker.engine.sequence import SequenceParams

CRASH, HANG, NAN = 509, 510, 511
"""Token ids that no model says. In a prompt they are the poison of the fault of that name."""

NUM_SAID = 509
MAX_MODEL_LEN = 512


def digest_of(token_ids: Iterable[int]) -> int:
    digest = 0
    for token_id in token_ids:
        digest = prefix_hash(digest, token_id)
    return digest


def draw(digest: int, params: SequenceParams, position: int) -> int:
    """The next token. Greedy: from the prefix alone; otherwise from the prefix, the seed and the position."""
    if params.temperature == 0:
        return (digest >> 17) % NUM_SAID
    words = f"{digest} {params.seed} {params.choice} {position}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest()) % NUM_SAID


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
        token_id = draw(digest ^ self.salt, sequence.params, sequence.num_output_tokens)
        wanted = sequence.params.num_logprobs is not None
        return Sampled(token_id, TokenLogprobs(logprob_of(token_id)) if wanted else None)

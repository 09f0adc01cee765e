"""From the engine's sequences to the sampler's rows, with what their logits processors remember between steps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jitney_worker.engine.protocol import ScheduledSequence
from jitney_worker.engine.sequence import LogitRules, Sequence, SequenceId
from jitney_worker.model.noise import noise_key
from jitney_worker.model.processors import Bias, Edits, Penalties
from jitney_worker.model.sampler import SamplingRow
from jitney_worker.model.tally import Ids, Tally


def sampling_row(scheduled: ScheduledSequence, edits: Edits | None = None) -> SamplingRow:
    """What the sampler must know; the token drawn now will stand at index `stop`."""
    params = scheduled.sequence.params
    key = 0 if params.temperature == 0.0 else noise_key(params.seed, params.choice, scheduled.stop)
    return SamplingRow(params.temperature, params.top_k, params.top_p, key, params.num_logprobs, params.min_p, edits)


class SamplingRows:
    """Makes the rows of each step. Sequences without logits processors leave nothing here.

    What is kept of a sequence is forgotten as soon as a step goes by that does not sample it (it has ended, was
    preempted, or its output is computed again): nothing has to be told, and what returns is counted anew.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._kept: dict[SequenceId, _Processors] = {}

    def of(self, scheduled: Iterable[ScheduledSequence]) -> list[SamplingRow]:
        """One row for each sequence that samples, in order."""
        kept: dict[SequenceId, _Processors] = {}
        rows = []
        for one in scheduled:
            if one.samples:
                params = one.sequence.params
                holds_off = one.stop < one.sequence.num_prompt_tokens + params.min_tokens
                has_edits = params.rules is not None or holds_off or one.mask is not None
                rows.append(sampling_row(one, self._edits(one, kept) if has_edits else None))
        self._kept = kept
        return rows

    def _edits(self, scheduled: ScheduledSequence, kept: dict[SequenceId, _Processors]) -> Edits:
        sequence = scheduled.sequence
        processors = self._kept.get(sequence.id)
        if processors is None or processors.sequence is not sequence:
            processors = _Processors(sequence, self._vocab_size)
        kept[sequence.id] = processors
        return processors.edits(scheduled.mask)


class _Processors:
    """The logits processors of one sequence: what never changes, and a tally that grows with it.

    Ids beyond the vocabulary (a tokenizer may have more end tokens than the model has logits) are left out.
    """

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self.sequence = sequence
        self._vocab_size = vocab_size
        rules = sequence.params.rules or LogitRules()
        held_off = sequence.params.stop_token_ids | sequence.params.eos_token_ids
        self._end_ids = tuple(token_id for token_id in held_off if 0 <= token_id < vocab_size)
        self._allowed = self._allowed_by(rules)
        self._bad_words = tuple(word for word in rules.bad_words if word and word[-1] < vocab_size)
        self._bias = self._bias_of(rules)
        self._penalties = self._penalties_of(rules)

    def edits(self, mask: bytes | None) -> Edits:
        """What is to be done for the token that comes next. mask: what a structure allows."""
        if self._penalties is not None:
            self._penalties.tally.advance(self.sequence.token_ids)
        return Edits(self._allowed, self._forbidden(), self._bias, self._penalties, mask)

    def _forbidden(self) -> Ids | None:
        token_ids = [word[-1] for word in self._bad_words if self._output_ends_in(word[:-1])]
        if self.sequence.num_output_tokens < self.sequence.params.min_tokens:
            token_ids += self._end_ids
        return np.array(token_ids, dtype=np.int64) if token_ids else None

    def _output_ends_in(self, beginning: tuple[int, ...]) -> bool:
        """True for an empty one. Only the output counts: a word may begin in it, not in the prompt."""
        if len(beginning) > self.sequence.num_output_tokens:
            return False
        return not beginning or tuple(self.sequence.token_ids[-len(beginning) :]) == beginning

    def _bias_of(self, rules: LogitRules) -> Bias | None:
        bias = {token_id: value for token_id, value in rules.logit_bias if token_id < self._vocab_size}
        if not bias:
            return None
        return Bias(np.array([*bias], dtype=np.int64), np.array([*bias.values()], dtype=np.float64))

    def _penalties_of(self, rules: LogitRules) -> Penalties | None:
        repetition, frequency, presence = rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty
        if (repetition, frequency, presence) == (1.0, 0.0, 0.0):
            return None
        tally = Tally(num_prompt=self.sequence.num_prompt_tokens, counts_prompt=repetition != 1.0)
        return Penalties(tally, repetition, frequency, presence)

    def _allowed_by(self, rules: LogitRules) -> Ids | None:
        if not rules.allowed_token_ids:
            return None
        known = [token_id for token_id in rules.allowed_token_ids if token_id < self._vocab_size]
        return np.array(known, dtype=np.int64)

"""From a delivery to a running job: decode, tokenise, check against the model, rebuild what was said before.

Everything is checked here again although API and client checked it: anyone may write to Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from jitney.errors import InvalidJob, PromptTooLong, StreamLost
from jitney.keys import BANDS
from jitney.messages import Event, FinishReason, JobSpec
from jitney.queue import Delivery, Queue, unpack_ids
from jitney_worker.engine.sequence import SequenceParams, SequenceRequest
from jitney_worker.runtime.running import Choice, RunningJob, SpellsLogprobs, sequence_id
from jitney_worker.text.spelling import Speller
from jitney_worker.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a job is held against. max_sequence_len: prompt and answer together, what the KV pool can hold."""

    vocab_size: int
    max_model_len: int
    max_sequence_len: int
    eos_token_ids: frozenset[int]


class Intake:
    """Makes running jobs out of deliveries. Tokenising runs in a pool, off the event loop."""

    def __init__(
        self,
        queue: Queue,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        check_fits: Callable[[SequenceRequest], None],
        spell_logprobs: SpellsLogprobs,
        pool: Executor,
    ) -> None:
        self._queue = queue
        self._tokenizer = tokenizer
        self._limits = limits
        self._check_fits = check_fits
        self._spell_logprobs = spell_logprobs
        self._pool = pool

    async def prepare(self, delivery: Delivery, spec: JobSpec) -> RunningJob:
        """The job, ready to be added. Raises InvalidJob for what can never run."""
        prompt_ids = await self._prompt_ids(delivery, spec)
        past = await self._past(delivery)
        params = self._params(spec, self._max_tokens(spec, len(prompt_ids), past))
        request = SequenceRequest(
            sequence_id(delivery, 0),
            prompt_ids,
            params,
            (BANDS.index(delivery.band), delivery.virtual_time, spec.priority, delivery.at_ms),
            output_ids=past.token_ids,
            cache_salt=f"{delivery.tenant}/{spec.cache_salt}",
        )
        self._check_fits(request)
        speller = Speller(self._tokenizer, spec.sampling.stop, params.stop_token_ids)
        speller.replay(past.token_ids)
        choice = Choice(request, speller, len(past.token_ids), len(past.token_ids))
        if past.finish_reason is not None:
            choice.finish_reason, choice.finish_is_logged = past.finish_reason, True
        return RunningJob(delivery, spec, prompt_ids, [choice], delivery.seq + 1, self._spell_logprobs)

    async def _prompt_ids(self, delivery: Delivery, spec: JobSpec) -> tuple[int, ...]:
        if delivery.prompt_ids is not None:
            return unpack_ids(delivery.prompt_ids)
        if isinstance(spec.prompt, tuple):
            ids = spec.prompt
        else:
            loop = asyncio.get_running_loop()
            ids = tuple(await loop.run_in_executor(self._pool, self._tokenize, spec))
        self._check_ids(ids, spec)
        return ids

    def _tokenize(self, spec: JobSpec) -> list[int]:
        if spec.messages is not None:
            return self._tokenizer.encode_chat(spec.messages)
        assert isinstance(spec.prompt, str)
        return self._tokenizer.encode_prompt(spec.prompt)

    def _check_ids(self, ids: tuple[int, ...], spec: JobSpec) -> None:
        limits = self._limits
        field = "messages" if spec.messages is not None else "prompt"
        if not ids:
            raise InvalidJob(f"{field} holds no tokens for this model: say something", param=field)
        if len(ids) >= limits.max_model_len:
            raise PromptTooLong(len(ids), limits.max_model_len - 1, what=f"the {field}", param=field)
        for name, given in ((field, ids), ("stop_token_ids", spec.sampling.stop_token_ids)):
            for token_id in given:
                if not 0 <= token_id < limits.vocab_size:
                    raise InvalidJob(
                        f"{name} holds token id {token_id}; this model's ids are 0 to {limits.vocab_size - 1}",
                        param=name,
                    )

    def _max_tokens(self, spec: JobSpec, num_prompt_tokens: int, past: Past) -> int:
        """How long the answer may get, what earlier owners said included.

        A job that names no limit may use the rest of the queue's context, or of this worker's cache where that
        is smaller: otherwise a small cache would refuse every chat. Who begins the answer chooses, and says so
        in `started`: a later owner with a larger cache must not end it elsewhere. One with a smaller cache
        ends it as `length` where its cache ends.
        """
        limits, asked = self._limits, spec.sampling.max_tokens
        if asked is not None:
            return min(asked, limits.max_model_len - num_prompt_tokens)
        fits_here = max(1, limits.max_sequence_len - num_prompt_tokens)
        return fits_here if past.max_tokens is None else min(fits_here, past.max_tokens)

    def _params(self, spec: JobSpec, max_tokens: int) -> SequenceParams:
        sampling = spec.sampling
        own_ends = frozenset() if sampling.ignore_eos else self._limits.eos_token_ids
        return SequenceParams(
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(0, sampling.top_k),
            seed=sampling.seed or 0,
            stop_token_ids=own_ends | frozenset(sampling.stop_token_ids),
            num_logprobs=sampling.logprobs,
            has_stop_strings=bool(sampling.stop),
        )

    async def _past(self, delivery: Delivery) -> Past:
        """What earlier attempts said, from the log. Raises StreamLost if the log is not there."""
        token_ids: list[int] = []
        finish_reason: FinishReason | None = None
        max_tokens: int | None = None
        cursor = 0
        while cursor < delivery.seq:
            payloads = await self._queue.read_log(delivery.id, cursor)
            if not payloads:
                raise StreamLost(f"the log of {delivery.id} ends at {cursor}, before seq {delivery.seq}")
            for event in map(Event.decode, payloads):
                token_ids.extend(event.token_ids)
                finish_reason = event.finish_reason or finish_reason
                max_tokens = max_tokens or event.max_tokens
                cursor = event.seq
        return Past(tuple(token_ids), finish_reason, max_tokens)


@dataclass(frozen=True, slots=True)
class Past:
    """Tokens that are in the log already, and how the choice ended if it did.

    max_tokens: what the first owner chose for a job that named no limit.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    max_tokens: int | None

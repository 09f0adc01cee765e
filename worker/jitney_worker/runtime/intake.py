"""From a delivery to a running job: decode, tokenise, check against the model, rebuild what was said before.

Everything is checked here again although API and client checked it: anyone may write to Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TypeVar

from jitney.call_formats import CallTerms
from jitney.errors import InvalidJob, PromptTooLong, StreamLost
from jitney.forced_calls import refusing_by_name
from jitney.keys import BANDS
from jitney.messages import Event, JobSpec
from jitney.queue import Delivery, Queue, unpack_ids
from jitney_worker.engine.sequence import SequenceRequest
from jitney_worker.runtime.choice import Choice, SpellsLogprobs, sequence_id
from jitney_worker.runtime.past import Past
from jitney_worker.runtime.running import RunningJob
from jitney_worker.runtime.wishes import (
    check_params,
    check_sampling,
    echoed,
    sequence_params,
    text_options,
    truncated,
)
from jitney_worker.text.bad_words import bad_word_ids
from jitney_worker.text.calls import with_calls
from jitney_worker.text.spelling import Speller
from jitney_worker.text.structures import Structures
from jitney_worker.text.tokenizer import Tokenizer

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a job is held against. max_sequence_len: prompt and answer together, what the KV pool can hold.

    hidden_size: numbers of an embedding; 0 if the runner gives none.
    """

    vocab_size: int
    max_model_len: int
    max_sequence_len: int
    eos_token_ids: frozenset[int]
    hidden_size: int = 0


class Intake:
    """Makes running jobs out of deliveries. Tokenising runs in a pool, off the event loop.

    structure_pool: another one, for jobs with a structure, which may take ten seconds to compile: nobody else waits.
    """

    def __init__(
        self,
        queue: Queue,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        check_fits: Callable[[SequenceRequest], None],
        spell_logprobs: SpellsLogprobs,
        pool: Executor,
        *,
        structures: Structures,
        structure_pool: Executor,
        fingerprint: str,
    ) -> None:
        self._queue = queue
        self._tokenizer = tokenizer
        self._limits = limits
        self._check_fits = check_fits
        self._spell_logprobs = spell_logprobs
        self._pool = pool
        self._structures = structures
        self._structure_pool = structure_pool
        self._fingerprint = fingerprint

    async def prepare(self, delivery: Delivery, spec: JobSpec) -> RunningJob:
        """The job, ready to be added. Raises InvalidJob for what can never run."""
        if spec.sampling.pooling is not None and self._limits.hidden_size == 0:
            raise InvalidJob("this worker's model gives no embeddings", param="model", code="no_embeddings")
        prompt_ids = await self._prompt_ids(delivery, spec)
        past = await self._past(delivery)
        spec, calls = with_calls(spec, self._tokenizer)
        # Words to tokenise, a structure to compile, a prompt or a log to spell: the loop must not wait for long work.
        sampling = spec.sampling
        if sampling.structured_outputs is not None:
            return await self._in_pool(self._structure_pool, self._job, delivery, spec, prompt_ids, past, calls)
        if sampling.bad_words or sampling.echo or delivery.seq:
            return await self._in_pool(self._pool, self._job, delivery, spec, prompt_ids, past, calls)
        return self._job(delivery, spec, prompt_ids, past, calls)

    def _job(
        self, delivery: Delivery, spec: JobSpec, prompt_ids: tuple[int, ...], past: Past, calls: CallTerms | None
    ) -> RunningJob:
        params = sequence_params(
            spec.sampling,
            max_tokens=self._max_tokens(spec, len(prompt_ids), past),
            eos_token_ids=self._limits.eos_token_ids,
            bad_words=bad_word_ids(self._tokenizer, spec.sampling.bad_words),
        )
        check_params(params)
        first = SequenceRequest(
            sequence_id(delivery, 0),
            prompt_ids,
            params,
            (BANDS.index(delivery.band), delivery.virtual_time, spec.priority, delivery.at_ms),
            cache_salt=f"{delivery.tenant}/{spec.cache_salt}",
            group=f"{delivery.id}/{delivery.fence}" if spec.sampling.n > 1 else "",
        )
        self._check_fits(first)
        echo = echoed(self._tokenizer, spec, prompt_ids)
        choices = [self._choice(delivery, spec, first, past, number, echo) for number in range(spec.sampling.n)]
        return RunningJob(
            delivery, spec, prompt_ids, choices, delivery.seq + 1, self._spell_logprobs, self._fingerprint, calls
        )

    def _choice(
        self, delivery: Delivery, spec: JobSpec, first: SequenceRequest, past: Past, number: int, echo: str
    ) -> Choice:
        """The choice as it goes on after what is in the log. What the prompt is worth is said by choice 0, once."""
        said = past.choice(number)
        says_prompt = number == 0 and not said.token_ids
        params = replace(
            first.params,
            choice=number,
            num_prompt_logprobs=first.params.num_prompt_logprobs if says_prompt else None,
        )
        request = replace(first, id=sequence_id(delivery, number), params=params, output_ids=tuple(said.token_ids))
        options = text_options(spec, first.prompt_ids)
        speller = Speller(self._tokenizer, spec.sampling.stop, params.stop_token_ids, options)
        speller.replay(said.token_ids)
        choice = Choice(request, speller, len(said.token_ids), len(said.token_ids))
        if not said.token_ids:
            choice.echo = echo
        if said.finish_reason is not None:
            choice.finish_reason, choice.finish_is_logged = said.finish_reason, True
        elif spec.sampling.structured_outputs is not None:
            with refusing_by_name("tools") if spec.tool_use is not None else contextlib.nullcontext():
                choice.structure = self._structures.begin(spec.sampling.structured_outputs, said.token_ids)
        return choice

    async def _prompt_ids(self, delivery: Delivery, spec: JobSpec) -> tuple[int, ...]:
        if delivery.prompt_ids is not None:
            ids = _stored_ids(delivery.prompt_ids)
        elif isinstance(spec.prompt, tuple):
            ids = spec.prompt
        else:
            ids = tuple(await self._in_pool(self._pool, self._tokenize, spec))
        if delivery.prompt_ids is None:
            ids = truncated(ids, spec.sampling, max_sequence_len=self._limits.max_sequence_len)
        self._check_ids(ids, spec)
        return ids

    async def _in_pool(self, pool: Executor, call: Callable[..., Made], *args: object) -> Made:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *args)

    def _tokenize(self, spec: JobSpec) -> list[int]:
        if spec.messages is not None:
            return self._tokenizer.encode_chat(spec.messages, spec.tool_use, **spec.chat_end)
        assert isinstance(spec.prompt, str)
        return self._tokenizer.encode_prompt(spec.prompt)

    def _check_ids(self, ids: tuple[int, ...], spec: JobSpec) -> None:
        limits = self._limits
        field = "messages" if spec.messages is not None else "prompt"
        if not ids:
            raise InvalidJob(f"{field} holds no tokens for this model: say something", param=field)
        if len(ids) >= limits.max_model_len:
            raise PromptTooLong(len(ids), limits.max_model_len - 1, what=f"the {field}", param=field)
        for token_id in ids:
            if not 0 <= token_id < limits.vocab_size:
                raise InvalidJob(
                    f"{field} holds token id {token_id}; this model's ids are 0 to {limits.vocab_size - 1}", param=field
                )
        check_sampling(spec.sampling, num_prompt_tokens=len(ids), vocab_size=limits.vocab_size)

    def _max_tokens(self, spec: JobSpec, num_prompt_tokens: int, past: Past) -> int:
        """How long the answer may get, what earlier owners said included.

        A job that names no limit may use the rest of the queue's context, or of this worker's cache where that
        is smaller: otherwise a small cache would refuse every chat. Who begins the answer chooses, and says so
        in `started`: a later owner with a larger cache must not end it elsewhere. One with a smaller cache
        ends it as `length` where its cache ends. An embedding needs room for its prompt alone.
        """
        limits, asked = self._limits, spec.sampling.max_tokens
        if asked is not None:
            return min(asked, limits.max_model_len - num_prompt_tokens)
        if spec.sampling.pooling is not None:
            return 1
        fits_here = max(1, limits.max_sequence_len - num_prompt_tokens)
        return fits_here if past.max_tokens is None else min(fits_here, past.max_tokens)

    async def _past(self, delivery: Delivery) -> Past:
        """What earlier attempts said, from the log. Raises StreamLost if the log is not there."""
        past = Past()
        cursor = 0
        while cursor < delivery.seq:
            payloads = await self._queue.read_log(delivery.id, cursor)
            if not payloads:
                raise StreamLost(f"the log of {delivery.id} ends at {cursor}, before seq {delivery.seq}")
            for payload in payloads:
                event = self._logged(delivery, payload, cursor + 1)
                past.add(event)
                cursor = event.seq
        return past

    def _logged(self, delivery: Delivery, payload: bytes, seq: int) -> Event:
        """The event in a log's entry. Raises StreamLost for anything else: it would be a fault of the whole batch."""
        vocab_size = self._limits.vocab_size
        try:
            event = Event.decode(payload)
            is_ours = event.seq == seq and all(0 <= token_id < vocab_size for token_id in event.token_ids)
        except (ValueError, KeyError, TypeError, AttributeError):
            is_ours = False
        if not is_ours:
            raise StreamLost(f"the log of {delivery.id} holds something that no worker wrote at event {seq}")
        return event


def _stored_ids(packed: bytes) -> tuple[int, ...]:
    try:
        return unpack_ids(packed)
    except struct.error:
        raise InvalidJob(f"the stored prompt is {len(packed)} bytes: no whole ids", code="undecodable") from None

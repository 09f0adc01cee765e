"""From a caller's keywords to what a queue takes: split, validate, compare with the queue's card."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any, Final

from jitney.cards import QueueCard, list_aliases, list_cards, read_card
from jitney.connection import Redis
from jitney.errors import InvalidJob, PromptTooLong, UnknownQueue
from jitney.keys import JobId
from jitney.messages import JobSpec, RetryPolicy
from jitney.records import Entry
from jitney.sampling import SamplingParams, sampling_params

RESULT_TTL_S: Final = 3_600
BULK_RESULT_TTL_S: Final = 86_400
MAX_IDEMPOTENCY_KEY_BYTES: Final = 256

_SAMPLING_FIELDS: Final = frozenset(SamplingParams.model_fields)
_JOB_FIELDS: Final = frozenset(JobSpec.model_fields)


def spec_from(options: dict[str, Any]) -> JobSpec:
    """The job that flat keywords ask for: each belongs to SamplingParams or to JobSpec; None means absent.

    `sampling=SamplingParams(...)` may stand for the sampling keywords, not beside them.
    Raises InvalidJob that names the field, also for a field that nobody knows: it may be a slip of the pen.
    """
    given = {name: value for name, value in options.items() if value is not None}
    unknown = sorted(given.keys() - _SAMPLING_FIELDS - _JOB_FIELDS)
    if unknown:
        raise InvalidJob(f"unknown field {unknown[0]}", param=unknown[0], code="unknown_field")
    sampling = {name: value for name, value in given.items() if name in _SAMPLING_FIELDS}
    fields = {name: value for name, value in given.items() if name not in _SAMPLING_FIELDS}
    if sampling and "sampling" in fields:
        field = min(sampling)
        raise InvalidJob(f"{field} is given beside sampling: put it inside", param=field)
    if sampling:
        fields["sampling"] = sampling_params(**sampling)
    return JobSpec.build(fields)


async def find_card(redis: Redis, name: str) -> tuple[str, QueueCard]:
    """The queue that `name` means and its card: a queue, an alias, or the model that a queue serves.

    An empty name means the only queue there is. Raises UnknownQueue, and InvalidJob when there are several.
    """
    if name and _is_text(name):
        with contextlib.suppress(UnknownQueue):
            return await read_card(redis, name)
    cards = await list_cards(redis)
    matching = [queue for queue, card in cards.items() if name in ("", card.model)]
    if len(matching) == 1:
        return matching[0], cards[matching[0]]
    if not matching:
        raise UnknownQueue(name, [*cards, *await list_aliases(redis)])
    names = ", ".join(matching)
    if name:
        raise InvalidJob(f"model {name!r} is served by several queues; name one of them: {names}", param="model")
    raise InvalidJob(f"name a queue or a model; this server has {names}", param="model")


def _is_text(name: str) -> bool:
    """False for half a surrogate pair, which no key can be made of."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_against(card: QueueCard, spec: JobSpec) -> None:
    """What only the queue's model can tell. Raises InvalidJob or PromptTooLong; the worker checks it all again."""
    sampling = spec.sampling
    if sampling.pooling is not None and card.hidden_size == 0:
        raise InvalidJob(
            f"model {card.model} gives no embeddings: its workers are too old, or have no hidden states to give",
            param="model",
            code="no_embeddings",
        )
    prompt_ids = spec.prompt if isinstance(spec.prompt, tuple) else ()
    named_ids = {
        "prompt": prompt_ids,
        "stop_token_ids": sampling.stop_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "logit_bias": tuple(sampling.logit_bias),
    }
    for name, token_ids in named_ids.items():
        highest = max(token_ids, default=0)
        if highest >= card.vocab_size:
            raise InvalidJob(
                f"{name} holds token id {highest}; the model's ids end at {card.vocab_size - 1}", param=name
            )
    if len(prompt_ids) > card.max_model_len and sampling.truncate_prompt_tokens is None:
        raise PromptTooLong(len(prompt_ids), card.max_model_len, what="the prompt")


def check_prompt(card: QueueCard, spec: JobSpec, num_prompt_tokens: int, *, limit: str | None) -> None:
    """What only the prompt's length can tell. num_prompt_tokens: what is left of it after truncation.

    limit: the name under which the caller gave `max_tokens`; None when they left it to us, and it ends where the
    context does. Raises PromptTooLong; the worker checks the prompt again.
    """
    most = card.max_model_len
    field, what = ("prompt", "the prompt") if spec.messages is None else ("messages", "the chat")
    if num_prompt_tokens >= most:
        raise PromptTooLong(num_prompt_tokens, most - 1, what=what, param=field)
    num_wanted = num_prompt_tokens + (spec.sampling.max_tokens or 0)
    if limit is not None and num_wanted > most:
        what = f"{what} of {num_prompt_tokens} tokens with {limit}={spec.sampling.max_tokens}"
        raise PromptTooLong(num_wanted, most, what=what, param=limit)


def digest_of(spec: JobSpec) -> str:
    """What makes two submissions the same: everything asked for, before the seed is drawn.

    A trace's name differs between two sendings of one request, so it does not count.
    """
    return hashlib.sha256(spec.model_copy(update={"traceparent": None}).encode()).hexdigest()


def check_idempotency_key(key: str | None) -> str | None:
    """`key`, or InvalidJob."""
    if key is None:
        return None
    size = len(key.encode("utf-8", "surrogatepass"))
    if not 0 < size <= MAX_IDEMPOTENCY_KEY_BYTES:
        raise InvalidJob(
            f"idempotency_key is {size} bytes; 1 to {MAX_IDEMPOTENCY_KEY_BYTES} are allowed", param="idempotency_key"
        )
    return key


def entry_for(
    spec: JobSpec,
    *,
    job_id: JobId,
    card: QueueCard,
    idempotency_key: str | None,
    num_prompt_tokens: int | None = None,
) -> Entry:
    """What the script `enqueue` takes. The body carries a seed, drawn here when none was given.

    num_prompt_tokens: as the queue's own tokenizer counts them; None: estimated from the size.
    """
    return entry_of(
        spec,
        job_id=job_id,
        body=spec.seeded().encode(),
        digest=digest_of(spec),
        num_prompt_tokens=spec.estimate(card.bytes_per_token) if num_prompt_tokens is None else num_prompt_tokens,
        idempotency_key=check_idempotency_key(idempotency_key),
    )


def entry_of(
    spec: JobSpec,
    *,
    job_id: JobId,
    body: bytes,
    digest: str,
    num_prompt_tokens: int,
    idempotency_key: str | None = None,
) -> Entry:
    """The entry of a body that is already written, with what the queue itself must know of it."""
    bulk = spec.band == "bulk"
    attempts = spec.retry.max
    return Entry(
        id=job_id,
        body=body,
        digest=digest,
        band=spec.band,
        tenant=spec.tenant,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=spec.sampling.max_tokens,
        not_before=spec.not_before,
        deadline=spec.deadline,
        timeout_s=spec.timeout_s,
        queue_timeout_s=spec.queue_timeout_s,
        idempotency_key=idempotency_key,
        result_ttl_s=spec.result_ttl_s or (BULK_RESULT_TTL_S if bulk else RESULT_TTL_S),
        # The default is no wish: it would undo a worker's own, higher limit.
        max_attempts=None if attempts == RetryPolicy().max else attempts,
        keep_body=spec.keep_body,
        hook="" if spec.webhook is None else spec.webhook.hook("job" if spec.response is None else "response"),
    )

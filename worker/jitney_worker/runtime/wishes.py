"""What a job asks for, as the engine, the sampler and the speller take it. Pure values; checked against the model."""

from __future__ import annotations

from collections.abc import Iterator

from jitney.errors import InvalidJob
from jitney.messages import JobSpec
from jitney.sampling import SamplingParams
from jitney_worker.engine.sequence import LogitRules, SequenceParams
from jitney_worker.text.spelling import TextOptions
from jitney_worker.text.tokenizer import Tokenizer

MAX_PROMPT_LOGPROBS_ENTRIES = 16_384
"""Tokens that the log probabilities of one prompt may name: they travel in one event, of about a megabyte then."""

MAX_TOP_K = 2**31 - 1
"""More than any vocabulary, and the most that the kernels can count: 2**32 + 1 would be a top_k of 1 there."""

NO_RULES = LogitRules()


def sequence_params(
    sampling: SamplingParams, *, max_tokens: int, eos_token_ids: frozenset[int], bad_words: tuple[tuple[int, ...], ...]
) -> SequenceParams:
    """Of choice 0, which is also the one that says what the model thinks of the prompt."""
    own_ends = frozenset() if sampling.ignore_eos else eos_token_ids
    rules = LogitRules(
        allowed_token_ids=tuple(dict.fromkeys(sampling.allowed_token_ids or ())),
        bad_words=bad_words,
        logit_bias=tuple((token_id, bias) for token_id, bias in sampling.logit_bias.items() if bias),
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
    )
    return SequenceParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=min(max(0, sampling.top_k), MAX_TOP_K),
        min_p=sampling.min_p,
        seed=sampling.seed or 0,
        stop_token_ids=own_ends | frozenset(sampling.stop_token_ids),
        eos_token_ids=eos_token_ids,
        min_tokens=sampling.min_tokens,
        num_logprobs=sampling.logprobs,
        num_prompt_logprobs=sampling.prompt_logprobs,
        has_stop_strings=bool(sampling.stop),
        rules=None if rules == NO_RULES else rules,
        has_structure=sampling.structured_outputs is not None,
        pooling=sampling.pooling,
    )


def text_options(spec: JobSpec, prompt_ids: tuple[int, ...]) -> TextOptions:
    """The same for the engine's rules and for the publisher's speller: they must agree on every token.

    The answer to a prompt goes on with it, as in vLLM; what is said in a chat is a text of its own, unless it goes on
    with the last message.
    """
    return TextOptions(
        min_tokens=spec.sampling.min_tokens,
        include_stop_str_in_output=spec.sampling.include_stop_str_in_output,
        skip_special_tokens=spec.sampling.skip_special_tokens,
        follows=prompt_ids if spec.messages is None or spec.continue_final_message else (),
    )


def truncated(token_ids: tuple[int, ...], sampling: SamplingParams, *, max_sequence_len: int) -> tuple[int, ...]:
    """The end of a prompt that `truncate_prompt_tokens` leaves; with -1, as much as leaves room for `max_tokens`.

    Cut once, by the first owner: the ids are stored, and every later owner takes those.
    """
    num_kept = sampling.num_kept(len(token_ids), max_sequence_len=max_sequence_len)
    return token_ids[len(token_ids) - num_kept :]


def check_params(params: SequenceParams) -> None:
    """Raise InvalidJob for options that would leave the very first token nothing to be."""
    allowed = params.rules.allowed_token_ids if params.rules is not None else ()
    if allowed and params.min_tokens > 0 and (params.stop_token_ids | params.eos_token_ids).issuperset(allowed):
        raise InvalidJob(
            f"min_tokens={params.min_tokens} asks for tokens that do not end the answer, but allowed_token_ids holds "
            "no others",
            param="min_tokens",
        )


def check_sampling(sampling: SamplingParams, *, num_prompt_tokens: int, vocab_size: int) -> None:
    """Raise InvalidJob for what only the model or the prompt can tell, naming the field."""
    for name, token_ids in _named_ids(sampling):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidJob(
                    f"{name} holds token id {token_id}; this model's ids are 0 to {vocab_size - 1}", param=name
                )
    if sampling.prompt_logprobs is not None:
        num_entries = num_prompt_tokens * (sampling.prompt_logprobs + 1)
        if num_entries > MAX_PROMPT_LOGPROBS_ENTRIES:
            raise InvalidJob(
                f"prompt_logprobs={sampling.prompt_logprobs} for a prompt of {num_prompt_tokens} tokens names "
                f"{num_entries} tokens; at most {MAX_PROMPT_LOGPROBS_ENTRIES} are allowed",
                param="prompt_logprobs",
            )


def _named_ids(sampling: SamplingParams) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "stop_token_ids", sampling.stop_token_ids
    yield "allowed_token_ids", sampling.allowed_token_ids or ()
    yield "logit_bias", tuple(sampling.logit_bias)


def echoed(tokenizer: Tokenizer, spec: JobSpec, prompt_ids: tuple[int, ...]) -> str:
    """The text that stands before each answer: with `echo` the prompt as it was sent, or what its ids spell."""
    if not spec.sampling.echo:
        return ""
    if isinstance(spec.prompt, str) and spec.sampling.truncate_prompt_tokens is None:
        return spec.prompt
    stream = tokenizer.pieces.stream(skip_special_tokens=spec.sampling.skip_special_tokens)
    return "".join(map(stream.push, prompt_ids)) + stream.flush()

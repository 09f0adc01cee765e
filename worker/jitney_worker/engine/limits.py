"""What can never run is refused at the door, with the numbers; what merely has to wait is not."""

from __future__ import annotations

from jitney.errors import InvalidJob, PromptTooLong
from jitney_worker.engine.sequence import FinishReason, SequenceRequest
from jitney_worker.engine.settings import EngineSettings


def max_num_tokens(request: SequenceRequest, settings: EngineSettings) -> int:
    """Prompt and output at most: a `max_tokens` beyond the model's context ends there, as `length`."""
    return min(len(request.prompt_ids) + request.params.max_tokens, settings.max_model_len)


def check_fits(request: SequenceRequest, settings: EngineSettings) -> None:
    """Raise `PromptTooLong` or `InvalidJob` if the sequence could not end even with the engine to itself.

    A pool too small for prompt and output is refused now: with nobody else to preempt, the sequence would
    be recomputed into the same wall for ever.
    """
    num_prompt = len(request.prompt_ids)
    if num_prompt == 0:
        raise InvalidJob("the prompt has no tokens: at least one is needed", param="prompt")
    if request.params.max_tokens < 1:
        raise InvalidJob(f"max_tokens={request.params.max_tokens} must be at least 1", param="max_tokens")
    longest = settings.max_sequence_tokens
    if num_prompt >= longest:
        raise PromptTooLong(num_prompt, longest - 1, what="the prompt")
    num_wanted = max_num_tokens(request, settings)
    if num_wanted > longest:
        raise PromptTooLong(num_wanted, longest, what="the prompt with max_tokens", param="max_tokens")


def already_ended(request: SequenceRequest, num_allowed: int) -> FinishReason | None:
    """The ending of a sequence whose earlier attempts produced all of its output, if they did.

    num_allowed: prompt and output tokens at most, from `max_num_tokens`.
    """
    output_ids, params = request.output_ids, request.params
    if len(output_ids) > params.min_tokens and output_ids[-1] in params.stop_token_ids:
        return "stop"
    if len(request.prompt_ids) + len(request.output_ids) >= num_allowed:
        return "length"
    return None

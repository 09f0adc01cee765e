"""Prompts as the model will see them: counted and held against the context before anything is written."""

from __future__ import annotations

from jitney.cards import QueueCard
from jitney.messages import JobSpec
from jitney.submission import check_prompt
from jitney.text.tokenizer import Tokenizer
from jitney_api.tokenizers import Tokenizers, TokenizersBusy


async def count_prompt(tokenizers: Tokenizers, card: QueueCard, spec: JobSpec, *, limit: str | None) -> int | None:
    """Tokens of the job's prompt, as its worker will count them; None if that cannot be told here.

    limit: as in `check_prompt`. Raises InvalidJob for a chat of a model without a template, or that the template
    refuses, and PromptTooLong with the numbers: what the worker would say, before there is a job.
    """
    given = await _count(tokenizers, card, spec)
    if given is None:
        return None
    kept = spec.sampling.num_kept(given, max_sequence_len=card.max_model_len)
    check_prompt(card, spec, kept, limit=limit)
    return kept


async def _count(tokenizers: Tokenizers, card: QueueCard, spec: JobSpec) -> int | None:
    """Before truncation."""
    if isinstance(spec.prompt, tuple):
        return len(spec.prompt)
    tokenizer = await tokenizers.find(card.tokenizer_digest)
    if tokenizer is None:
        return None
    try:
        return await tokenizers.run(_num_tokens, tokenizer, spec)
    except TokenizersBusy:
        return None


def _num_tokens(tokenizer: Tokenizer, spec: JobSpec) -> int:
    """As the worker's intake encodes it."""
    if spec.messages is not None:
        return len(tokenizer.encode_chat(spec.messages, spec.tool_use, **spec.chat_end))
    assert isinstance(spec.prompt, str)
    return len(tokenizer.encode_prompt(spec.prompt))

"""What each documented request field does here: honoured (schemas.py), ignored, or refused.

One rule for all endpoints. A field that would change the answer and is not supported is refused by name,
never dropped in silence, unless it holds the value that means "as it is anyway". A field that is only a
hint or a label for somebody else's service is accepted and ignored. A field nobody has documented is ignored.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

from jitney.errors import InvalidJob

IGNORED: Final = frozenset(
    {
        # Labels and hints of OpenAI's own service.
        "user",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prediction",
        # Means something only beside `tools`: of chats and jobs.
        "parallel_tool_calls",
        # vLLM's: the id of a job is always made here, and no thoughts are set apart.
        "request_id",
        "include_reasoning",
    }
)

_ANY: Final[tuple[Any, ...]] = ()

REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    # field: the values that change nothing and therefore pass.
    "best_of": (1,),
    "suffix": ("",),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "add_generation_prompt": (True,),  # this, the next and tools: except for chats, where they are served
    "continue_final_message": (False,),
    "chat_template": _ANY,
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": _ANY,
    "moderation": _ANY,
    "web_search_options": _ANY,
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "prompt_embeds": _ANY,
    "logits_processors": _ANY,
    "adapter": _ANY,
    "prefix": _ANY,
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "kv_transfer_params": _ANY,
    "vllm_xargs": ({},),
    "thinking_token_budget": _ANY,
}


REFUSED_IN_EMBEDDINGS: Final[dict[str, tuple[Any, ...]]] = {
    # vLLM's, of its pooling endpoints: each would make another vector, or write it otherwise.
    "normalize": (True,),
    "use_activation": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "add_special_tokens": (True,),
    "messages": _ANY,
}


RENAMED: Final = {
    # vLLM's former names. Dropped in silence, they would leave the answer free.
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}


def refuse_unsupported(
    body: dict[str, Any],
    *,
    except_for: Container[str] = (),
    refused: Mapping[str, tuple[Any, ...]] = REFUSED,
    renamed: Mapping[str, str] = RENAMED,
) -> None:
    """InvalidJob for the first field that would need what is not there. `null` members are already gone.

    except_for: fields that this endpoint knows how to honour. refused: those that it does not.
    """
    for name, value in body.items():
        if name in renamed:
            raise InvalidJob(f"{name} is not known: send {renamed[name]}", param=name, code="unsupported_parameter")
        neutral = None if name in except_for else refused.get(name)
        if neutral is not None and not any(_same(value, allowed) for allowed in neutral):
            only = f"; only {neutral[0]!r} is" if neutral else ""
            raise InvalidJob(f"{name} is not supported yet{only}", param=name, code="unsupported_parameter")


def _same(value: Any, allowed: Any) -> bool:
    """Equal, and not by accident: in Python True == 1."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)

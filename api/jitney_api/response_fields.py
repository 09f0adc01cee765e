"""What each documented field of `POST /v1/responses` does that is not served (response_schemas.py).

The rule of fields.py: ignored where it is a label or a hint for somebody else's service, refused by name where it
would change the answer. What chats refuse is refused here too.
"""

from __future__ import annotations

from typing import Any, Final

from jitney_api import fields

IGNORED: Final = frozenset(
    {
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        # Mean something beside `tools` alone.
        "parallel_tool_calls",
        "max_tool_calls",
    }
)

_OWN: Final[dict[str, tuple[Any, ...]]] = {
    # field: the values that change nothing and therefore pass.
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "truncation": ("disabled",),
    "reasoning": ({}, {"effort": "none"}),
    "service_tier": ("auto", "default"),
    "context_management": ([],),
    "background_options": ({"completion_window": "soonest"},),
    "image": ({},),
    "conversation": (),
    "prompt": (),
    "moderation": (),
    "access_programs": (),
    # One answer, and no text before it: the object has no place for them.
    "n": (1,),
    "echo": (False,),
    "prompt_logprobs": (),
}

REFUSED: Final = {**fields.REFUSED, **_OWN}

RENAMED: Final = {
    **fields.RENAMED,
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include=['message.output_text.logprobs']",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""A chat's names. Dropped in silence, they would leave the answer unbounded, or free."""


def refuse_unsupported(body: dict[str, Any]) -> None:
    """InvalidJob for the first field that would need what is not there. `null` members are already gone."""
    fields.refuse_unsupported(body, refused=REFUSED, renamed=RENAMED)

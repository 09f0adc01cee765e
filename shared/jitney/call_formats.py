"""How families of models write calls of tools: the table, and how a chat template shows its family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class CallTerms:
    """How the text of a job's answers writes calls, and how many of each answer count; None: all."""

    format: str
    max_calls: int | None = None


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls, of which each is `{"name": …, <key>: {…}}`.

    marker: what tells that calls follow; empty: an answer is calls from its first character, or has none.
    opening, between, closing: what stands around the calls, after the first marker. between is None where there can be
    only one call. is_list: the calls are a JSON list.
    """

    name: str
    key: str
    marker: str
    opening: str
    between: str | None
    closing: str
    is_list: bool = False


HERMES: Final = CallFormat(
    "hermes", "arguments", "<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"
)
LLAMA: Final = CallFormat("llama", "parameters", "", "", None, "")
MISTRAL: Final = CallFormat("mistral", "arguments", "[TOOL_CALLS]", "[", ", ", "]", is_list=True)
PLAIN: Final = CallFormat("json", "arguments", "", "[", ", ", "]", is_list=True)
"""For models whose own form is not known here: forced calls only, as a list of JSON."""

CALL_FORMATS: Final[Mapping[str, CallFormat]] = {one.name: one for one in (HERMES, LLAMA, MISTRAL, PLAIN)}
FAMILIES: Final = (HERMES, LLAMA, MISTRAL)
"""Those that a template can be recognised to be of."""


def family_of(literals: str) -> CallFormat | None:
    """The family of a template that writes these texts (`jitney.text.template.literals`); None if it is not known.

    Others use the same markers for other forms, which are told by what stands between them.
    """
    if "<tool_call>" in literals and '"arguments"' in literals:
        return None if re.search("<function=|<arg_key>", literals) else HERMES
    if "[TOOL_CALLS]" in literals:
        return None if re.search(r"\[ARGS\]|\[CALL_ID\]", literals) else MISTRAL
    return LLAMA if re.search(r'\{"name": function name, *"parameters":', literals) else None

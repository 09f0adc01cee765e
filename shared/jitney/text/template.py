"""The model's chat template: Jinja in a sandbox, with the names and filters that templates expect.

The environment is the one that checkpoints are written for (transformers' `apply_chat_template`), made
here because importing transformers takes seconds. A test compares the two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jitney.errors import InvalidJob, ModelError
from jitney.text.chat import masked, masked_tools, read_messages
from jitney.text.control import ControlTokens, Masks

MAX_RENDERED_CHARS: Final = 8 << 20
MAX_RENDER_S: Final = 5.0
MAX_REASON_CHARS: Final = 200

# What a template's own expressions raise over a message that it did not expect.
_FAULTS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """Messages → one prompt text, in which only the template's own control tokens are control tokens.

    They stand there under their secret names (see `control`); the same strings in a user's text stay
    as they were spelled. variables: what the template may name, bos_token and its like.
    """

    def __init__(self, source: str, variables: Mapping[str, str], control: ControlTokens) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid: {error}") from None
        self._variables = dict(variables)
        self._control = control
        names = _names(source)
        self.shows_tools = "tools" in names
        self.shows_calls = "tool_calls" in names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt. Raises InvalidJob: for a message that is not one, or that the template refuses or would lose.

        continue_final_message: it ends where the last message's content does, as if nobody had finished it yet.
        """
        masks = Masks()
        read = read_messages(messages)
        self._check_shown(read, tools)
        shown = masked(read, self._control, masks)
        shown_tools = None if tools is None else masked_tools(tools, self._control, masks)
        if continue_final_message:
            shown[-1]["content"] += masks.mark + " "
        try:
            text = self._run(shown, shown_tools, add_generation_prompt)
        except _FAULTS as error:
            reason = masks.reveal(str(error) or type(error).__name__)
            raise InvalidJob(
                f"the model's chat template does not take these messages: {reason[:MAX_REASON_CHARS]}",
                param="messages",
                code="template_error",
            ) from None
        if continue_final_message:
            text = _up_to(masks.mark, text)
        # In this order: what is revealed is never renamed.
        return masks.reveal(self._control.rename(text))

    def _check_shown(self, messages: Sequence[Mapping[str, Any]], tools: object) -> None:
        """Without a look a template would leave tools and calls out in silence."""
        if tools is not None and not self.shows_tools:
            raise InvalidJob(
                "this model's chat template has no place for tools: leave them out, or choose a model that knows them",
                param="tools",
                code="tools_not_supported",
            )
        for number, message in enumerate(messages):
            if message.get("tool_calls") and not self.shows_calls:
                raise InvalidJob(
                    "this model's chat template has no place for tool_calls: put what was called into content",
                    param=f"messages.{number}.tool_calls",
                    code="tools_not_supported",
                )

    def _run(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        """Output of the template, bounded between its pieces: a loop that writes nothing is not interrupted."""
        pieces: list[str] = []
        size, deadline = 0, time.monotonic() + MAX_RENDER_S
        context = {**self._variables, "messages": messages, "tools": tools, "documents": None}
        for piece in self._template.generate(context, add_generation_prompt=add_generation_prompt):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise ValueError(f"it wrote more than {MAX_RENDERED_CHARS} characters")
            if time.monotonic() > deadline:
                raise ValueError(f"it took longer than {MAX_RENDER_S:.0f} s")
        return "".join(pieces)


def _up_to(mark: str, text: str) -> str:
    """What stands before the mark, as transformers cuts it: a template that trims contents would trim this one, too."""
    before, found, after = text.rpartition(mark)
    if not found:
        raise InvalidJob(
            "the model's chat template leaves out what the last message says: it cannot be continued",
            param="continue_final_message",
            code="template_error",
        )
    return before if after.startswith(" ") else before.rstrip()


def literals(source: str) -> str:
    """Every piece of text that a template itself can write, NUL between two. Raises ModelError."""
    try:
        tree = _environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template is not valid: {error}") from None
    written = [node.data for node in tree.find_all(nodes.TemplateData)]
    constants = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return "\0".join([*written, *constants])


def _names(source: str) -> set[str]:
    """What a template looks at: its variables, and the members that it names."""
    tree = _environment().parse(source)
    names = {node.name for node in tree.find_all(nodes.Name)}
    names.update(node.attr for node in tree.find_all(nodes.Getattr))
    names.update(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    return names


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]  # as much filler text as a template likes to ask for
    environment.globals.update(raise_exception=_refuse, strftime_now=_now, namespace=_PlainNamespace, dict=_make_dict)
    return environment


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}` marks what the model said, for training; it renders its inside."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        scope = nodes.Scope(lineno=line)
        scope.body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return scope


class _PlainNamespace(Namespace):
    """Jinja's namespace without names that lead into Python's own attributes."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.TemplateError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def _make_dict(*items: Any, **fields: Any) -> dict[str, Any]:
    """`dict` without its attributes."""
    return dict(*items, **fields)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: Jinja's own filter escapes <, > and & for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)

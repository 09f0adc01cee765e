"""What may stand in a request of `POST /v1/responses`; what its other fields do is in response_fields.py."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from jitney.messages import MAX_MESSAGES
from jitney_api.schemas import Bool, Int, Model, Open, Queued, Sampled

LOGPROBS: Final = "message.output_text.logprobs"

TEXT_PARTS: Final = ("input_text", "output_text")


class InputPart(Open):
    """A piece of a message. Other kinds (images, files, refusals) are refused."""

    type: Literal["input_text", "output_text"]
    text: str


def _plain_content(value: Any) -> Any:
    """Content parts as one text, one right after the other."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of input_text and output_text parts")
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise ValueError(
                f"part {number} has type {kind!r:.40}; only parts of type input_text and output_text are supported"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {number} is not {{type: {kind!r}, text: '...'}}")
    return "".join(part["text"] for part in value)


class InputMessage(Open):
    """One message of the input, or one of an earlier response's output, handed back as it came.

    `developer` is today's name of `system`, and becomes it.
    """

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_plain_content, json_schema_input_type=str | list[InputPart])]

    def plain(self) -> dict[str, str]:
        """What the job stores."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


def _items(value: Any) -> Any:
    """A text is one message of the user. Items of other kinds (calls, references, reasoning) are named."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of messages")
    for number, item in enumerate(value):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind != "message":
            raise ValueError(f"item {number} has type {kind!r:.40}; only items of type 'message' are supported")
    return value


Input = Annotated[
    tuple[InputMessage, ...],
    Field(max_length=MAX_MESSAGES),
    BeforeValidator(_items, json_schema_input_type=str | list[InputMessage]),
]


class TextFormat(Open):
    """What the answer must look like: free text, any JSON object, or JSON that a schema describes.

    `strict` may be either: answers always follow the schema.
    """

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Bool | None = None
    description: Annotated[str | None, Field(max_length=1_024)] = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> TextFormat:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("type='json_schema' needs name and schema")
        if self.type != "json_schema" and self.schema_ is not None:
            raise ValueError(f"type={self.type!r} takes no schema")
        return self


class TextConfig(Open):
    """`text`. verbosity: how long an answer is, is the model's own affair."""

    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Open):
    """include_obfuscation: random padding, which is never added."""

    include_obfuscation: Literal[False] | None = None


Includable = Literal[
    "message.output_text.logprobs",
    # Of what no answer here can hold: they add nothing to it, at OpenAI neither.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]


class ResponseRequest(Sampled, Queued):
    """`POST /v1/responses`.

    store: false keeps nothing of the request beyond the job's end, so that no `GET` and no later response finds it.
    """

    model: Model
    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Int | None = None
    text: TextConfig = TextConfig()
    include: list[Includable] = Field(default_factory=list)
    top_logprobs: Int | None = None
    stream: Bool = False
    stream_options: ResponseStreamOptions | None = None
    background: Bool = False
    store: Bool = True

    @property
    def limit_name(self) -> str | None:
        return None if self.max_output_tokens is None else "max_output_tokens"

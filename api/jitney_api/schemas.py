"""What may stand in a request. Types here; limits where they are kept once: `SamplingParams` and `JobSpec`.

Fields that nobody has documented are ignored on the OpenAI endpoints; what the others do is in fields.py.
`null` has been taken out beforehand: it means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from jitney.errors import InvalidJob
from jitney.keys import Band
from jitney.messages import MAX_MESSAGES, RetryPolicy
from jitney.sampling import Pooling, explain
from jitney.structured import StructuredOutputs
from jitney.webhooks.wish import Webhook

# Strict: `true` is no number and "5" is no limit; a caller who sends them meant something else.
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]


def _one_prompt(value: Any) -> Any:
    """OpenAI's four shapes (text, [text], ids, [ids]) as the two that a job has. Several prompts are refused."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError(f"{len(value)} prompts in one request are not supported yet; send one")
        value = value[0]
    if value in ("", []):
        raise ValueError("must hold at least one character or token id")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token_id) is int for token_id in value):
        if min(value) < 0:
            raise ValueError(f"token id {min(value)} is negative; ids start at 0")
        return tuple(value)
    raise ValueError("must be a string, a list of token ids, or a list with one of these")


# Any, then checked by hand: pydantic's message for a union lists every member's complaint.
Prompt = Annotated[
    Any,
    BeforeValidator(_one_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


MAX_INPUTS: Final = 2_048
"""OpenAI's bound. Each is a job of its own."""


def _inputs(value: Any) -> Any:
    """OpenAI's four shapes (text, [text, ...], ids, [ids, ...]) as a list of what `_one_prompt` gives."""
    one = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
    several = [value] if one else value
    if not isinstance(several, list) or not several:
        raise ValueError("must be a string, a list of token ids, or a list with at least one of these")
    if len(several) > MAX_INPUTS:
        raise ValueError(f"holds {len(several)} texts; at most {MAX_INPUTS} are allowed in one request")
    return tuple(_input(one, number) for number, one in enumerate(several))


def _input(value: Any, number: int) -> Any:
    if isinstance(value, list) and value and type(value[0]) is not int:
        raise ValueError(f"number {number} must be a string or a list of token ids")
    try:
        return _one_prompt(value)
    except ValueError as error:
        raise ValueError(f"number {number} {error}") from None


Inputs = Annotated[
    Any,
    BeforeValidator(_inputs, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


# Empty would mean "whatever this process' environment names".
Model = Annotated[str, Field(min_length=1)]

Stop = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})]


# Checked by hand, once for every door: pydantic's message for a wrong key would be about a number.
LogitBias = Annotated[Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]


class Open(BaseModel):
    """Base of request models: frozen, unknown members ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class TextPart(Open):
    """A piece of a message's content. Other kinds (images, audio) are refused."""

    type: Literal["text"]
    text: str


def _plain_content(value: Any) -> Any:
    """Content parts as one text, one right after the other."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"part {number} has type {kind!r:.40}; only parts of type 'text' are supported")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {number} is not {{type: 'text', text: '...'}}")
    return "".join(part["text"] for part in value)


def _refuse_function_call(value: Any) -> None:
    if value:
        raise ValueError("is not supported: it is the former name of tool_calls")


def _not_twice(value: bool) -> bool:
    if value:
        raise ValueError("true is not supported: a chat template writes the special tokens that its model wants")
    return value


def _as_ever(value: bool) -> bool:
    if not value:
        raise ValueError("false is not supported: send token ids, as /tokenize gives them")
    return value


def _refuse_other_words(value: Any) -> None:
    """What the assistant said otherwise than in `content`, and would be left out in silence."""
    if value is not None:
        raise ValueError("is not supported: put what was said into content")


class CalledFunction(Open):
    """A function by its name, and its arguments as JSON text, as an answer gave them."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class MessageToolCall(Open):
    """A call that the assistant made."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Open):
    """One message of a chat. `developer` is today's name of `system`, and becomes it.

    `content` may be null in what an assistant said, where it stands for nothing said. What a call gave comes back as
    a message of role `tool`, with the call's id as `tool_call_id`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None, BeforeValidator(_plain_content, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[None, BeforeValidator(_refuse_function_call)] = None
    audio: Annotated[None, BeforeValidator(_refuse_other_words)] = None
    refusal: Annotated[None, BeforeValidator(_refuse_other_words)] = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is required: a string or a list of text parts")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to messages of role 'tool', all of them")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of role 'assistant'")
        return self

    def plain(self) -> dict[str, Any]:
        """What the job stores: role and content, and of the rest what is there."""
        role = "system" if self.role == "developer" else self.role
        further: dict[str, Any] = {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.tool_calls:
            further["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        named = {name: value for name, value in further.items() if value is not None}
        return {"role": role, "content": self.content or "", **named}


# Checked by hand, once for every door: `jitney.tools`.
Tools = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})]
ToolChoice = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})]


class WithTools(Open):
    """Functions that the answer may call."""

    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Bool | None = None


class WithChatEnd(Open):
    """How the prompt of a chat ends: `jitney.messages.JobSpec.chat_end`."""

    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None


CHAT_ONLY: Final = frozenset({*WithTools.model_fields, *WithChatEnd.model_fields})
"""Fields that endpoints with messages honour, and others refuse by name."""


class StreamOptions(Open):
    """include_usage: one more chunk with the usage before `[DONE]`.

    continuous_usage_stats: vLLM's; then every chunk has the usage so far, of all choices together.
    """

    include_usage: Bool | None = None
    continuous_usage_stats: Bool | None = None


class Sampled(Open):
    """Sampling options under the names that OpenAI and vLLM share. Limits: `jitney.sampling.SamplingParams`."""

    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    stop: Stop = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: Bool | None = None
    n: Int | None = None
    min_p: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    min_tokens: Int | None = None
    include_stop_str_in_output: Bool | None = None
    skip_special_tokens: Bool | None = None
    prompt_logprobs: Int | None = None
    echo: Bool | None = None
    truncate_prompt_tokens: Int | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def limit_name(self) -> str | None:
        """The field that limits the answer; None if nobody gave one."""
        return None if self.max_tokens is None else "max_tokens"


class Queued(Open):
    """How the job waits, ends and is kept: `jitney.messages.JobSpec`. The tenant never comes from the body."""

    band: Band | None = None
    priority: Int | None = None
    not_before: Float | None = None
    timeout_s: Float | None = None
    queue_timeout_s: Float | None = None
    deadline: Float | None = None
    retry: RetryPolicy | None = None
    on_disconnect: Literal["cancel", "continue"] | None = None
    result_ttl_s: Int | None = None
    cache_salt: str | None = None
    metadata: dict[str, str] | None = None
    webhook: Webhook | None = None
    idempotency_key: str | None = None


class JsonSchemaFormat(Open):
    """A JSON schema under a name. `strict` may be either: answers always follow the schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Bool | None = None
    description: str | None = None


class ResponseFormat(Open):
    """OpenAI's way to ask for JSON. `json_schema` belongs to the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            needs = "needs json_schema: {name, schema}" if self.json_schema is None else "takes no json_schema"
            raise ValueError(f"type={self.type!r} {needs}")
        return self


class CompletionRequest(Sampled, Queued):
    """`POST /v1/completions`."""

    model: Model
    prompt: Prompt
    stream: Bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    logprobs: Int | None = None
    add_special_tokens: Annotated[Bool | None, AfterValidator(_as_ever)] = None


class ChatRequest(Sampled, Queued, WithTools, WithChatEnd):
    """`POST /v1/chat/completions`. `max_completion_tokens` wins over its old name `max_tokens`."""

    model: Model
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: Bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    max_completion_tokens: Int | None = None
    logprobs: Bool | None = None
    top_logprobs: Int | None = None
    add_special_tokens: Annotated[Bool | None, AfterValidator(_not_twice)] = None

    @property
    def limit_name(self) -> str | None:
        return super().limit_name if self.max_completion_tokens is None else "max_completion_tokens"


class JobRequest(Sampled, Queued, WithTools, WithChatEnd):
    """`POST /v1/jobs`: one flat object; exactly one of `prompt` and `messages`. Unknown members are refused.

    Without `model` the only queue there is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: Model | None = None
    prompt: Prompt = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    logprobs: Int | None = None
    pooling: Pooling | None = None
    traceparent: str | None = Field(None, max_length=64)


class EmbeddingRequest(Queued):
    """`POST /v1/embeddings`. dimensions: those of the model, or absent. pooling: `jitney.sampling.Pooling`."""

    model: Model
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int | None = None
    pooling: Pooling = "last"
    truncate_prompt_tokens: Int | None = None


class RequeueRequest(Open):
    """`POST /v1/admin/dead/requeue`. id: of the job that was buried."""

    id: Annotated[str, Strict(), Field(min_length=1, max_length=96)]


class TokenizeRequest(WithChatEnd):
    """`POST /tokenize`: exactly one of `prompt` and `messages`. Without `model` the only queue there is.

    add_special_tokens: what the tokenizer adds by itself, a BOS for one; unless given true for a prompt, false for a
    chat, whose template writes it. tools: beside messages alone. return_token_strs: the tokens as they stand in
    the vocabulary.
    """

    model: Model | None = None
    prompt: Annotated[str | None, Strict()] = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Tools = None
    add_special_tokens: Bool | None = None
    return_token_strs: Bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidJob("give exactly one of prompt and messages", param="prompt")
        if self.tools and self.messages is None:
            raise InvalidJob("tools needs messages: a prompt is taken as it is", param="tools")
        return self


class DetokenizeRequest(Open):
    """`POST /detokenize`. Without `model` the only queue there is."""

    model: Model | None = None
    tokens: list[Int]


Asked = TypeVar("Asked", bound=BaseModel)


def parse(schema: type[Asked], body: dict[str, Any]) -> Asked:
    """`body` as `schema`. Raises InvalidJob that names the field."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if first["type"] == "missing":
            name = ".".join(map(str, first["loc"]))
            raise InvalidJob(f"{name} is required", param=name, code="missing_field") from None
        raise explain(error) from None


def check_stream_options(asked: ChatRequest | CompletionRequest) -> None:
    """OpenAI refuses stream options without a stream, and clients rely on hearing of it."""
    if asked.stream_options is not None and not asked.stream:
        raise InvalidJob("stream_options needs stream=true", param="stream_options")

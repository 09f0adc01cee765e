"""What travels: the job as it was asked for, and the events of its log. JSON, one wire version."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    field_validator,
    model_validator,
)

from jitney.errors import InvalidJob
from jitney.keys import Band, check_tenant
from jitney.sampling import SEED_BITS, SamplingParams, explain
from jitney.tools import ToolUse, read_tool_choice, read_tools, tool_use
from jitney.webhooks.wish import Webhook

WIRE_VERSION: Final = 1
MAX_BODY_BYTES: Final = 1 << 20
MAX_MESSAGES: Final = 1_024

EventType = Literal["started", "tokens", "finished", "failed", "cancelled", "expired"]
FinishReason = Literal["stop", "length", "tool_calls"]
TERMINAL: Final[frozenset[str]] = frozenset({"finished", "failed", "cancelled", "expired"})


class RetryPolicy(BaseModel):
    """How a job that failed for a passing reason is tried again."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max: int = Field(3, ge=1, le=100)
    backoff_s: float = Field(1.0, ge=0.0, le=86_400.0)
    jitter: float = Field(0.5, ge=0.0, le=1.0)


class JobSpec(BaseModel):
    """A job as it was asked for: what to say, how to sample, and how long it may take.

    Exactly one of `prompt` (text or token ids) and `messages` (chat). Times are seconds; `not_before` and
    `deadline` are Unix times. `priority`: lower is sooner, among the same tenant's jobs. `keep_body`: what was asked
    for is kept as long as what was answered, not only until the job's end. `response`: of a job that
    `/v1/responses` has made, what OpenAI's object says and the other fields do not. Unknown fields are kept and
    passed on, so that an older process never loses what a newer one wrote. `tools`: functions that a chat's answer may
    call, a list in OpenAI's shape, kept as its text. `add_generation_prompt`, `continue_final_message`: how a chat's
    prompt ends, `chat_end`. `webhook`: who is told of the job's end.
    """

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    prompt: str | tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = Field(None, max_length=MAX_MESSAGES)
    tools: Annotated[str | None, BeforeValidator(read_tools)] = None
    tool_choice: Annotated[str | dict[str, Any] | None, BeforeValidator(read_tool_choice)] = None
    parallel_tool_calls: Annotated[bool | None, Strict()] = None
    add_generation_prompt: Annotated[bool | None, Strict()] = None
    continue_final_message: Annotated[bool | None, Strict()] = None
    sampling: SamplingParams = SamplingParams()
    band: Band = "interactive"
    tenant: str = "-"
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    not_before: float | None = Field(None, ge=0)
    timeout_s: float | None = Field(None, gt=0)
    queue_timeout_s: float | None = Field(None, gt=0)
    deadline: float | None = Field(None, gt=0)
    retry: RetryPolicy = RetryPolicy()
    on_disconnect: Literal["cancel", "continue"] = "continue"
    result_ttl_s: int | None = Field(None, ge=1, le=30 * 86_400)
    cache_salt: str = Field("", max_length=256)
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = Field(
        default_factory=dict, max_length=16
    )
    traceparent: str | None = Field(None, max_length=64)
    keep_body: bool = False
    response: dict[str, Any] | None = None
    webhook: Webhook | None = None

    @field_validator("tenant")
    @classmethod
    def _tenant(cls, value: str) -> str:
        try:
            return check_tenant(value)
        except InvalidJob as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _one_input(self) -> JobSpec:
        # InvalidJob, which pydantic lets through, because its own errors could not name a field here.
        if (self.prompt is None) == (self.messages is None):
            raise InvalidJob("give exactly one of prompt and messages", param="prompt")
        if self.prompt is not None and len(self.prompt) == 0:
            raise InvalidJob("prompt is empty: give at least one character or token id", param="prompt")
        if isinstance(self.prompt, tuple) and min(self.prompt) < 0:
            raise InvalidJob(f"prompt holds token id {min(self.prompt)}; ids start at 0", param="prompt")
        if self.messages is not None and self.sampling.echo:
            raise InvalidJob("echo needs prompt: a chat has no one text to begin the answer with", param="echo")
        if self.messages is not None and not self.messages:
            raise InvalidJob("messages is empty: give at least one message", param="messages")
        for number, message in enumerate(self.messages or ()):
            if not isinstance(message.get("role"), str):
                where = f"messages.{number}.role"
                raise InvalidJob(f"{where} is missing or not a string", param=where)
        self._check_tools()
        self._check_chat_end()
        return self

    def _check_chat_end(self) -> None:
        for name in ("add_generation_prompt", "continue_final_message"):
            if getattr(self, name) is not None and self.messages is None:
                raise InvalidJob(f"{name} needs messages: a prompt is taken as it is", param=name)
        assert self.chat_end  # or it raises

    @property
    def chat_end(self) -> dict[str, bool]:
        """How the template ends the prompt of a chat."""
        return chat_end(self.add_generation_prompt, self.continue_final_message)

    def _check_tools(self) -> None:
        use = self.tool_use
        if use is None:
            return
        if self.messages is None:
            raise InvalidJob("tools needs messages: a prompt is taken as it is", param="tools")
        if self.sampling.structured_outputs is not None:
            raise InvalidJob("tools and a structure for the answer are both given: send one", param="tools")
        if self.sampling.pooling is not None:
            raise InvalidJob("tools and pooling are both given: an embedding calls nothing", param="tools")
        if use.is_forced and self.sampling.ignore_eos:
            raise InvalidJob("ignore_eos=true forbids that an answer ends with its calls: leave it out", param="tools")

    @property
    def tool_use(self) -> ToolUse | None:
        """What it wants of its tools; None if the answer is to be text alone."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @classmethod
    def build(cls, fields: dict[str, Any]) -> JobSpec:
        """A validated spec. Raises InvalidJob that names field, value and limit."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise explain(error) from None

    def seeded(self) -> JobSpec:
        """The same job with a seed: drawn here when the caller gave none."""
        if self.sampling.seed is not None:
            return self
        sampling = self.sampling.model_copy(update={"seed": secrets.randbits(SEED_BITS)})
        return self.model_copy(update={"sampling": sampling})

    def encode(self) -> bytes:
        """The JSON stored at `:body:<id>`. Raises InvalidJob if it is over `MAX_BODY_BYTES`."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        try:
            body = orjson.dumps({"v": WIRE_VERSION, **fields}, option=orjson.OPT_SORT_KEYS)
        except TypeError as error:  # a lone surrogate, or a value JSON has no word for
            raise InvalidJob(f"the job is not valid JSON: {error}") from None
        if len(body) > MAX_BODY_BYTES:
            raise InvalidJob(f"the job is {len(body)} bytes; at most {MAX_BODY_BYTES} are allowed", param="prompt")
        return body

    @classmethod
    def decode(cls, body: bytes) -> JobSpec:
        """The inverse of `encode`, for whatever bytes somebody wrote. Raises InvalidJob."""
        if len(body) > MAX_BODY_BYTES:
            raise InvalidJob(f"the job is {len(body)} bytes; at most {MAX_BODY_BYTES} are allowed", code="undecodable")
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise InvalidJob(f"the job is not JSON: {error}", code="undecodable") from None
        if not isinstance(fields, dict):
            raise InvalidJob("the job is not a JSON object", code="undecodable")
        version = fields.pop("v", None)
        if version != WIRE_VERSION:
            raise InvalidJob(f"wire version {version!r} is not {WIRE_VERSION}", param="v", code="undecodable")
        return cls.build(fields)

    def estimate(self, bytes_per_token: float) -> int:
        """Prompt tokens, for bounds and fairness: exact for ids, otherwise from the size in bytes."""
        if isinstance(self.prompt, tuple):
            return len(self.prompt)
        size = len(self.prompt.encode()) if self.prompt else len(orjson.dumps(self.messages))
        size += len((self.tools or "").encode())
        return max(1, math.ceil(size / bytes_per_token))


def chat_end(add_generation_prompt: bool | None, continue_final_message: bool | None) -> dict[str, bool]:
    """How a template ends a prompt: with the beginning of an answer, unless it goes on with the last message.

    None: not given. Names are those of transformers' `apply_chat_template`. Raises InvalidJob for both at once.
    """
    if continue_final_message and add_generation_prompt:
        raise InvalidJob(
            "continue_final_message and add_generation_prompt are both true: an answer either goes on with the last "
            "message, or is one of its own",
            param="continue_final_message",
        )
    goes_on = bool(continue_final_message)
    begins = not goes_on if add_generation_prompt is None else add_generation_prompt
    return {"add_generation_prompt": begins, "continue_final_message": goes_on}


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a job's log; also one message of its channel.

    seq: dense from 1 over all events of the job. index: position of the event's first token within its
    choice. `text` may be empty while something is held back, or come without tokens when it is flushed.
    `token_ids` and `logprobs` are parallel. A terminal event is the last one, and there is exactly one.
    call_format, max_calls: in `started`, how the text writes calls of tools (`jitney.call_formats`), and how many
    count; None for an answer without calls, and for any number.
    max_tokens: in `started`, what the worker chose because the job named no limit; every later owner keeps to it.
    fingerprints: in the terminal event, the builds that wrote the answer, in order, when it was more than one.
    prompt_logprobs: in the first `started` of a job that asks for them, one entry for each token of the prompt, as in
    `logprobs`; None for the first token.
    embedding: in `finished` of a job with `pooling`: float32, little-endian, in base64.
    """

    type: EventType
    seq: int
    choice: int = 0
    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[dict[str, Any], ...] | None = None
    finish_reason: FinishReason | None = None
    attempt: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    resumed_tokens: int | None = None
    max_tokens: int | None = None
    call_format: str | None = None
    max_calls: int | None = None
    prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None
    choices: tuple[dict[str, Any], ...] | None = None
    usage: dict[str, int] | None = None
    error: dict[str, Any] | None = None
    fingerprints: tuple[str, ...] | None = None
    embedding: str | None = None

    @property
    def is_terminal(self) -> bool:
        return self.type in TERMINAL

    def encode(self) -> bytes:
        """The bytes of the log, the channel and (wrapped) of server-sent events. Absent = default."""
        fields: dict[str, Any] = {"v": WIRE_VERSION, "type": self.type, "seq": self.seq}
        optional: tuple[str, ...] = _OPTIONAL
        if self.type == "tokens":
            optional = _OF_TOKENS  # one of these is written for every token of every job: it looks at no other fields
            if self.choice:
                fields["choice"] = self.choice
            fields["index"], fields["token_ids"], fields["text"] = self.index, self.token_ids, self.text
        for name in optional:
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        return orjson.dumps(fields)

    @classmethod
    def decode(cls, payload: bytes | str) -> Event:
        """The inverse of `encode`. Unknown fields of a newer writer are passed over."""
        fields = orjson.loads(payload)
        given = {name: value for name, value in fields.items() if name in _KNOWN}
        for name in _LISTS & given.keys():
            if given[name] is not None:
                given[name] = tuple(given[name])
        return cls(fields["type"], fields["seq"], **given)


_OPTIONAL: Final = (
    "attempt",
    "prompt_tokens",
    "cached_tokens",
    "resumed_tokens",
    "max_tokens",
    "call_format",
    "max_calls",
    "prompt_logprobs",
    "logprobs",
    "finish_reason",
    "choices",
    "usage",
    "error",
    "fingerprints",
    "embedding",
)
_OF_TOKENS: Final = ("logprobs", "finish_reason")
_LISTS: Final = frozenset({"token_ids", "logprobs", "choices", "prompt_logprobs", "fingerprints"})
_KNOWN: Final = frozenset({"choice", "index", "token_ids", "text", *_OPTIONAL})


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, int]:
    """The `usage` of a terminal event."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": cached_tokens,
    }

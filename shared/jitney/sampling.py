"""How tokens are chosen: one frozen value, validated by name, the same at every door."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from jitney.errors import InvalidJob
from jitney.structured import StructuredOutputs

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1_024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_CHOICES = 16
MAX_LOGIT_BIASES = 300
MAX_LOGIT_BIAS = 100.0
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_BAD_WORDS = 256
MAX_BAD_WORD_BYTES = 256
MIN_REPETITION_PENALTY = 0.01
MIN_TEMPERATURE = 1e-3
"""Below it logit / temperature could overflow float32; what is meant is greedy."""
SEED_BITS = 63

Pooling = Literal["last", "mean"]
"""Of which hidden states an embedding is made: of the prompt's last token, or of all of its tokens."""


def _as_list(value: Any) -> Any:
    """OpenAI's shape of `stop`: absent, one string, or a list."""
    if value is None:
        return ()
    return [value] if isinstance(value, str) else value


def _by_token_id(value: Any) -> Any:
    """OpenAI's shape of `logit_bias`: an object, whose keys JSON makes strings."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("must be an object of token ids and numbers from -100 to 100")
    by_id = {_token_id(key): bias for key, bias in value.items()}
    if len(by_id) < len(value):
        raise ValueError("names a token id twice")
    return by_id


def _token_id(key: Any) -> int:
    if isinstance(key, bool) or not (isinstance(key, int) or (isinstance(key, str) and _WHOLE_NUMBER.fullmatch(key))):
        raise ValueError(f"key {str(key)[:32]!r} is not a token id")
    return int(key)


_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,12}")
_Bias = Annotated[float, Strict()]
"""Of its own kind, because no request model stands before it: `true` and "5" are no numbers."""


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None


class SamplingParams(BaseModel):
    """Sampling options of a job, named as in vLLM.

    temperature: 0 is greedy (ties to the lowest id); otherwise logits are divided by it.
    top_p: keep the smallest set of tokens whose probability reaches it (0 < top_p <= 1).
    top_k: keep the k most probable tokens; 0 or -1 is off, and so is a k beyond the vocabulary.
    seed: drawn at enqueue when absent, so that an unseeded job resumes exactly too.
    max_tokens: tokens to generate at most; absent = up to the model's context.
    stop: strings that end the text; what they match never reaches the client.
    stop_token_ids: token ids that end the sequence, besides the model's own end tokens.
    ignore_eos: the model's own end tokens do not end the sequence.
    logprobs: absent = none; k = the chosen token's log probability and the k most probable ones; of the model's own
        logits, before any option here has changed them.
    n: answers to the one prompt, each with its own randomness.
    min_p: keep tokens that are at least so probable in relation to the most probable one; 0 is off.
    presence_penalty, frequency_penalty: taken off the logits of tokens that the answer holds, once, or for each time.
    repetition_penalty: divides positive logits and multiplies others, of tokens in prompt and answer; 1 is off.
    logit_bias: token id -> what is added to its logit.
    allowed_token_ids: nothing else is chosen, end tokens included: name those too, or the answer ends by its length.
    bad_words: texts whose tokens must not come; the last token of one is not chosen after the others.
    min_tokens: so many tokens come before the answer may end by an end token, a stop token or a stop string.
    include_stop_str_in_output: the text ends with the stop string or stop token that ended it.
    skip_special_tokens: special tokens are no text; false shows them.
    prompt_logprobs: as `logprobs`, for the prompt's tokens from the second one on; once, in `started`.
    echo: the text of each answer begins with the prompt.
    truncate_prompt_tokens: keep the last k tokens of the prompt; -1 = as many as fit beside max_tokens.
    structured_outputs: what the answer must look like; a token that does not fit is not chosen.
    pooling: nothing is sampled: the result is an embedding of the prompt. What chooses tokens is refused beside it.

    In which order they act: `jitney_worker/model/processors.py`, as in vLLM.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    seed: int | None = Field(None, ge=-(2**SEED_BITS), lt=2**SEED_BITS)
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[tuple[str, ...], BeforeValidator(_as_list), Field(max_length=MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=2.0)
    logit_bias: Annotated[dict[int, _Bias], BeforeValidator(_by_token_id), Field(max_length=MAX_LOGIT_BIASES)] = {}
    allowed_token_ids: Annotated[tuple[int, ...], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[tuple[str, ...], Field(max_length=MAX_BAD_WORDS)] = ()
    min_tokens: int = Field(0, ge=0)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    structured_outputs: StructuredOutputs | None = None
    pooling: Pooling | None = None

    @field_validator("temperature")
    @classmethod
    def _not_almost_zero(cls, value: float) -> float:
        return 0.0 if value < MIN_TEMPERATURE else value

    @field_validator("stop")
    @classmethod
    def _real_strings(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """An empty stop string would stop every answer at once."""
        for text in value:
            if not text:
                raise ValueError("stop strings must not be empty")
            if _num_bytes(text) > MAX_STOP_BYTES:
                raise ValueError(f"a stop string is longer than {MAX_STOP_BYTES} bytes")
        return value

    @field_validator("stop_token_ids", "allowed_token_ids")
    @classmethod
    def _non_negative(cls, value: tuple[int, ...] | None, field: ValidationInfo) -> tuple[int, ...] | None:
        for token_id in value or ():
            if token_id < 0:
                raise ValueError(f"{field.field_name} holds {token_id}; ids start at 0")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _within_bounds(cls, value: dict[int, float]) -> dict[int, float]:
        for token_id, bias in value.items():
            if token_id < 0:
                raise ValueError(f"logit_bias holds {token_id}; ids start at 0")
            if abs(bias) > MAX_LOGIT_BIAS:
                raise ValueError(f"logit_bias of token {token_id} must be from -100 to 100")
        return value

    @field_validator("bad_words")
    @classmethod
    def _real_words(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """A blank one would forbid all spaces, or nothing, as the tokenizer goes."""
        for word in value:
            if not word.strip():
                raise ValueError("bad_words must not hold blank texts")
            if _num_bytes(word) > MAX_BAD_WORD_BYTES:
                raise ValueError(f"a bad word is longer than {MAX_BAD_WORD_BYTES} bytes")
        return value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keeps_something(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be at least 1, or -1 for as many tokens as fit")
        return value

    @field_validator("min_tokens")
    @classmethod
    def _not_more_than_max_tokens(cls, value: int, field: ValidationInfo) -> int:
        most = field.data.get("max_tokens")
        if most is not None and value > most:
            raise ValueError(f"is more than max_tokens={most}")
        return value

    @field_validator("echo")
    @classmethod
    def _not_with_logprobs(cls, value: bool, field: ValidationInfo) -> bool:
        """Clients count on one log probability for each piece of text."""
        if value and field.data.get("logprobs") is not None:
            raise ValueError("is not supported with logprobs: ask for prompt_logprobs, or leave one out")
        return value

    @field_validator("structured_outputs")
    @classmethod
    def _can_end(cls, value: StructuredOutputs | None, field: ValidationInfo) -> StructuredOutputs | None:
        if value is not None and field.data.get("ignore_eos"):
            raise ValueError("ends where its structure is whole, which ignore_eos=true forbids: leave one out")
        return value

    @field_validator("pooling")
    @classmethod
    def _alone(cls, value: Pooling | None, field: ValidationInfo) -> Pooling | None:
        """Who sends both has mistaken one for something else."""
        for name, given in field.data.items() if value is not None else ():
            if name not in _BESIDE_POOLING and given != cls.model_fields[name].default:
                raise ValueError(f"gives an embedding and chooses no token: leave {name} out")
        return value

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is always taken."""
        return self.temperature == 0.0

    def num_kept(self, num_prompt_tokens: int, *, max_sequence_len: int) -> int:
        """How many of the prompt's tokens, from its end, `truncate_prompt_tokens` leaves.

        max_sequence_len: prompt and answer together; of it -1 leaves `max_tokens` for the answer, or one token.
        """
        keep = self.truncate_prompt_tokens
        if keep == -1:
            keep = max(1, max_sequence_len - (self.max_tokens or 1))
        return num_prompt_tokens if keep is None else min(keep, num_prompt_tokens)


_BESIDE_POOLING = frozenset({"seed", "truncate_prompt_tokens"})
"""A seed is drawn for every job, and changes no embedding."""

_PHRASES = {
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "too_long": "must hold at most {max_length}, not {actual_length}",
    "too_short": "must hold at least {min_length}, not {actual_length}",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "finite_number": "must be a finite number",
    "dict_type": "must be an object",
    "model_type": "must be an object",
}
"""In the words of people who write JSON, instead of pydantic's."""


def _is_of_pydantic(part: str | int) -> bool:
    """Parts of a location that name how pydantic looked, not what the caller wrote."""
    return str(part).startswith(("function-", "tuple[", "list[")) or part == "str"


def explain(error: ValidationError, *, prefix: str = "") -> InvalidJob:
    """The first complaint of pydantic as one sentence that names field, value and limit.

    The value is cut to 64 characters: an error must never echo a whole input.
    """
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not _is_of_pydantic(part))
    name = f"{prefix}{where}" if where else prefix.rstrip(".")
    given = first.get("input")
    shown = str(given) if isinstance(given, float) and not math.isfinite(given) else repr(given)
    if len(shown) > 64:
        shown = shown[:61] + "..."
    message = _complaint(first["type"], first["msg"], first.get("ctx", {}))
    known = first["type"] == "extra_forbidden"
    whole = f"{name}: {message} (given: {shown})" if name else message
    text = f"unknown field {name}" if known else whole
    return InvalidJob(text, param=name or None, code="unknown_field" if known else "invalid_value")


def _complaint(kind: str, message: str, numbers: Mapping[str, Any]) -> str:
    phrase = _PHRASES.get(kind)
    return message.removeprefix("Value error, ") if phrase is None else phrase.format_map(numbers)


def sampling_params(**options: Any) -> SamplingParams:
    """`SamplingParams(**options)` with `InvalidJob` instead of pydantic's error."""
    try:
        return SamplingParams(**options)
    except ValidationError as error:
        raise explain(error) from None

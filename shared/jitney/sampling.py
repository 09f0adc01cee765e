"""How tokens are chosen: one frozen value, validated by name, the same at every door."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from jitney.errors import InvalidJob

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1_024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
SEED_BITS = 63


def _as_list(value: Any) -> Any:
    """OpenAI's shape of `stop`: absent, one string, or a list."""
    if value is None:
        return ()
    return [value] if isinstance(value, str) else value


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
    logprobs: absent = none; k = the chosen token's log probability and the k most probable ones.
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

    @field_validator("temperature")
    @classmethod
    def _not_almost_zero(cls, value: float) -> float:
        """Below 1e-3 the division overflows for some models; what is meant is greedy."""
        return 0.0 if value < 1e-3 else value

    @field_validator("stop")
    @classmethod
    def _real_strings(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """An empty stop string would stop every answer at once."""
        for text in value:
            if not text:
                raise ValueError("stop strings must not be empty")
            if len(text.encode("utf-8", "replace")) > MAX_STOP_BYTES:
                raise ValueError(f"a stop string is longer than {MAX_STOP_BYTES} bytes")
        return value

    @field_validator("stop_token_ids")
    @classmethod
    def _non_negative(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        for token_id in value:
            if token_id < 0:
                raise ValueError(f"stop_token_ids holds {token_id}; ids start at 0")
        return value

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is always taken."""
        return self.temperature == 0.0


_PHRASES = {
    "tuple_type": "must be a list",
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
}
"""Types by the names that people who write JSON know, instead of pydantic's."""


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
    message = _PHRASES.get(first["type"]) or str(first["msg"]).removeprefix("Value error, ")
    known = first["type"] == "extra_forbidden"
    whole = f"{name}: {message} (given: {shown})" if name else message
    text = f"unknown field {name}" if known else whole
    return InvalidJob(text, param=name or None, code="unknown_field" if known else "invalid_value")


def sampling_params(**options: Any) -> SamplingParams:
    """`SamplingParams(**options)` with `InvalidJob` instead of pydantic's error."""
    try:
        return SamplingParams(**options)
    except ValidationError as error:
        raise explain(error) from None

"""A request for a response as a job, and what the job keeps of it for the objects and frames to come. Pure."""

from __future__ import annotations

from typing import Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from jitney.errors import InvalidJob
from jitney.messages import JobSpec
from jitney.sampling import MAX_LOGPROBS, explain
from jitney.structured import StructuredOutputs
from jitney_api.response_schemas import LOGPROBS, ResponseRequest, TextFormat
from jitney_api.structure import SCHEMA_HERE, json_structure
from jitney_api.translate import job_of, on_disconnect_of, sampling_of

Messages = tuple[dict[str, Any], ...]

NAMES: Final = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    SCHEMA_HERE: "text.format.schema",
}
"""Fields of a job, and the caller's fields that they were made of."""


class Terms(BaseModel):
    """What a response says of itself and its job does not; kept in the job as `JobSpec.response`, defaults left out.

    has_instructions: the job's first message is them, and no part of the conversation. format: `text.format` without
    the schema, which is the job's own structure.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    background: bool = False
    has_instructions: bool = False
    previous_response_id: str | None = None
    format: dict[str, Any] | None = None

    def kept(self) -> dict[str, Any]:
        """As it stands in the job."""
        return self.model_dump(exclude_defaults=True)

    @classmethod
    def of(cls, spec: JobSpec) -> Terms:
        """The inverse, for whatever somebody wrote; members of a newer process are passed over. Raises InvalidJob."""
        try:
            return cls.model_validate(spec.response or {})
        except ValidationError as error:
            raise explain(error, prefix="response.") from None


def response_job(asked: ResponseRequest, past: Messages = ()) -> JobSpec:
    """The job of a response. past: the conversation that it goes on with. Raises InvalidJob."""
    _check_together(asked)
    limit = asked.max_output_tokens
    if limit is not None and limit < 1:
        raise InvalidJob(f"max_output_tokens must be at least 1 (given: {limit})", param="max_output_tokens")
    sampling = sampling_of(asked, _structure(asked), logprobs=_logprobs(asked), max_tokens=limit)
    instructions = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    terms = Terms(
        background=asked.background,
        has_instructions=bool(instructions),
        previous_response_id=asked.previous_response_id,
        format=_kept_format(asked.text.format),
    )
    return job_of(
        asked,
        sampling,
        messages=(*instructions, *past, *(message.plain() for message in asked.input)),
        on_disconnect="continue" if asked.background else on_disconnect_of(asked),
        keep_body=asked.store,
        response=terms.kept(),
    )


def conversation(spec: JobSpec, answer: str) -> Messages:
    """What was said up to and with a response. Its instructions are left out: the next response has its own."""
    said = spec.messages or ()
    return (*said[Terms.of(spec).has_instructions :], {"role": "assistant", "content": answer})


def instructions_of(spec: JobSpec) -> str | None:
    """The response's own instructions."""
    return spec.messages[0].get("content") if spec.messages and Terms.of(spec).has_instructions else None


def text_format(spec: JobSpec) -> dict[str, Any]:
    """`text.format` as it was asked for, the schema included."""
    kept = Terms.of(spec).format
    if kept is None:
        return {"type": "text"}
    structure = spec.sampling.structured_outputs
    schema = None if structure is None else structure.json_schema
    return {**kept} if schema is None else {**kept, "schema": orjson.loads(schema)}


def _check_together(asked: ResponseRequest) -> None:
    """Raises InvalidJob for fields that contradict each other."""
    if asked.background and not asked.store:
        raise InvalidJob("background=true needs store=true: there would be no way back to it", param="store")
    if asked.background and asked.on_disconnect == "cancel":
        raise InvalidJob(
            "background=true goes on when its client leaves: leave on_disconnect out", param="on_disconnect"
        )
    if asked.stream_options is not None and not asked.stream:
        raise InvalidJob("stream_options needs stream=true", param="stream_options")


def _structure(asked: ResponseRequest) -> StructuredOutputs | None:
    wanted = asked.text.format
    if wanted.type == "text":
        return asked.structured_outputs
    if asked.structured_outputs is not None:
        raise InvalidJob("text.format and structured_outputs are both given: send one", param="text.format")
    return json_structure(wanted.schema_)


def _kept_format(wanted: TextFormat) -> dict[str, Any] | None:
    if wanted.type == "text":
        return None
    given = {"type": wanted.type, "name": wanted.name, "strict": wanted.strict, "description": wanted.description}
    return {name: value for name, value in given.items() if value is not None}


def _logprobs(asked: ResponseRequest) -> int | None:
    """`include` (yes or no) and `top_logprobs` (how many besides) as the one number of a job."""
    top = asked.top_logprobs or 0
    if top and LOGPROBS not in asked.include:
        raise InvalidJob(f"top_logprobs needs include=[{LOGPROBS!r}]", param="top_logprobs")
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidJob(f"top_logprobs must be from 0 to {MAX_LOGPROBS} (given: {top})", param="top_logprobs")
    return top if LOGPROBS in asked.include else None

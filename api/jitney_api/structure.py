"""OpenAI's `response_format` as the structure that a job has, and errors under the name that the caller used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError

from jitney.errors import InvalidJob, PromptTooLong
from jitney.sampling import explain
from jitney.structured import StructuredOutputs
from jitney_api.schemas import ChatRequest, CompletionRequest, ResponseFormat

SCHEMA_HERE: Final = "structured_outputs.json"
_THEIRS: Final = "response_format.json_schema.schema"


def structured(asked: ChatRequest | CompletionRequest) -> StructuredOutputs | None:
    """What the answer must look like; None for free text. Raises InvalidJob for two that are asked for at once."""
    wanted = asked.response_format
    if wanted is None or wanted.type == "text":
        return asked.structured_outputs
    if asked.structured_outputs is not None:
        raise InvalidJob("response_format and structured_outputs are both given: send one", param="response_format")
    return _of(wanted)


def _of(wanted: ResponseFormat) -> StructuredOutputs:
    return json_structure(None if wanted.json_schema is None else wanted.json_schema.schema_)


def json_structure(schema: dict[str, Any] | None) -> StructuredOutputs:
    """JSON that the schema describes; without one any object. Raises InvalidJob."""
    fields: dict[str, Any] = {"json_object": True} if schema is None else {"json": schema}
    try:
        return StructuredOutputs.model_validate(fields)
    except ValidationError as error:
        raise explain(error, prefix="structured_outputs.") from None


@contextlib.contextmanager
def named_as_asked(asked: ChatRequest | CompletionRequest) -> Iterator[None]:
    """An InvalidJob about the schema of a `response_format` names that, not what it became here."""
    with named({} if asked.response_format is None else {SCHEMA_HERE: _THEIRS}):
        yield


@contextlib.contextmanager
def named(theirs: Mapping[str, str]) -> Iterator[None]:
    """An InvalidJob about one of our fields names the caller's field that it was made of. theirs: by ours."""
    try:
        yield
    except InvalidJob as error:
        name = theirs.get(error.param or "")
        if name is None:
            raise
        if isinstance(error, PromptTooLong):  # its numbers are told, too
            error.param = name
            raise
        raise InvalidJob(str(error).replace(error.param or "", name, 1), param=name, code=error.code) from None

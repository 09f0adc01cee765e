"""OpenAI's `response_format` as the structure that a job has, and errors under the name that the caller used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from pydantic import ValidationError

from jitney.errors import InvalidJob
from jitney.sampling import explain
from jitney.structured import StructuredOutputs
from jitney_api.schemas import ChatRequest, CompletionRequest, ResponseFormat

_OURS: Final = "structured_outputs.json"
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
    fields: dict[str, Any] = {"json_object": True}
    if wanted.json_schema is not None:
        fields = {"json": wanted.json_schema.schema_}
    try:
        return StructuredOutputs.model_validate(fields)
    except ValidationError as error:
        raise explain(error, prefix="structured_outputs.") from None


@contextlib.contextmanager
def named_as_asked(asked: ChatRequest | CompletionRequest) -> Iterator[None]:
    """An InvalidJob about the schema of a `response_format` names that, not what it became here."""
    try:
        yield
    except InvalidJob as error:
        if asked.response_format is None or error.param != _OURS:
            raise
        raise InvalidJob(str(error).replace(_OURS, _THEIRS, 1), param=_THEIRS, code=error.code) from None

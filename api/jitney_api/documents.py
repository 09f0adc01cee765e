"""The OpenAPI document. Bodies are parsed by hand (edge.py), so their schemas are handed in here."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from jitney_api.access import NEEDS
from jitney_api.batches.schemas import BatchRequest, FileForm
from jitney_api.response_schemas import ResponseRequest
from jitney_api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    JobRequest,
    RequeueRequest,
    TokenizeRequest,
)

_REF: Final = "#/components/schemas/{model}"


class ErrorFields(BaseModel):
    """What went wrong. `code` is for programs, `message` for people; `param` names the field, if one is at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error of this service, in OpenAI's shape."""

    model_config = ConfigDict(title="ErrorBody")

    error: ErrorFields


def documented(schema: type[BaseModel], *, streams: bool = False, status: int = 200) -> dict[str, Any]:
    """Keywords of a route whose body is `schema`."""
    answers: dict[str, Any] = {"application/json": {}}
    if streams:
        answers["text/event-stream"] = {}
    return {
        "responses": {
            status: {"content": answers, "description": "the answer"},
            **errors(400, 404, 408, 409, 413, 415, 429, 503),
        },
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": _ref(schema)}}}},
        "response_model": None,
    }


def form(schema: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes the fields of `schema` as a form."""
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _ref(schema)}}}}


def errors(*statuses: int) -> dict[int | str, Any]:
    """Responses of a route for the statuses it may refuse with."""
    return {
        status: {"description": "refused", "content": {"application/json": {"schema": _ref(ErrorBody)}}}
        for status in statuses
    }


def _ref(schema: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=schema.__name__)}


_SCHEMAS: Final = (
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    EmbeddingRequest,
    BatchRequest,
    FileForm,
    JobRequest,
    RequeueRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ErrorBody,
)


def openapi_of(app: FastAPI) -> dict[str, Any]:
    """The document, made once: FastAPI's own, with the schemas of bodies and errors added."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, schemas = models_json_schema(
            [(schema, "validation") for schema in _SCHEMAS],
            ref_template=_REF,
        )
        known = document.setdefault("components", {}).setdefault("schemas", {})
        known |= schemas["$defs"]
        # FastAPI's own kind of refusal, which is never given here: a wrong parameter is a 400 in OpenAI's shape.
        for operation in (operation for path in document["paths"].values() for operation in path.values()):
            operation.get("responses", {}).pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            known.pop(name, None)
        if app.state.asks_for_keys:
            _ask_for_keys(document)
        app.openapi_schema = document
    return app.openapi_schema


def _ask_for_keys(document: dict[str, Any]) -> None:
    """Say of each operation which scope it needs, and how it refuses."""
    bearer = {"type": "http", "scheme": "bearer", "description": "An API key; see `jitney keys add`."}
    document["components"]["securitySchemes"] = {"bearer": bearer}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needed = _NEEDS_BY_SHOWN_PATH[method.upper(), path]
            if needed is not None:
                # Scopes of other schemes than OAuth's: allowed as names of roles since OpenAPI 3.1.
                operation["security"] = [{"bearer": [needed]}]
                operation["responses"] |= {str(status): one for status, one in errors(401, 403).items()}


_NEEDS_BY_SHOWN_PATH: Final = {(method, path.replace(":path}", "}")): one for (method, path), one in NEEDS.items()}

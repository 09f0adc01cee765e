"""`GET /docs`: the OpenAPI document as a page for people, whole in itself: no script, nothing from another host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from fastapi import APIRouter
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

router = APIRouter()

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Whatever a description may hold one day, a browser runs none of it and asks nobody."""

_REF: Final = "#/components/schemas/"


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """For people; programs read /openapi.json."""
    page = page_of(request.app.openapi())
    return HTMLResponse(page, headers={"content-security-policy": _POLICY})


def page_of(document: Mapping[str, Any]) -> str:
    """The document as HTML: operations by tag, then the schemas that they name."""
    operations: dict[str, list[dict[str, Any]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            shown = {"method": method.upper(), "path": path, "scope": _scope_of(operation), **operation}
            operations.setdefault(operation.get("tags", ["other"])[0], []).append(shown)
    return _TEMPLATE.render(info=document["info"], operations=operations, schemas=document["components"]["schemas"])


def _scope_of(operation: Mapping[str, Any]) -> str | None:
    """The scope that a key must have, where keys are asked for."""
    for one in operation.get("security", ()):
        for needed in one.values():
            return ", ".join(needed)
    return None


def type_of(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words: `integer ≥ 0`, `"a" or "b"`. `null`, which means absent, is left out."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_REF)
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(type_of(one) for one in branches if one.get("type") != "null"))
    if "const" in schema:
        return _literal(schema["const"])
    if "enum" in schema:
        return " or ".join(map(_literal, schema["enum"]))
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    bounds = [f" {sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema]
    return f"{kind}{','.join(bounds)}"


_BOUNDS: Final = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _literal(value: object) -> str:
    return orjson.dumps(value).decode()


_ENVIRONMENT = Environment(
    loader=PackageLoader("jitney_api", "pages"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)
_ENVIRONMENT.filters |= {"type": type_of, "literal": _literal}
_TEMPLATE = _ENVIRONMENT.get_template("reference.html")

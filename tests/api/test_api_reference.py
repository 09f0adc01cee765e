"""The page for people: all of the OpenAPI document, and nothing from anywhere else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from jitney_api.app import create_app
from jitney_api.routes_reference import page_of, type_of
from jitney_api.settings import ApiSettings


class Page(HTMLParser):
    """Its words, and every attribute that names something outside the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags = set[str]()
        self.ids = list[str]()
        self.references = list[str]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.references += [value or "" for name, value in attrs if name in ("href", "src", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_the_page_is_whole_in_itself_and_runs_nothing(api):
    answer = await api.get("/docs")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    html = (await answer.body()).decode()
    page = Page(html)
    assert not page.tags & {"script", "link", "img", "iframe", "form"}
    assert "//" not in html.replace("<!doctype", ""), "nothing of another host"
    assert "openapi.json" in page.references
    anchors = {one.removeprefix("#") for one in page.references if one.startswith("#")}
    assert anchors
    assert anchors <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)


async def test_every_operation_parameter_and_field_of_the_document_is_on_it(api):
    document = await (await api.get("/openapi.json")).json()
    text = Page((await (await api.get("/docs")).body()).decode()).text
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert re.search(rf"{method.upper()}\s+{re.escape(path)}\s", text)
            assert operation["description"] in text
            assert all(one["name"] in text for one in operation.get("parameters", ()))
    for name, schema in document["components"]["schemas"].items():
        assert name in text
        assert all(field in text for field in schema["properties"])
    assert "key with scope" not in text


def test_where_keys_are_asked_for_it_says_which_scope_each_operation_needs():
    document = create_app(ApiSettings(redis_url="redis://127.0.0.1:1/0", access="keys")).openapi()
    assert re.search(r"POST\s+/v1/jobs key with scope generate", Page(page_of(document)).text)


def test_what_a_description_holds_is_text_and_no_part_of_the_page():
    document = create_app(ApiSettings(redis_url="redis://127.0.0.1:1/0")).openapi()
    document["info"]["description"] = "<script>alert(1)</script>"
    page = Page(page_of(document))
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 0}, "integer ≥ 0"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "number > 0, ≤ 1"),
        ({"anyOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}, {"type": "null"}]}, None),
        ({"enum": ["a", "b"], "type": "string"}, '"a" or "b"'),
        ({"const": "text", "type": "string"}, '"text"'),
        ({"$ref": "#/components/schemas/Message"}, "Message"),
        ({}, "anything"),
    ],
)
def test_a_type_is_told_in_a_few_words(schema: dict[str, Any], words: str | None):
    assert type_of(schema) == (words or "string or list of string")

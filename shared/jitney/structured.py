"""What an answer must look like: a JSON schema, a pattern, a list of choices or a grammar. Exactly one of them.

Named as vLLM names it. Bounded here, at every door and without any library; whether a structure can be followed at
all is found out by `grammar.py`, and once more by the worker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, field_validator, model_validator

from jitney.errors import InvalidJob

MAX_STRUCTURE_BYTES: Final = 65_536
MAX_SCHEMA_DEPTH: Final = 64
"""Objects and lists within each other, `properties` and `items` counted as well."""

MAX_STRUCTURE_CHOICES: Final = 1_024

StructureKind = Literal["json", "regex", "choice", "grammar", "json_object"]


def _schema_text(value: Any) -> Any:
    """A JSON schema as text: the body of a job sorts its keys, and an answer follows the order of `properties`."""
    if value is None:
        return None
    if isinstance(value, str):
        check_size(value)
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"is not JSON: {error.msg} (position {error.pos})") from None
    if not isinstance(value, Mapping):
        raise ValueError("must be an object, a JSON schema, or the text of one")
    check_depth(value)
    if "x-guidance" in value:
        raise ValueError("holds x-guidance, which is not supported: answers are compact JSON")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    check_size(text)
    return text


def check_depth(value: Any) -> None:
    """Level by level, so that nothing recurses and nothing that contains itself goes on for ever."""
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        inner = [list(one.values()) if isinstance(one, Mapping) else list(one) for one in level]
        level = [one for values in inner for one in values if isinstance(one, Mapping | list | tuple)]
        if not level:
            return
        if len(level) > MAX_STRUCTURE_BYTES:
            break
    raise ValueError(f"is nested more than {MAX_SCHEMA_DEPTH} deep")


def check_size(text: str, most: int = MAX_STRUCTURE_BYTES) -> None:
    """Raise ValueError for text that has no UTF-8 form, or of more bytes than that."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None
    if size > most:
        raise ValueError(f"is {size} bytes; at most {most} are allowed")


_JSON_SCHEMA = dict[str, Any] | str


class StructuredOutputs(BaseModel):
    """What the answer must be, exactly one of:

    json: JSON that this schema describes (an object, or its text). regex: a text that the pattern matches as a whole.
    choice: one of these texts. grammar: a text of this grammar, in Lark's notation. json_object: any JSON object.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True)

    json_schema: Annotated[str | None, BeforeValidator(_schema_text, json_schema_input_type=_JSON_SCHEMA | None)] = (
        Field(None, alias="json")
    )
    regex: str | None = None
    choice: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_STRUCTURE_CHOICES)] | None = None
    grammar: str | None = None
    json_object: Annotated[bool, Strict()] | None = None

    @field_validator("regex", "grammar")
    @classmethod
    def _bounded(cls, value: str | None) -> str | None:
        if value is not None:
            if not value:
                raise ValueError("must not be empty")
            check_size(value)
            if any(line.lstrip().startswith("%llguidance") for line in value.splitlines()):
                raise ValueError("holds %llguidance, which is not supported: its options are set here")
        return value

    @field_validator("choice")
    @classmethod
    def _real_choices(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """An empty one could be said by saying nothing, and nobody means that."""
        if value is not None:
            if not all(value):
                raise ValueError("must not hold empty texts")
            check_size("".join(value))
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = self._given()
        if len(given) != 1:
            named = " and ".join(given) or "none"
            raise InvalidJob(
                f"structured_outputs needs one of json, regex, choice, grammar and json_object (given: {named})",
                param="structured_outputs",
            )
        return self

    def _given(self) -> list[StructureKind]:
        values: dict[StructureKind, object] = {
            "json": self.json_schema,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        return [name for name, value in values.items() if value is not None]

    @property
    def kind(self) -> StructureKind:
        """Which of the five."""
        return self._given()[0]

    @property
    def field(self) -> str:
        """What the caller wrote, for errors: `structured_outputs.regex`."""
        return f"structured_outputs.{self.kind}"

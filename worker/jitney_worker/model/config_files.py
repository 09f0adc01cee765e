"""What the JSON files of a model say, read strictly: an entry of the wrong kind is refused by name and value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from jitney.errors import ModelError


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of one JSON object; `where` and `file` name it in errors.

    Every method takes an entry's name and what it is if the object says nothing (or null), and raises ModelError for
    a value of another kind. What passed for one by chance, a string that is a number or a truth that is a 1, would
    show as wrong answers, if it showed at all.
    """

    raw: Mapping[str, Any]
    where: str
    file: str = "config.json"

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer; without a default it has to be there."""
        value = self._or(name, default)
        if _is_integer(value) and value > 0:
            return value
        self._refuse(name, "a positive integer")

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self._or(name, default)
        if _is_number(value):
            return float(value)
        self._refuse(name, "a number")

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._or(name, default)
        if isinstance(value, bool):
            return value
        self._refuse(name, "true or false")

    def part(self, name: str) -> dict[str, Any]:
        """A JSON object; empty if there is none."""
        value = self._or(name, {})
        if isinstance(value, dict):
            return value
        self._refuse(name, "an object")

    def row(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list, of at least `length` entries, of which the first so many count."""
        value = self.raw.get(name)
        if value is None:
            return None
        if isinstance(value, list) and len(value) >= (length or 0):
            return value[:length]
        self._refuse(name, "a list" if length is None else f"a list of {length} entries, one for each layer,")

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty if there are none."""
        value = self._or(name, [])
        found = value if isinstance(value, list) else [value]
        if all(map(_is_integer, found)):
            return tuple(found)
        self._refuse(name, "a token id, or a list of them")

    def _or(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def _refuse(self, name: str, needed: str) -> NoReturn:
        raise ModelError(f"{self.where}: {self.file} says {name}={self.raw.get(name)!r}; {needed} is needed")


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_configs(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json`, and `generation_config.json` or nothing. Raises ModelError, for quantised weights too."""
    raw = read_json(directory / "config.json")
    quantised = Entries(raw, str(directory)).part("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown")
        raise ModelError(
            f"{directory}: weights quantised with {method!r} are not served; use the unquantised checkpoint"
        )
    generation = directory / "generation_config.json"
    return raw, read_json(generation) if generation.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError that names the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: not a Hugging Face model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def end_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any], *, where: str) -> tuple[int, ...]:
    """Tokens that end an answer; what `generation_config.json` says goes first. Raises ModelError."""
    if "eos_token_id" in generation:
        return Entries(generation, where, "generation_config.json").ids("eos_token_id")
    return Entries(raw, where).ids("eos_token_id")

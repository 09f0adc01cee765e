"""Reading what a model's directory says about text: tokenizer, chat template, end tokens, and a digest of it all."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson

from jitney.errors import ModelError
from jitney.text.files import TokenizerFiles, ids_of
from jitney_worker.text.converted import converted, has_older_files

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
_DIGESTED = (TOKENIZER, CONFIG, SPECIAL_TOKENS, TEMPLATE, TEMPLATE_JSON)


def read_files(directory: Path) -> TokenizerFiles:
    """Raises ModelError that names the file."""
    content = _tokenizer_json(directory)
    spec = _parsed(content, directory / TOKENIZER)
    config = _object(directory / CONFIG) or {}
    named = {**(_object(directory / SPECIAL_TOKENS) or {}), **config}
    variables = {name: text for name, value in named.items() if (text := _token_text(name, value))}
    (template, tool_template), end_ids = _templates(directory, config), _end_ids(directory)
    try:
        spec = _with_special(spec, {*variables.values(), *_further(named)})
        return TokenizerFiles.of(
            spec,
            variables=variables,
            template=template,
            end_ids=end_ids,
            digest=_digest(directory, content),
            tool_template=tool_template,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{directory / TOKENIZER} cannot be used: it has no valid {error}") from None


def _with_special(spec: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """tokenizer.json, with those of these tokens that are only in its vocabulary added as special ones."""
    added, ids = spec["added_tokens"], ids_of(spec)
    missing = sorted(name for name in names - {entry["content"] for entry in added} if name in ids)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {**spec, "added_tokens": [*added, *({"id": ids[name], "content": name, **flags} for name in missing)]}


def _further(named: dict[str, Any]) -> list[str]:
    """Special tokens that have no name of their own."""
    lists = (named.get(name) for name in ("additional_special_tokens", "extra_special_tokens"))
    entries = [entry for value in lists if isinstance(value, list) for entry in value]
    return [text for entry in entries if (text := _token_text("_token", entry))]


def _tokenizer_json(directory: Path) -> bytes:
    """The file, or what it would say."""
    content = _content(directory / TOKENIZER)
    if content is not None:
        return content
    if not has_older_files(directory):
        raise ModelError(f"{directory} has no {TOKENIZER}, nor another vocabulary that one could be made of")
    return converted(directory)


def _content(path: Path) -> bytes | None:
    """None if there is no such file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from None


def _object(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if there is no such file."""
    content = _content(path)
    return None if content is None else _parsed(content, path)


def _parsed(content: bytes, path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _token_text(name: str, value: Any) -> str | None:
    """The text of a named token: a string, or an object with `content`."""
    if not name.endswith("_token"):
        return None
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _templates(directory: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The chat template, and the one for tools where that is another.

    A file of its own, or (older checkpoints) a field of a JSON file.
    """
    path = directory / TEMPLATE
    if path.is_file():
        try:
            return path.read_text("utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None
    found = (_object(directory / TEMPLATE_JSON) or {}).get("chat_template") or config.get("chat_template")
    return _named(found, "default"), _named(found, "tool_use") if not isinstance(found, str) else None


def _named(found: Any, name: str) -> str | None:
    """The one template, or that of several which has this name. Others (for documents, say) are not used."""
    if isinstance(found, list):
        named = (entry for entry in found if isinstance(entry, dict))
        found = {entry.get("name"): entry.get("template") for entry in named}
    if isinstance(found, dict):
        found = found.get(name)
    return found if isinstance(found, str) else None


def _end_ids(directory: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        found = (_object(directory / name) or {}).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            return frozenset(number for number in ids if int(number) >= 0)  # -1: there is none
    return frozenset()


def _digest(directory: Path, tokenizer_json: bytes) -> str:
    """SHA-256 over names and contents of the files that decide how text becomes ids, in hexadecimal.

    A tokenizer that was converted counts as the file that it would be: another converter may make another one.
    """
    total = hashlib.sha256()
    for name in _DIGESTED:
        content = tokenizer_json if name == TOKENIZER else _content(directory / name)
        if content is not None:
            total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()

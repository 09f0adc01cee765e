"""What a model's files say about text: as one value, and as the bytes in which a worker publishes it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from jitney.errors import ModelError

PACKED_VERSION: Final = 1

MAX_UNPACKED_BYTES: Final = 256 << 20
"""Some megabytes of zeros can say that they are gigabytes. The largest tokenizers are a tenth of this."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of the text before the vocabulary sees it. special: hidden from answers."""

    id: int
    content: str
    special: bool
    single_word: bool


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files, read and checked.

    spec: tokenizer.json, with the special tokens that only the configuration names; nobody changes it.
    variables: what a chat template may name: bos_token, eos_token and their like. tool_template: the one to use beside
    tools; None if `template` is for everything.
    end_ids: what the checkpoint says ends an answer (generation_config.json, else config.json).
    digest: SHA-256 over the files that decide how text becomes ids, in hexadecimal.
    """

    spec: dict[str, Any]
    added: tuple[AddedToken, ...]
    variables: dict[str, str]
    template: str | None
    end_ids: frozenset[int]
    digest: str
    tool_template: str | None = None

    @classmethod
    def of(
        cls,
        spec: Mapping[str, Any],
        *,
        variables: Mapping[str, str],
        template: str | None,
        end_ids: Iterable[int],
        digest: str,
        tool_template: str | None = None,
    ) -> TokenizerFiles:
        """Of a tokenizer.json that is complete. Raises KeyError, TypeError or ValueError for one that is none."""
        added = tuple(map(_added_token, spec["added_tokens"]))
        return cls(dict(spec), added, dict(variables), template, frozenset(end_ids), digest, tool_template)

    def tokens(self) -> list[str | None]:
        """Id → token as it stands in the vocabulary. None for an id that nobody uses."""
        by_id = {number: token for token, number in ids_of(self.spec).items()}
        by_id.update((token.id, token.content) for token in self.added)
        return [by_id.get(number) for number in range(max(by_id, default=-1) + 1)]

    def pack(self) -> bytes:
        """All of it, compressed: whoever unpacks this encodes as the worker does. Takes up to a second."""
        fields: dict[str, Any] = {
            "v": PACKED_VERSION,
            "spec": self.spec,
            "variables": self.variables,
            "template": self.template,
            "end_ids": sorted(self.end_ids),
            "digest": self.digest,
        }
        if self.tool_template is not None:  # an older API refuses a field that it does not know
            fields["tool_template"] = self.tool_template
        return zlib.compress(orjson.dumps(fields))

    @classmethod
    def unpack(cls, packed: bytes) -> TokenizerFiles:
        """The inverse of `pack`. Raises ModelError for anything else, a later version's bytes included."""
        try:
            unpacking = zlib.decompressobj()
            content = unpacking.decompress(packed, MAX_UNPACKED_BYTES)
            fields = orjson.loads(content) if unpacking.eof else {}
            if fields.pop("v", None) != PACKED_VERSION:
                raise ValueError("it is cut off, too large, or of another version")
            return cls.of(**fields)
        except (zlib.error, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(f"a published tokenizer cannot be read: {error}") from None


def ids_of(spec: Mapping[str, Any]) -> dict[str, int]:
    """Token → id, of the model alone."""
    vocab: Any = spec["model"].get("vocab") or {}
    return {entry[0]: number for number, entry in enumerate(vocab)} if isinstance(vocab, list) else vocab


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    return AddedToken(
        int(entry["id"]), str(entry["content"]), bool(entry.get("special")), bool(entry.get("single_word"))
    )

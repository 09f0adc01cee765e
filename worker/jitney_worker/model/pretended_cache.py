"""A cache of transformers that says how long it is and holds nothing: some models take positions from that length."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor


def pretended_cache(body: Any, length: int | Tensor) -> dict[str, Any]:
    """Arguments that give a model such a cache. length: one for the call, or one for each token of it."""
    kind: Any = type(body)
    return {_argument(kind): _kind()(length), "use_cache": True}


@functools.cache
def _argument(body: Any) -> str:
    """transformers renamed it in the course of its version 5."""
    return "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"


@functools.cache
def _kind() -> type:
    """Made late, and once: transformers takes seconds to import, and some models get one in every step."""
    from transformers import DynamicCache

    class Pretended(DynamicCache):  # type: ignore[misc]  # transformers is not typed
        def __init__(self, length: int | Tensor) -> None:
            super().__init__()
            self.length = length

        def get_seq_length(self, *_: Any, **__: Any) -> int | Tensor:
            return self.length

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return keys, values

    return Pretended

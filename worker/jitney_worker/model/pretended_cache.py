"""A cache of transformers that says how long it is and holds nothing: some models take positions from that length."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor


def pretended_cache(body: Any, length: int | Tensor) -> dict[str, Any]:
    """Arguments that give a model such a cache. length: one for the call, or one for each token of it."""
    from transformers import DynamicCache

    class Pretended(DynamicCache):  # type: ignore[misc]  # transformers is not typed
        def get_seq_length(self, *_: Any, **__: Any) -> int | Tensor:
            return length

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return keys, values

    # transformers renamed the argument in the course of its version 5.
    name = "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
    return {name: Pretended(), "use_cache": True}

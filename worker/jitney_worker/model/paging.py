"""The paged cache as an attention function of transformers.

transformers lets anybody register an attention function by name, and every model that goes through its attention
interface calls it. Two names are registered here:

    jitney          serves: hands queries, keys and values to this step's `AttentionStep`
    jitney_survey   looks: one token runs through, and every call says what its layer is (survey.py)

Only the second has a mask function. A model asked for `jitney` therefore builds no masks, which is as well: they
would be of one sequence, and what runs here is a flat run of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn

from jitney_worker.model.attention import AttentionStep

SERVING = "jitney"
SURVEYING = "jitney_survey"


class Visitor(Protocol):
    """Who answers the attention calls of one pass through a model."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> Tensor:
        """query [1, num_heads, T, key_dim], key and value alike → [T, num_heads * value_dim]."""
        ...


_visitor: ContextVar[Visitor] = ContextVar("visitor")


@contextmanager
def visited_by(visitor: Visitor) -> Iterator[None]:
    """Every attention call of this thread goes to `visitor` until the context ends."""
    token = _visitor.set(visitor)
    try:
        yield
    finally:
        _visitor.reset(token)


def register(mask: Callable[..., Tensor]) -> None:
    """Make both names known to transformers. mask: what `jitney_survey` makes of a mask rule."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(SERVING, _attention)
    AttentionInterface.register(SURVEYING, _attention)
    AttentionMaskInterface.register(SURVEYING, mask)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """transformers' signature: [1, heads, T, width] in, [1, T, heads, width] out, and no weights."""
    attended = _visitor.get()(module, query, key, value, attention_mask, options)
    return attended.view(1, query.shape[2], query.shape[1], -1).to(query.dtype), None


class Pager:
    """Answers the passes that serve: each call goes to its layer of this step's attention."""

    def __init__(self, numbers: Mapping[nn.Module, int], step: AttentionStep) -> None:
        self._numbers = numbers
        self._step = step

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> Tensor:
        # Some rotate in float32 whatever the model's precision is; the cache has the precision of the values.
        queries, keys, values = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
        return self._step.attend(self._numbers[module], queries, keys, values, options.get("s_aux"))

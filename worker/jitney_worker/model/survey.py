"""What the attention layers of a foreign model are, learnt by letting one token through.

Nothing is looked up by family. Each attention call shows heads, widths, scale, cap and sinks, and its mask comes as a
rule, a function of two positions, because that is what transformers hands to a mask function; from the rule follows
how far the layer sees. What a call shows beyond that is not understood here, and the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jitney.errors import ModelError
from jitney_worker.model.layers import EVERYTHING, AttentionLayer, Reach

Sees = Callable[[int, int, Tensor, Tensor], Tensor]
"""(batch, head, positions that look, positions looked at) → bool, broadcast."""

_UNDERSTOOD = frozenset({"scaling", "softcap", "s_aux"})
_HARMLESS = frozenset(
    {
        "dropout",  # nothing is dropped outside of training
        "is_causal",  # the mask says it
        "sliding_window",  # the mask says it
        "position_ids",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


_KEEPS_THE_RULE = frozenset(
    {"__getitem__", "to", "expand", "view", "reshape", "squeeze", "unsqueeze", "contiguous", "bool", "float"}
)
"""What a model may do to a mask without changing who sees whom."""


class RuleMask(Tensor):
    """A mask of one element. It keeps its rule while it is only cut and cast; what is computed from it has none."""

    sees: Sees | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, RuleMask) and getattr(func, "__name__", "") in _KEEPS_THE_RULE:
            result.sees = args[0].sees if isinstance(args[0], RuleMask) else None
        return result


def rule_mask(*, mask_function: Sees, device: torch.device | str = "cpu", **_: Any) -> Tensor:
    """The mask function of the survey, by transformers' signature."""
    mask = torch.zeros(1, 1, 1, 1, device=device).as_subclass(RuleMask)
    mask.sees = mask_function
    return mask


class Survey:
    """Visitor of one pass of one token: notes every attention module in the order of the calls."""

    def __init__(self, max_model_len: int, where: str) -> None:
        self.layers: list[AttentionLayer] = []
        self.numbers: dict[nn.Module, int] = {}
        self._max_model_len = max_model_len
        self._where = where
        self._reaches: dict[Sees, Reach] = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> Tensor:
        name = f"{self._where}: {type(module).__name__}"
        if module in self.numbers:
            raise ModelError(f"{name} attends twice in one pass, which is not served")
        unknown = sorted(option for option in options if _means_something(option, options[option]))
        if unknown:
            raise ModelError(f"{name} attends with {', '.join(unknown)}, which is not served")
        if not isinstance(mask, RuleMask) or mask.sees is None:
            raise ModelError(f"{name} makes masks of its own, which is not served")
        self.numbers[module] = len(self.layers)
        scale = options.get("scaling")
        layer = AttentionLayer(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=query.shape[3] ** -0.5 if scale is None else float(scale),
            reach=self._reach(mask.sees),
            softcap=options.get("softcap"),
        )
        self.layers.append(layer)
        return value.repeat_interleave(layer.group, dim=1).flatten()[None]

    def _reach(self, sees: Sees) -> Reach:
        if sees not in self._reaches:
            self._reaches[sees] = reach_of(sees, self._max_model_len, self._where)
        return self._reaches[sees]


def _means_something(option: str, value: Any) -> bool:
    return option not in _UNDERSTOOD and option not in _HARMLESS and value is not None and value is not False


def reach_of(sees: Sees, max_model_len: int, where: str) -> Reach:
    """The reach that a rule describes, tried at positions all over the context.

    Raises ModelError if the rule is neither causal, nor a sliding window, nor chunks.
    """
    spread = {max_model_len * part // 8 + offset for part in range(8) for offset in (0, 1)} | {max_model_len - 1}
    positions = sorted(position for position in spread if position < max_model_len)
    rows = [_row(sees, position, max_model_len) for position in positions]
    for reach in _candidates(sees, rows[-1], max_model_len):
        if all(_agrees(reach, position, row) for position, row in zip(positions, rows, strict=True)):
            return reach
    raise ModelError(f"{where}: a mask that is neither causal nor a sliding window nor chunks is not served")


def _row(sees: Sees, position: int, length: int) -> Tensor:
    """[length], True where `position` looks."""
    return sees(0, 0, torch.tensor(position), torch.arange(length)).expand(length)


def _candidates(sees: Sees, last_row: Tensor, length: int) -> list[Reach]:
    """What the last position sees leaves these."""
    first = int(last_row.int().argmax())
    if first == 0:
        return [EVERYTHING]
    chunk_before = int(_row(sees, first - 1, length).int().argmax())
    return [Reach(window=length - first), Reach(chunk=first - chunk_before)]


def _agrees(reach: Reach, position: int, row: Tensor) -> bool:
    columns = torch.arange(len(row))
    return torch.equal(row, (columns <= position) & (columns >= reach.first(torch.tensor(position))))

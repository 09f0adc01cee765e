"""What the runner asks of a decoder, whoever computes it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from jitney_worker.model.attention import AttentionStep
from jitney_worker.model.layers import AttentionLayer


class ServedConfig(Protocol):
    """The facts of a model that the rest of the worker needs."""

    @property
    def architecture(self) -> str: ...

    @property
    def source(self) -> str:
        """Who computes it: `native`, or transformers with its version."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class Decoder(Protocol):
    """Token ids to logits on a flat run of tokens; what a sequence has seen lies in the cache behind `attention`."""

    @property
    def config(self) -> ServedConfig: ...

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """What each layer keeps in the cache and how it attends, in the order of the numbers given to `attend`."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """Hidden states [T, hidden] of tokens [T] at positions [T]; what `logits` takes."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [R, vocab] of rows [R, hidden]."""
        ...

    def last_hidden_states(self, hidden: Tensor) -> Tensor:
        """Float32 [R, hidden_size] of rows [R, hidden]: after the last norm, as transformers gives them."""
        ...

"""What one attention layer asks of the paged cache and of the attention backend."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Reach:
    """Which earlier tokens a position sees, itself included. Neither number set: all of them.

    window: the last so many tokens (sliding window).
    chunk: those of its own chunk, [position // chunk * chunk, position] (chunked attention as in Llama 4).
    """

    window: int | None = None
    chunk: int | None = None

    def sees_all(self, length: int) -> bool:
        """True if nothing of a sequence of `length` tokens is out of reach."""
        limit = self.window if self.window is not None else self.chunk
        return limit is None or length <= limit

    def first(self, positions: Tensor) -> Tensor:
        """The first position that each of `positions` sees; negative where that is before the beginning."""
        if self.window is not None:
            return positions - (self.window - 1)
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        return positions * 0


EVERYTHING = Reach()


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Shape and arithmetic of one layer: softmax(cap(scale * q k)) v.

    key_dim, value_dim: widths of a head; they differ in multi-head latent attention (DeepSeek-AI 2024).
    softcap: c in c * tanh(score / c) before the mask (Gemma Team 2024).
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    reach: Reach = EVERYTHING
    softcap: float | None = None

    @property
    def group(self) -> int:
        """Query heads that share a KV head: head h reads KV head h // group."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """Numbers that one token takes in the cache."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)

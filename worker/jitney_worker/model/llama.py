"""The decoder of the Llama family on a flat run of tokens: no batch dimension, no padding."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from jitney_worker.model.attention import AttentionStep
from jitney_worker.model.config import ModelConfig
from jitney_worker.model.rope import Rope
from jitney_worker.model.weights import DecoderWeights, LayerWeights

Rotate = Callable[[Tensor], Tensor]


class LlamaDecoder:
    """Token ids to logits. Keeps no state: what a sequence has seen lies in the cache behind `AttentionStep`."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self.attention_layers = config.attention_layers
        self._rope = Rope(config, weights.embedding.device)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """Hidden states before the last norm, [T, hidden], of tokens [T] at positions [T]."""
        multipliers = self.config.multipliers
        hidden = F.embedding(token_ids, self.weights.embedding)
        if multipliers.embedding != 1.0:
            hidden = hidden * multipliers.embedding
        rotation = self._rope.at(positions, hidden.dtype)
        for index, layer in enumerate(self.weights.layers):
            rotate = rotation if self.config.rotates[index] else _as_it_is
            attended = self._attend(index, layer, self._norm(hidden, layer.input_norm), rotate, attention)
            hidden.add_(attended, alpha=multipliers.residual)
            hidden.add_(self._mlp(layer, self._norm(hidden, layer.post_norm)), alpha=multipliers.residual)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [R, vocab] of the rows [R, hidden] that are sampled from."""
        logits = F.linear(self._norm(hidden, self.weights.norm), self.weights.head).float()
        return logits if self.config.multipliers.logits == 1.0 else logits / self.config.multipliers.logits

    def last_hidden_states(self, hidden: Tensor) -> Tensor:
        """Float32 [R, hidden] of rows [R, hidden]: after the last norm."""
        return self._norm(hidden, self.weights.norm).float()

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (Zhang and Sennrich 2019) over the last dimension, accumulated in float32."""
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)

    def _attend(
        self, index: int, layer: LayerWeights, hidden: Tensor, rotate: Rotate, attention: AttentionStep
    ) -> Tensor:
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        num_rotated = num_heads + num_kv_heads
        heads = F.linear(hidden, layer.qkv, layer.qkv_bias).view(-1, num_rotated + num_kv_heads, config.head_dim)
        rotating, values = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.q_norm is None or layer.k_norm is None:
            rotated = rotate(rotating)
            queries, keys = rotated[:, :num_heads], rotated[:, num_heads:]
        else:
            queries = rotate(self._norm(rotating[:, :num_heads], layer.q_norm))
            keys = rotate(self._norm(rotating[:, num_heads:], layer.k_norm))
        return F.linear(attention.attend(index, queries, keys, values), layer.o, layer.o_bias)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = F.linear(hidden, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)


def _as_it_is(heads: Tensor) -> Tensor:
    """Of a layer without rotary embedding."""
    return heads

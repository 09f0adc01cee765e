"""The decoder of the Llama family with every step computed by the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from jitney_worker.model.attention import AttentionStep
from jitney_worker.model.config import ModelConfig
from jitney_worker.model.native.attention import NativeStep
from jitney_worker.model.native.library import KINDS, PANEL, Layer, Model, Team, address
from jitney_worker.model.native.library import SamplingRow as _Rows
from jitney_worker.model.native.packing import Packed, interleaved, pack, padded
from jitney_worker.model.rope import frequencies
from jitney_worker.model.sampler import SamplingRow
from jitney_worker.model.weights import DecoderWeights, LayerWeights


class NativeDecoder:
    """Fulfils `Decoder` and `ChoosingHead`. Hidden states are float32, filled up with zeros to whole panels.

    A row's results do not depend on the rows beside it, nor on how a prompt is cut into steps.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, team: Team, *, quantised: bool = False) -> None:
        """weights are re-laid; the caller may drop its own."""
        self.config = config
        self.attention_layers = config.attention_layers
        self._team = team
        self._width = -(-config.hidden_size // PANEL) * PANEL
        self._last_norm = weights.norm.float()
        self._kept: list[object] = []
        self._model = self._lay_out(weights, quantised)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """Hidden states before the last norm, [T, padded hidden]. attention: a `NativeStep`, which has the batch."""
        step = cast(NativeStep, attention)
        hidden = torch.empty(step.num_tokens, self._width)
        team, cache = self._team, step.backend.cache
        team.library.forward(team.threads, self._model, team.rooms, step.batch, cache.planes, address(hidden))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [R, vocab] of the rows [R, padded hidden] that are sampled from."""
        logits, team = torch.empty(len(hidden), self.config.vocab_size), self._team
        rows = hidden.contiguous()
        team.library.logits(team.threads, self._model, team.rooms, address(rows), len(rows), address(logits))
        return logits

    def last_hidden_states(self, hidden: Tensor) -> Tensor:
        """Float32 [R, hidden] of rows [R, padded hidden]: after the last norm, each row by itself."""
        rows = hidden[:, : self.config.hidden_size]
        return F.rms_norm(rows, self._last_norm.shape, self._last_norm, self.config.rms_norm_eps)

    def choose(self, hidden: Tensor, rows: ListLike[SamplingRow]) -> tuple[list[int], list[float]]:
        """As `ChoosingHead.choose`."""
        given, team = hidden.contiguous(), self._team
        ids, tops = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
        drawn = None if all(row.is_greedy for row in rows) else [_row(row, self.config.vocab_size) for row in rows]
        team.library.choose(
            *(team.threads, self._model, team.rooms, address(given), len(rows)),
            None if drawn is None else (_Rows * len(rows))(*drawn),
            *(address(ids), address(tops)),
        )
        return ids.tolist(), tops.tolist()

    def _lay_out(self, weights: DecoderWeights, quantised: bool) -> Model:
        config, multipliers = self.config, self.config.multipliers
        layers = (Layer * len(weights.layers))(
            *(self._layer(index, layer, quantised) for index, layer in enumerate(weights.layers))
        )
        turning, rope_scale = frequencies(config)
        head = self._keep(pack(self._team, weights.head, quantised=quantised))
        takes_embedding_from_head = weights.head is weights.embedding and not quantised
        embedding = None if takes_embedding_from_head else self._kept_tensor(weights.embedding.contiguous())
        return Model(
            layers,
            self._kept_tensor(padded(weights.norm)),
            self._kept_tensor(turning.float().contiguous()),
            embedding,
            head.matrix,
            KINDS[weights.embedding.dtype],
            len(weights.layers),
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            len(turning),
            config.rms_norm_eps,
            rope_scale,
            config.attention_layers[0].scale,
            multipliers.embedding,
            multipliers.residual,
            multipliers.logits,
        )

    def _layer(self, index: int, layer: LayerWeights, quantised: bool) -> Layer:
        def packed(weight: Tensor, bias: Tensor | None, order: Tensor | None = None) -> Packed:
            return self._keep(pack(self._team, weight, bias, order=order, quantised=quantised))

        return Layer(
            packed(layer.qkv, layer.qkv_bias).matrix,
            packed(layer.o, layer.o_bias).matrix,
            packed(layer.gate_up, layer.gate_up_bias, interleaved(self.config.intermediate_size)).matrix,
            packed(layer.down, layer.down_bias).matrix,
            self._kept_tensor(padded(layer.input_norm)),
            self._kept_tensor(padded(layer.post_norm)),
            None if layer.q_norm is None else self._kept_tensor(padded(layer.q_norm)),
            None if layer.k_norm is None else self._kept_tensor(padded(layer.k_norm)),
            self.config.windows[index] or 0,
            self.config.rotates[index],
        )

    def _keep(self, packed: Packed) -> Packed:
        self._kept.append(packed)
        return packed

    def _kept_tensor(self, tensor: Tensor) -> int | None:
        """Its address, good as long as this decoder."""
        self._kept.append(tensor)
        return address(tensor)


def _row(row: SamplingRow, vocab_size: int) -> _Rows:
    if row.is_greedy:
        return _Rows()
    top_k = min(row.top_k, vocab_size)  # which any number may be, and theirs has 32 bits
    reach = -math.log(min(row.min_p, 1.0)) if row.min_p > 0.0 else math.inf
    return _Rows(row.top_p, row.key, row.temperature, reach, top_k)

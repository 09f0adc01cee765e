"""The attention backend over the tiled cache."""

from __future__ import annotations

import torch
from torch import Tensor

from jitney_worker.model.batch import StepBatch
from jitney_worker.model.layers import AttentionLayer
from jitney_worker.model.native.cache import TiledCache
from jitney_worker.model.native.library import KINDS, Batch, Shape, Team, address

MOST_WIDTH = 512


def can_attend(layer: AttentionLayer) -> bool:
    """Whether the kernels' buffers hold a head so wide."""
    return max(layer.key_dim, layer.value_dim) <= MOST_WIDTH


class NativeAttention:
    """Makes a `NativeStep` of a batch."""

    def __init__(self, cache: TiledCache, team: Team) -> None:
        self.cache = cache
        self.team = team
        self.shapes = tuple(shape_of(layer) for layer in cache.layers)

    def plan(self, batch: StepBatch) -> NativeStep:
        return NativeStep(self, batch)


class NativeStep:
    """One step's attention. `batch` is what the kernels read; a decoder in C++ takes it whole."""

    def __init__(self, backend: NativeAttention, batch: StepBatch) -> None:
        self.backend = backend
        self._kept = batch
        self.batch = Batch(
            address(batch.token_ids),
            address(batch.positions),
            address(batch.slots),
            address(batch.block_table),
            address(batch.row_firsts),
            len(batch.token_ids),
            len(batch.seq_lens),
            batch.block_table.shape[1],
            backend.cache.block_size,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.batch.num_tokens)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
        """As `AttentionStep.attend`, for a decoder that computes everything else itself."""
        backend, shape = self.backend, self.backend.cache.layers[layer]
        kept = tuple(one.to(backend.cache.dtype).contiguous() for one in (queries, keys, values))
        tokens, heads, kv_heads = self.num_tokens, shape.num_heads, shape.num_kv_heads
        wanted = [
            (tokens, heads, shape.key_dim),
            (tokens, kv_heads, shape.key_dim),
            (tokens, kv_heads, shape.value_dim),
        ]
        assert [one.shape for one in kept] == wanted, "the kernels would read beyond what they are given"
        given = None if sinks is None else sinks.float().contiguous()
        out = torch.empty(tokens, heads * shape.value_dim, dtype=backend.cache.dtype)
        backend.team.library.attend(
            backend.team.threads,
            KINDS[backend.cache.dtype],
            backend.shapes[layer],
            backend.cache.planes[layer],
            self.batch,
            backend.team.rooms,
            *map(address, kept),
            address(given),
            address(out),
        )
        return out.to(queries.dtype)


def shape_of(layer: AttentionLayer) -> Shape:
    """The same in numbers; 0 for what there is none of."""
    return Shape(
        layer.num_heads,
        layer.num_kv_heads,
        layer.key_dim,
        layer.value_dim,
        layer.scale,
        layer.softcap or 0.0,
        layer.reach.window or 0,
        layer.reach.chunk or 0,
    )

"""Attention over the paged cache: one interface, and the plain torch backend that every other is tested against."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from jitney_worker.model.batch import Chunk, StepBatch
from jitney_worker.model.cache import KVCache
from jitney_worker.model.layers import AttentionLayer, Reach


class AttentionStep(Protocol):
    """One step's attention, prepared once and called by every layer."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Store keys and values, attend, and return [T, num_heads * value_dim].

        queries [T, num_heads, key_dim]; keys [T, num_kv_heads, key_dim]; values [T, num_kv_heads, value_dim]; rotated
        already. sinks [num_heads]: one more score per head that takes its share of the softmax and adds nothing.
        """
        ...


class AttentionBackend(Protocol):
    """Makes an `AttentionStep` of a batch: whatever is the same for all layers is computed here."""

    def plan(self, batch: StepBatch) -> AttentionStep: ...


class TorchAttention:
    """Reference backend: gathers pages and calls `scaled_dot_product_attention`. Any device, any dtype."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def plan(self, batch: StepBatch) -> TorchAttentionStep:
        return TorchAttentionStep(self.cache, batch)


class TorchAttentionStep:
    """Decode rows: one batched call a layer. Chunks: one call each a layer."""

    def __init__(self, cache: KVCache, batch: StepBatch) -> None:
        self._cache = cache
        self._batch = batch
        reaches = {layer.reach for layer in cache.layers}
        self._num_decode_blocks = -(-batch.longest_decode // cache.block_size)
        if batch.num_decodes:
            seq_lens = batch.seq_lens[: batch.num_decodes]
            self._decode_pages = batch.block_table[: batch.num_decodes, : self._num_decode_blocks].reshape(-1)
            self._decode_masks = {reach: self._decode_mask(seq_lens, reach) for reach in reaches}
        self._chunk_masks = {
            (chunk.row, reach): _chunk_mask(chunk, reach, batch) for chunk in batch.chunks for reach in reaches
        }

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
        shape, batch = self._cache.layers[layer], self._batch
        key_cache, value_cache = self._cache.layer(layer)
        key_cache.view(-1, shape.num_kv_heads, shape.key_dim).index_copy_(0, batch.slots, keys)
        value_cache.view(-1, shape.num_kv_heads, shape.value_dim).index_copy_(0, batch.slots, values)
        parts = []
        if batch.num_decodes:
            parts.append(self._attend_decodes(shape, queries[: batch.num_decodes], key_cache, value_cache, sinks))
        for chunk in batch.chunks:
            if chunk.start == 0:
                context = keys[chunk.tokens], values[chunk.tokens]
            else:
                context = self._gather(chunk, key_cache), self._gather(chunk, value_cache)
            parts.append(self._attend_chunk(shape, chunk, queries[chunk.tokens], *context, sinks))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode_mask(self, seq_lens: Tensor, reach: Reach) -> Tensor:
        """[num_decodes, 1, 1, padded length]; True where the row may look."""
        columns = torch.arange(self._num_decode_blocks * self._cache.block_size, device=seq_lens.device)
        mask = columns < seq_lens[:, None]
        if not reach.sees_all(self._batch.longest_decode):
            mask &= columns >= reach.first(seq_lens - 1)[:, None]
        return mask[:, None, None]

    def _attend_decodes(
        self, shape: AttentionLayer, queries: Tensor, key_cache: Tensor, value_cache: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """All rows with one query at once; a KV head's queries form the length dimension, so nothing is repeated."""
        num_rows = queries.shape[0]
        keys = key_cache.index_select(0, self._decode_pages)
        values = value_cache.index_select(0, self._decode_pages)
        attended = _attend(
            shape,
            queries.reshape(num_rows, shape.num_kv_heads, shape.group, shape.key_dim),
            keys.view(num_rows, -1, shape.num_kv_heads, shape.key_dim).transpose(1, 2),
            values.view(num_rows, -1, shape.num_kv_heads, shape.value_dim).transpose(1, 2),
            self._decode_masks[shape.reach],
            None if sinks is None else sinks.view(shape.num_kv_heads, shape.group, 1),
        )
        return attended.reshape(num_rows, -1)

    def _gather(self, chunk: Chunk, cache: Tensor) -> Tensor:
        """The row's [stop, num_kv_heads, width] out of its pages."""
        num_blocks = -(-chunk.stop // self._cache.block_size)
        pages = cache.index_select(0, self._batch.block_table[chunk.row, :num_blocks])
        return pages.flatten(0, 1)[: chunk.stop]

    def _attend_chunk(
        self, shape: AttentionLayer, chunk: Chunk, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """One sequence's chunk against its whole context so far."""
        length = chunk.stop - chunk.start
        grouped = queries.reshape(length, shape.num_kv_heads, shape.group, shape.key_dim).permute(1, 2, 0, 3)
        heads = (shape.num_kv_heads, shape.group, chunk.stop)
        attended = _attend(
            shape,
            grouped,
            keys.transpose(0, 1)[:, None].expand(*heads, shape.key_dim),
            values.transpose(0, 1)[:, None].expand(*heads, shape.value_dim),
            self._chunk_masks[chunk.row, shape.reach],
            None if sinks is None else sinks.view(shape.num_kv_heads, shape.group, 1, 1),
        )
        return attended.permute(2, 0, 1, 3).reshape(length, -1)


def _attend(
    shape: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """queries [.., Q, key_dim], keys and values [.., K, width]; mask None: plainly causal, and then Q == K."""
    if shape.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=shape.scale
        )
    scores = (queries @ keys.mT).float() * shape.scale
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[-2]]
    return weights.to(values.dtype) @ values


def _chunk_mask(chunk: Chunk, reach: Reach, batch: StepBatch) -> Tensor | None:
    """[length, stop], True where a query may look; None means plainly causal (the chunk is the whole context)."""
    sees_all = reach.sees_all(chunk.stop)
    if chunk.start == 0 and sees_all:
        return None
    device = batch.seq_lens.device
    queries = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
    columns = torch.arange(chunk.stop, device=device)
    mask = columns <= queries
    if not sees_all:
        mask &= columns >= reach.first(queries)
    return mask

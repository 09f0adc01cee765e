"""Attention over the paged cache: one interface, and the plain torch backend that every other is tested against."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from jitney_worker.model.batch import Chunk, StepBatch
from jitney_worker.model.cache import KVCache
from jitney_worker.model.config import ModelConfig


class AttentionStep(Protocol):
    """One step's attention, prepared once and called by every layer."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values, attend, and return [T, num_heads * head_dim].

        queries [T, num_heads, head_dim]; keys, values [T, num_kv_heads, head_dim]; rotated already.
        """
        ...


class AttentionBackend(Protocol):
    """Makes an `AttentionStep` of a batch: whatever is the same for all layers is computed here."""

    def plan(self, batch: StepBatch) -> AttentionStep: ...


class TorchAttention:
    """Reference backend: gathers pages and calls `scaled_dot_product_attention`. Any device, any dtype."""

    def __init__(self, config: ModelConfig, cache: KVCache) -> None:
        self.config = config
        self.cache = cache

    def plan(self, batch: StepBatch) -> TorchAttentionStep:
        return TorchAttentionStep(self.config, self.cache, batch)


class TorchAttentionStep:
    """Decode rows: one batched call a layer. Chunks: one call each a layer."""

    def __init__(self, config: ModelConfig, cache: KVCache, batch: StepBatch) -> None:
        self._config = config
        self._cache = cache
        self._batch = batch
        self._groups = config.num_heads // config.num_kv_heads
        self._scale = config.head_dim**-0.5
        windows = set(config.windows)
        self._num_decode_blocks = -(-batch.longest_decode // cache.block_size)
        if batch.num_decodes:
            seq_lens = batch.seq_lens[: batch.num_decodes]
            self._decode_pages = batch.block_table[: batch.num_decodes, : self._num_decode_blocks].reshape(-1)
            self._decode_masks = {window: self._decode_mask(seq_lens, window) for window in windows}
        self._chunk_masks = {(chunk.row, w): _chunk_mask(chunk, w, batch) for chunk in batch.chunks for w in windows}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        config, batch = self._config, self._batch
        key_cache, value_cache = self._cache.layer(layer)
        key_cache.view(-1, config.num_kv_heads, config.head_dim).index_copy_(0, batch.slots, keys)
        value_cache.view(-1, config.num_kv_heads, config.head_dim).index_copy_(0, batch.slots, values)
        window = config.windows[layer]
        parts = []
        if batch.num_decodes:
            parts.append(self._attend_decodes(queries[: batch.num_decodes], key_cache, value_cache, window))
        for chunk in batch.chunks:
            if chunk.start == 0:
                context = keys[chunk.tokens], values[chunk.tokens]
            else:
                context = self._gather(chunk, key_cache), self._gather(chunk, value_cache)
            parts.append(self._attend_chunk(chunk, queries[chunk.tokens], *context, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode_mask(self, seq_lens: Tensor, window: int | None) -> Tensor:
        """[num_decodes, 1, 1, padded length]; True where the row may look."""
        columns = torch.arange(self._num_decode_blocks * self._cache.block_size, device=seq_lens.device)
        mask = columns < seq_lens[:, None]
        if window is not None:
            mask &= columns >= seq_lens[:, None] - window
        return mask[:, None, None]

    def _attend_decodes(self, queries: Tensor, key_cache: Tensor, value_cache: Tensor, window: int | None) -> Tensor:
        """All rows with one query at once; a KV head's queries form the length dimension, so nothing is repeated."""
        config = self._config
        num_rows = queries.shape[0]
        paged = (num_rows, -1, config.num_kv_heads, config.head_dim)
        keys = key_cache.index_select(0, self._decode_pages).view(paged).transpose(1, 2)
        values = value_cache.index_select(0, self._decode_pages).view(paged).transpose(1, 2)
        grouped = queries.reshape(num_rows, config.num_kv_heads, self._groups, config.head_dim)
        mask = self._decode_masks[window]
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=self._scale)
        return attended.reshape(num_rows, -1)

    def _gather(self, chunk: Chunk, cache: Tensor) -> Tensor:
        """The row's [stop, num_kv_heads, head_dim] out of its pages."""
        num_blocks = -(-chunk.stop // self._cache.block_size)
        pages = cache.index_select(0, self._batch.block_table[chunk.row, :num_blocks])
        return pages.flatten(0, 1)[: chunk.stop]

    def _attend_chunk(self, chunk: Chunk, queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """One sequence's chunk against its whole context so far."""
        config = self._config
        length = chunk.stop - chunk.start
        grouped = queries.view(length, config.num_kv_heads, self._groups, config.head_dim).permute(1, 2, 0, 3)
        shape = (config.num_kv_heads, self._groups, chunk.stop, config.head_dim)
        mask = self._chunk_masks[chunk.row, window]
        attended = F.scaled_dot_product_attention(
            grouped,
            keys.transpose(0, 1)[:, None].expand(shape),
            values.transpose(0, 1)[:, None].expand(shape),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
        )
        return attended.permute(2, 0, 1, 3).reshape(length, -1)


def _chunk_mask(chunk: Chunk, window: int | None, batch: StepBatch) -> Tensor | None:
    """[length, stop], True where a query may look; None means plainly causal (the chunk is the whole context)."""
    if chunk.start == 0 and (window is None or chunk.stop <= window):
        return None
    device = batch.seq_lens.device
    queries = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
    columns = torch.arange(chunk.stop, device=device)
    mask = columns <= queries
    if window is not None:
        mask &= columns > queries - window
    return mask

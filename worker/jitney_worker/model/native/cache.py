"""The paged cache in the layout of the kernels: tokens in tiles of sixteen, described in kernels/attention.hpp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from jitney_worker.engine.protocol import BlockCopy
from jitney_worker.model.cache import empty_pages
from jitney_worker.model.layers import AttentionLayer
from jitney_worker.model.native.library import LANES, Plane, address

TILE = LANES


def tiled(layer: AttentionLayer) -> AttentionLayer:
    """The layer as it takes room here: heads filled up to whole rows of the kernels."""
    return replace(layer, key_dim=-(-layer.key_dim // LANES) * LANES, value_dim=-(-layer.value_dim // LANES) * LANES)


class TiledCache:
    """Fulfils `PagedCache` on the CPU. block_size is a multiple of 16."""

    def __init__(self, layers: Sequence[AttentionLayer], num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device("cpu")
        shapes = [(one.num_kv_heads, width) for one in map(tiled, layers) for width in (one.key_dim, one.value_dim)]
        self.pools = {
            (heads, width): empty_pages(
                (shapes.count((heads, width)), num_blocks + 1, heads * width * block_size), dtype, self.device
            )
            for heads, width in dict.fromkeys(shapes)
        }
        unused = {shape: iter(pool) for shape, pool in self.pools.items()}
        planes = [next(unused[shape]) for shape in shapes]
        self._layers = list(zip(planes[::2], planes[1::2], strict=True))
        self.planes = (Plane * len(self.layers))(
            *(Plane(address(keys), address(values)) for keys, values in self._layers)
        )

    @property
    def scratch_block(self) -> int:
        """The block of zeros that pads block tables."""
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        """Memory held, the scratch block included."""
        return sum(pool.nbytes for pool in self.pools.values())

    def wipe(self, blocks: Tensor) -> None:
        """Zero blocks as their first token is about to be written; see `KVCache.wipe`."""
        for pool in self.pools.values():
            pool.index_fill_(1, blocks, 0)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy the beginnings of blocks, for sequences that go on from a shared one; see `BlockCopy`."""
        for one in copies:
            for pool in self.pools.values():
                pool[:, one.target] = pool[:, one.source]
            beyond = torch.arange(self.block_size) >= one.num_tokens
            for index in range(len(self.layers)):
                for tokens in self.tokens(index, one.target):
                    tokens[beyond.view(tokens.shape[:3])] = 0

    def tokens(self, layer: int, block: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a block of one layer, as views with three dimensions of tokens before those of a token.

        keys [tiles, 16, 1, num_kv_heads, width / pack, pack]; values [tiles, 16 / pack, pack, num_kv_heads, width].
        """
        shape, pack, tiles = tiled(self.layers[layer]), 4 // self.dtype.itemsize, self.block_size // TILE
        heads = shape.num_kv_heads
        keys, values = (plane[block] for plane in self._layers[layer])
        return (
            keys.view(heads, tiles, shape.key_dim // pack, TILE, pack).permute(1, 3, 0, 2, 4).unsqueeze(2),
            values.view(heads, tiles, TILE // pack, shape.value_dim, pack).permute(1, 2, 4, 0, 3),
        )

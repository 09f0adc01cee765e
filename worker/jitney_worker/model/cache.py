"""The paged KV cache: allocated once, addressed by block and slot.

    plane     K or V of one layer: [num_blocks + 1, block_size, num_kv_heads, width of a head]
    pool      all planes of one shape, one tensor: [num_planes, *plane]; most models have one pool
    slot      block id * block_size + offset
    scratch   block `num_blocks`: all zeros, never written; short block tables are padded with it

The engine owns which block belongs to whom; this room only owns the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from jitney.errors import SettingsError
from jitney_worker.engine.protocol import BlockCopy
from jitney_worker.model.layers import AttentionLayer

CPU_SHARE = 0.25
CPU_MAX_BYTES = 2 << 30
GPU_RESERVE_BYTES = 1 << 30

MADV_POPULATE_WRITE = 23
WORTH_POPULATING = 64 << 20
POPULATED_AT_ONCE = 16 << 20
PRIVATE: dict[str, int] = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}


def bytes_per_block(layers: Sequence[AttentionLayer], block_size: int, dtype: torch.dtype) -> int:
    """K and V of `block_size` tokens in every layer."""
    return sum(layer.width for layer in layers) * dtype.itemsize * block_size


def num_blocks_for(budget_bytes: int, layers: Sequence[AttentionLayer], block_size: int, dtype: torch.dtype) -> int:
    """Blocks that fit a budget, the scratch block not counted. Raises SettingsError if none does."""
    each = bytes_per_block(layers, block_size, dtype)
    num_blocks = budget_bytes // each - 1
    if num_blocks < 1:
        raise SettingsError(
            f"kv_cache_bytes={budget_bytes} is too little: a block of {block_size} tokens takes {each} bytes, "
            f"and two are the least"
        )
    return num_blocks


def default_budget(device: torch.device, *, gpu_memory_utilization: float = 0.9) -> int:
    """Bytes for the KV cache when nobody says, asked after the weights are loaded.

    CPU: a quarter of the memory that is still available (of the machine or of its control group), at most 2 GiB.
    GPU: `gpu_memory_utilization` of the card, less what is in use and 1 GiB for activations.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * gpu_memory_utilization) - (total - free) - GPU_RESERVE_BYTES)
    return min(int(_available_bytes() * CPU_SHARE), CPU_MAX_BYTES)


def _available_bytes() -> int:
    """Memory this process may still take: the machine's, or less if a control group (v2) limits it."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1_024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def _read(path: str) -> str:
    try:
        return Path(path).read_text("ascii")
    except OSError:
        return ""


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take real memory only where they are written to: a worker with few jobs stays small.

    Asked of the system itself. torch would write its zeros down, and so would an allocator that has used memory at
    hand; what numpy returns begins 16 bytes into a page: each row of the kernels would lie in two lines of the caches.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, **PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that was built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def populate(pools: Iterable[Tensor]) -> threading.Thread | None:
    """Have the system give these tensors their memory now, in the background and without changing what they hold.

    The first write to a page takes many times as long as the second, which some step would pay for; and a
    machine that has not the memory shows it at the start. None for tensors so small that it does not matter.
    """
    large = [pool for pool in pools if pool.device.type == "cpu" and pool.nbytes >= WORTH_POPULATING]
    if not large or sys.platform != "linux":
        return None
    thread = threading.Thread(target=_populate, args=(large,), name="jitney-kv-pages", daemon=True)
    thread.start()
    return thread


def _populate(pools: list[Tensor]) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread alone
    libc, page = ctypes.CDLL(None), os.sysconf("SC_PAGE_SIZE")
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for pool in pools:
        first, end = -(-pool.data_ptr() // page) * page, (pool.data_ptr() + pool.nbytes) // page * page
        for start in range(first, end, POPULATED_AT_ONCE):
            if libc.madvise(start, min(POPULATED_AT_ONCE, end - start), MADV_POPULATE_WRITE) != 0:
                return  # a kernel before 5.14: pages come as they are written to


class PagedCache(Protocol):
    """Blocks of keys and values as the runner sees them, however they lie in memory."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def scratch_block(self) -> int: ...

    def wipe(self, blocks: Tensor) -> None: ...

    def copy(self, copies: Iterable[BlockCopy]) -> None: ...


class KVCache:
    """Keys and values of all layers. Layers may differ in their number of KV heads and in their widths."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        shapes = [(one.num_kv_heads, width) for one in self.layers for width in (one.key_dim, one.value_dim)]
        self.pools = {
            shape: empty_pages((shapes.count(shape), num_blocks + 1, block_size, *shape), dtype, device)
            for shape in dict.fromkeys(shapes)
        }
        unused = {shape: iter(pool) for shape, pool in self.pools.items()}
        planes = [next(unused[shape]) for shape in shapes]
        self._layers = tuple(zip(planes[::2], planes[1::2], strict=True))

    @property
    def scratch_block(self) -> int:
        """The block of zeros that pads block tables."""
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        """Memory held, the scratch block included."""
        return sum(pool.nbytes for pool in self.pools.values())

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [num_blocks + 1, block_size, num_kv_heads, width]."""
        return self._layers[index]

    def wipe(self, blocks: Tensor) -> None:
        """Zero blocks as their first token is about to be written.

        A block's unused tail is masked, but a mask does not stop a NaN that a former owner left there: 0 * NaN = NaN.
        """
        for pool in self.pools.values():
            pool.index_fill_(1, blocks, 0)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy the beginnings of blocks, for sequences that go on from a shared one; see `BlockCopy`."""
        for pool in self.pools.values():
            for one in copies:
                pool[:, one.target, : one.num_tokens] = pool[:, one.source, : one.num_tokens]
                pool[:, one.target, one.num_tokens :] = 0

"""How much memory the cache takes, and who decides."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jitney.errors import SettingsError
from jitney_worker.engine.protocol import BlockCopy
from jitney_worker.model.cache import (
    CPU_MAX_BYTES,
    WORTH_POPULATING,
    KVCache,
    bytes_per_block,
    default_budget,
    empty_pages,
    num_blocks_for,
    populate,
)
from jitney_worker.model.runner import load_runner

PAGE = os.sysconf("SC_PAGE_SIZE")


def test_a_budget_buys_whole_blocks_and_the_scratch_block_is_paid_from_it(tiny_llama: Path) -> None:
    decoder = load_runner(tiny_llama, dtype="float32", device="cpu", num_blocks=2).decoder
    each = bytes_per_block(decoder.attention_layers, 16, torch.float32)
    assert each == 2 * 2 * 2 * 32 * 4 * 16
    for budget, num_blocks in ((each * 10, 9), (each * 11 - 1, 9), (each * 2, 1)):
        assert num_blocks_for(budget, decoder.attention_layers, 16, torch.float32) == num_blocks
        cache = KVCache(decoder.attention_layers, num_blocks, 16, torch.float32, torch.device("cpu"))
        assert cache.num_bytes <= budget


def test_a_budget_below_two_blocks_is_refused_with_the_numbers(tiny_llama: Path) -> None:
    decoder = load_runner(tiny_llama, dtype="float32", device="cpu", num_blocks=2).decoder
    with pytest.raises(SettingsError, match=r"kv_cache_bytes=1000 is too little.* 16384 bytes"):
        num_blocks_for(1_000, decoder.attention_layers, 16, torch.float32)


def test_bfloat16_buys_twice_as_many_blocks(tiny_llama: Path) -> None:
    by_dtype = {
        dtype: load_runner(tiny_llama, dtype=dtype, device="cpu", kv_cache_bytes=1 << 20).num_blocks
        for dtype in ("float32", "bfloat16")
    }
    assert by_dtype == {"float32": 63, "bfloat16": 127}


def test_the_default_budget_is_within_its_bounds() -> None:
    assert 0 < default_budget(torch.device("cpu")) <= CPU_MAX_BYTES


def test_a_copied_block_holds_the_beginning_of_its_source_and_zeros(tiny_llama: Path) -> None:
    """In every layer. A NaN behind the beginning stays where it is, and so does what stood in the target."""
    cache = load_runner(tiny_llama, dtype="float32", device="cpu", num_blocks=5, block_size=8).cache
    for layer in range(2):
        for plane, of in enumerate(cache.layer(layer)):
            of[3], of[1], of[0] = float("nan"), float("nan"), 7.0
            of[3, :5] = 10.0 * layer + plane + 1
    cache.copy([BlockCopy(source=3, target=1, num_tokens=5)])
    for layer in range(2):
        for plane, of in enumerate(cache.layer(layer)):
            assert of[1, :5].eq(10.0 * layer + plane + 1).all()
            assert of[1, 5:].eq(0.0).all()
            assert of[0].eq(7.0).all()
            assert of[3, 5:].isnan().all()


def test_num_blocks_wins_over_bytes(tiny_llama: Path) -> None:
    runner = load_runner(tiny_llama, dtype="float32", device="cpu", num_blocks=5, kv_cache_bytes=1 << 20, block_size=8)
    assert (runner.num_blocks, runner.block_size) == (5, 8)


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's memory that the system has given, by the kernel's own account."""
    found = (ctypes.c_ubyte * (tensor.nbytes // PAGE))()
    first = -(-tensor.data_ptr() // PAGE) * PAGE
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(len(found) * PAGE - PAGE), found) == 0
    return sum(flags & 1 for flags in found) * PAGE


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
def test_a_populated_cache_has_its_memory_and_what_was_written_to_it_meanwhile() -> None:
    pool = empty_pages((WORTH_POPULATING // 4,), torch.float32, torch.device("cpu"))
    pool[7] = 7.0
    assert resident(pool) < pool.nbytes // 2
    thread = populate([pool])
    assert thread is not None
    thread.join(30.0)
    assert resident(pool) > pool.nbytes * 9 // 10
    assert pool[7] == 7.0
    assert int(pool.count_nonzero()) == 1


USED_BEFORE = """
import ctypes, torch
from jitney_worker.model.cache import empty_pages
from tests.model.test_kv_cache import resident
libc, taken = ctypes.CDLL(None), 200 << 20
libc.malloc.restype, libc.memset.argtypes, libc.free.argtypes = (
    ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), (ctypes.c_void_p,))
libc.mallopt(-4, 0), libc.mallopt(-1, 1 << 30)  # M_MMAP_MAX, M_TRIM_THRESHOLD: freed memory stays with the process
used = libc.malloc(ctypes.c_size_t(taken))
libc.memset(used, 1, taken), libc.free(used)
pool = empty_pages((16 << 20,), torch.float32, torch.device("cpu"))
print(resident(pool), int(pool.count_nonzero()))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets glibc's allocator up")
def test_an_empty_cache_is_not_laid_into_memory_that_the_process_used_before() -> None:
    """The allocator would hand it out again, written over with zeros: all of it resident."""
    found = subprocess.run([sys.executable, "-c", USED_BEFORE], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == ["0", "0"]


def test_a_small_cache_is_not_worth_a_thread() -> None:
    assert populate([empty_pages((64,), torch.float32, torch.device("cpu"))]) is None

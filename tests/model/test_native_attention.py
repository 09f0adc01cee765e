"""Attention of the kernels: against float64, against the plain torch backend, and against itself alone, bit by bit."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
import torch
from native_kernels import HERE, drawn, team
from torch import Tensor

from jitney_worker.engine.protocol import BlockCopy, ScheduledSequence
from jitney_worker.engine.sequence import Sequence, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.model.attention import AttentionBackend, TorchAttention
from jitney_worker.model.batch import step_batch
from jitney_worker.model.cache import KVCache
from jitney_worker.model.layers import AttentionLayer, Reach
from jitney_worker.model.native.attention import NativeAttention
from jitney_worker.model.native.cache import TiledCache

CPU = torch.device("cpu")
SHAPES = {
    "group-1": AttentionLayer(2, 2, 8, 8, 0.35),
    "group-2": AttentionLayer(4, 2, 64, 64, 0.125),
    "group-3": AttentionLayer(6, 2, 80, 80, 0.1),
    "group-5": AttentionLayer(5, 1, 96, 96, 0.1),
    "group-7": AttentionLayer(7, 1, 128, 128, 0.09),
    "group-8": AttentionLayer(8, 1, 256, 256, 0.0625),
    "group-16": AttentionLayer(16, 1, 64, 64, 0.125),
    "narrow-values": AttentionLayer(4, 2, 192, 128, 0.07),
    "odd-widths": AttentionLayer(6, 3, 12, 5, 0.3, softcap=2.0),
    "widest": AttentionLayer(2, 1, 512, 512, 0.04),
    "window": AttentionLayer(4, 2, 64, 64, 0.125, Reach(window=24)),
    "wide-window": AttentionLayer(4, 2, 64, 64, 0.125, Reach(window=700)),
    "chunks": AttentionLayer(4, 1, 32, 32, 0.2, Reach(chunk=48)),
    "softcap": AttentionLayer(4, 2, 64, 64, 0.5, Reach(window=40), softcap=3.0),
    "sinks": AttentionLayer(4, 2, 64, 64, 0.125),
    "sinks-window": AttentionLayer(8, 2, 32, 32, 0.2, Reach(window=128)),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES = {torch.float32: {"atol": 4e-6, "rtol": 2e-5}, torch.bfloat16: {"atol": 1.5e-2, "rtol": 1.6e-2}}
"""bfloat16 has 8 bits, and weights are rounded to them as the result is."""

Numbers = tuple[Tensor, Tensor, Tensor]


def lengths_of(shape: AttentionLayer) -> tuple[int, ...]:
    """Within a tile, a tile and one, and beyond one stretch of 512 positions, or two of them where that is cheap."""
    return (1, 17, 40, 1_130 if shape.num_heads * shape.key_dim <= 256 else 540)


def sinks_of(name: str) -> Tensor | None:
    return torch.linspace(-2.0, 3.0, SHAPES[name].num_heads) if name.startswith("sinks") else None


@cache
def numbers(name: str, dtype: torch.dtype, length: int) -> Numbers:
    """Queries, keys and values of a sequence."""
    shape, seed = SHAPES[name], length + 5
    return (
        drawn(length, shape.num_heads, shape.key_dim, seed=seed, dtype=dtype),
        drawn(length, shape.num_kv_heads, shape.key_dim, seed=seed + 1, dtype=dtype),
        drawn(length, shape.num_kv_heads, shape.value_dim, seed=seed + 2, dtype=dtype),
    )


@cache
def written_out(name: str, dtype: torch.dtype, length: int) -> Tensor:
    """[length, num_heads * value_dim] as the papers write it, in float64."""
    shape, sinks = SHAPES[name], sinks_of(name)
    queries, keys, values = (one.double() for one in numbers(name, dtype, length))
    positions = torch.arange(length)
    seen = positions <= positions[:, None]
    if shape.reach.window is not None:
        seen &= positions > positions[:, None] - shape.reach.window
    if shape.reach.chunk is not None:
        seen &= positions // shape.reach.chunk == positions[:, None] // shape.reach.chunk
    out = torch.empty(length, shape.num_heads, shape.value_dim, dtype=torch.float64)
    for head in range(shape.num_heads):
        at = head // (shape.num_heads // shape.num_kv_heads)
        scores = queries[:, head] @ keys[:, at].T * shape.scale
        if shape.softcap is not None:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        weights = scores.exp() * seen
        total = weights.sum(dim=1, keepdim=True) + (0.0 if sinks is None else sinks[head].double().exp())
        out[:, head] = weights / total @ values[:, at]
    return out.flatten(1)


class Talk:
    """A sequence whose blocks lie where they come."""

    def __init__(self, name: str, dtype: torch.dtype, length: int, blocks: list[int], block_size: int) -> None:
        request = SequenceRequest(SequenceId(f"s/{length}"), (0,) * length, SequenceParams(1), (0, 0.0, 0, 0))
        self.name, self.length = name, length
        self.sequence = Sequence.of(request)
        self.sequence.block_table = [blocks.pop() for _ in range(-(-length // block_size))]
        self.numbers = numbers(name, dtype, length)


Part = tuple[Talk, int, int]


def attend(backend: AttentionBackend, cache: KVCache | TiledCache, parts: list[Part]) -> dict[Talk, Tensor]:
    """One step; what each part's queries got."""
    scheduled = [ScheduledSequence(talk.sequence, start, stop, True) for talk, start, stop in parts]
    batch = step_batch(scheduled, block_size=cache.block_size, scratch_block=cache.scratch_block, device=CPU)
    cache.wipe(batch.fresh_blocks)
    ordered = sorted(parts, key=lambda part: part[2] - part[1] > 1)
    given = [torch.cat([talk.numbers[i][start:stop] for talk, start, stop in ordered]) for i in range(3)]
    found = backend.plan(batch).attend(0, given[0], given[1], given[2], sinks_of(parts[0][0].name))
    sizes = [stop - start for _, start, stop in ordered]
    return {part[0]: rows for part, rows in zip(ordered, found.split(sizes), strict=True)}


def in_mixed_steps(
    backend: AttentionBackend, cache: KVCache | TiledCache, name: str, dtype: torch.dtype, seed: int
) -> dict[int, Tensor]:
    """Several sequences at once in chunks of many sizes and single tokens, in random order; by length."""
    draw = random.Random(seed)
    blocks = list(range(cache.num_blocks))
    draw.shuffle(blocks)
    talks = [Talk(name, dtype, length, blocks, cache.block_size) for length in lengths_of(SHAPES[name])]
    done: dict[Talk, int] = dict.fromkeys(talks, 0)
    found: dict[Talk, list[Tensor]] = {talk: [] for talk in talks}
    while any(done[talk] < talk.length for talk in talks):
        left = [talk for talk in talks if done[talk] < talk.length and draw.random() < 0.8]
        draw.shuffle(left)
        sizes = [draw.choice([1, 1, 2, 7, 130, 300]) for _ in left]
        parts = [
            (talk, done[talk], min(talk.length, done[talk] + size)) for talk, size in zip(left, sizes, strict=True)
        ]
        if not parts:
            continue
        for talk, rows in attend(backend, cache, parts).items():
            found[talk].append(rows)
        done |= {talk: stop for talk, _, stop in parts}
    return {talk.length: torch.cat(found[talk]) for talk in talks}


def tiled(
    name: str, dtype: torch.dtype, block_size: int, level: str, num_threads: int = 2
) -> tuple[NativeAttention, TiledCache]:
    """A backend over a cache full of what a former owner left."""
    cache = TiledCache([SHAPES[name]], 1_400 // block_size, block_size, dtype)
    for pool in cache.pools.values():
        pool[:, : cache.num_blocks] = math.nan
    return NativeAttention(cache, team(level, num_threads)), cache


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_equal_float64_and_themselves_alone_to_the_last_bit(
    name: str, dtype: torch.dtype, level: str
) -> None:
    """Over blocks of 16, 32 and 64 tokens that were full of NaN, one after the other."""
    expected = {length: written_out(name, dtype, length) for length in lengths_of(SHAPES[name])}
    backend, cache = tiled(name, dtype, 16, level, num_threads=1)
    alone = {}
    for length, wanted in expected.items():
        talk = Talk(name, dtype, length, list(range(cache.num_blocks)), 16)
        alone[length] = attend(backend, cache, [(talk, 0, length)])[talk]
        torch.testing.assert_close(alone[length].double(), wanted, **TOLERANCES[dtype])
    for seed, block_size in enumerate((16, 32, 64)):
        for length, rows in in_mixed_steps(*tiled(name, dtype, block_size, level), name, dtype, seed).items():
            assert torch.equal(rows, alone[length]), (block_size, length)


@pytest.mark.parametrize("name", SHAPES)
def test_the_plain_backend_says_the_same(name: str) -> None:
    plain = KVCache([SHAPES[name]], 80, 16, torch.float32, CPU)
    expected = in_mixed_steps(TorchAttention(plain), plain, name, torch.float32, seed=7)
    found = in_mixed_steps(*tiled(name, torch.float32, 16, HERE[0]), name, torch.float32, seed=7)
    for length, rows in found.items():
        torch.testing.assert_close(rows, expected[length], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 31])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["group-2", "odd-widths"])
def test_a_copied_beginning_of_a_block_serves_as_the_original_does(
    name: str, dtype: torch.dtype, num_tokens: int
) -> None:
    """What lies behind it in the original does not come along: it may be NaN, and a mask lets NaN through."""
    backend, cache = tiled(name, dtype, 32, HERE[0])
    origin = Talk(name, dtype, 40, [3, 9], 32)
    expected = attend(backend, cache, [(origin, 0, 40)])[origin]
    for plane in cache.tokens(0, 9):
        plane[(torch.arange(32) >= num_tokens).view(plane.shape[:3])] = math.nan
    cache.copy([BlockCopy(9, 5, num_tokens)])
    heir = Talk(name, dtype, 40, [7, 5], 32)
    found = attend(backend, cache, [(heir, num_tokens, 40)])[heir]
    assert torch.equal(found, expected[num_tokens:])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["group-2", "odd-widths"])
def test_a_wiped_block_is_zero_everywhere_and_no_other_is_touched(name: str, dtype: torch.dtype) -> None:
    _, cache = tiled(name, dtype, 16, HERE[0])
    cache.wipe(torch.tensor([4, 2]))
    for pool in cache.pools.values():
        is_zero = (pool == 0).flatten(2).all(dim=2).all(dim=0)
        assert is_zero.nonzero().flatten().tolist() == [2, 4, cache.scratch_block]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["group-2", "odd-widths", "narrow-values"])
def test_keys_and_values_lie_where_the_cache_says(name: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    backend, cache = tiled(name, dtype, 32, HERE[0])
    talk = Talk(name, dtype, 40, [3, 9], 32)
    attend(backend, cache, [(talk, 0, 40)])
    keys, values = ((plane.flatten(3, -1).flatten(0, 2)) for plane in cache.tokens(0, 9))
    assert torch.equal(keys.view(32, shape.num_kv_heads, -1)[..., : shape.key_dim], talk.numbers[1][:32])
    assert torch.equal(values.view(32, shape.num_kv_heads, -1)[..., : shape.value_dim], talk.numbers[2][:32])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_query_without_a_number_spoils_no_other_row(dtype: torch.dtype) -> None:
    backend, cache = tiled("group-2", dtype, 16, HERE[0])
    talks = [Talk("group-2", dtype, 40, list(range(10 * i, 10 * i + 10)), 16) for i in range(3)]
    sound = attend(backend, cache, [(talk, 0, 40) for talk in talks])
    broken = talks[1].numbers[1].clone()
    broken[20] = math.nan
    talks[1].numbers = (talks[1].numbers[0], broken, talks[1].numbers[2])
    found = attend(backend, cache, [(talk, 0, 40) for talk in talks])
    assert found[talks[1]][20:].isnan().all()
    assert torch.equal(found[talks[1]][:20], sound[talks[1]][:20])
    assert all(torch.equal(found[talk], sound[talk]) for talk in (talks[0], talks[2]))


def test_numbers_of_another_kind_are_converted_and_of_another_shape_refused() -> None:
    """The kernels read as many bytes as the cache's kind has: more than a tensor of another one holds."""
    backend, cache = tiled("group-2", torch.bfloat16, 16, HERE[0])
    talk = Talk("group-2", torch.bfloat16, 17, list(range(10)), 16)
    expected = attend(backend, cache, [(talk, 0, 17)])[talk]
    talk.numbers = tuple(one.float() for one in talk.numbers)  # type: ignore[assignment]
    found = attend(backend, cache, [(talk, 0, 17)])[talk]
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.float())
    talk.numbers = (talk.numbers[0], talk.numbers[1][..., :60], talk.numbers[2])
    with pytest.raises(AssertionError, match="beyond what they are given"):
        attend(backend, cache, [(talk, 0, 17)])

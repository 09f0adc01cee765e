"""The reference backend against attention written out in float64, over caches filled in any order."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jitney_worker.engine.protocol import ScheduledSequence
from jitney_worker.engine.sequence import Sequence, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.model.attention import TorchAttention
from jitney_worker.model.batch import step_batch
from jitney_worker.model.cache import KVCache
from jitney_worker.model.config import ModelConfig

BLOCK_SIZE, NUM_BLOCKS = 4, 64
CPU = torch.device("cpu")


def plain_attention(queries: Tensor, keys: Tensor, values: Tensor, first: int, window: int | None) -> Tensor:
    """One sequence, one query after the other: softmax(q k / sqrt(d)) v over what each may see."""
    group = queries.shape[1] // keys.shape[1]
    result = torch.empty_like(queries, dtype=torch.float64)
    for i in range(queries.shape[0]):
        position = first + i
        start = 0 if window is None else max(0, position - window + 1)
        for head in range(queries.shape[1]):
            seen = keys[start : position + 1, head // group].double()
            weights = (seen @ queries[i, head].double() / math.sqrt(queries.shape[2])).softmax(-1)
            result[i, head] = weights @ values[start : position + 1, head // group].double()
    return result


class Conversation:
    """A sequence with random keys and values, and blocks scattered over the cache."""

    def __init__(self, index: int, length: int, free: list[int], config: ModelConfig) -> None:
        generator = torch.Generator().manual_seed(index)
        self.sequence = Sequence.of(
            SequenceRequest(SequenceId(f"s/{index}"), tuple(range(length)), SequenceParams(1), (0, 0.0, 0, 0))
        )
        self.sequence.block_table = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
        self.queries = torch.randn(length, config.num_heads, config.head_dim, generator=generator)
        self.keys = torch.randn(length, config.num_kv_heads, config.head_dim, generator=generator)
        self.values = torch.randn(length, config.num_kv_heads, config.head_dim, generator=generator)


@pytest.fixture
def config(tiny_llama: Path) -> ModelConfig:
    """Four heads over two KV heads; layer 0 sees everything, layer 1 the last seven tokens."""
    return dataclasses.replace(ModelConfig.of_directory(tiny_llama), windows=(None, 7))


@pytest.fixture
def cache(config: ModelConfig) -> KVCache:
    return KVCache(config, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)


@pytest.mark.parametrize("seed", range(12))
def test_mixed_steps_equal_plain_attention(config: ModelConfig, cache: KVCache, seed: int) -> None:
    """Chunks of all sizes and single tokens, of several sequences in one step, in random order."""
    draw = random.Random(seed)
    free = list(range(NUM_BLOCKS))
    draw.shuffle(free)
    talks = [Conversation(seed * 100 + i, draw.randint(1, 40), free, config) for i in range(5)]
    backend, computed = TorchAttention(config, cache), [0] * len(talks)
    while any(done < talk.sequence.num_tokens for done, talk in zip(computed, talks, strict=True)):
        parts = []
        for i, talk in enumerate(talks):
            left = talk.sequence.num_tokens - computed[i]
            if left and draw.random() < 0.8:
                parts.append((i, computed[i], computed[i] + draw.choice([1, 1, min(left, 5), left])))
        draw.shuffle(parts)
        if parts:
            check_step(backend, cache, config, talks, parts)
        for i, _, stop in parts:
            computed[i] = stop


def check_step(
    backend: TorchAttention,
    cache: KVCache,
    config: ModelConfig,
    talks: list[Conversation],
    parts: list[tuple[int, int, int]],
) -> None:
    scheduled = [ScheduledSequence(talks[i].sequence, start, stop, True) for i, start, stop in parts]
    batch = step_batch(scheduled, block_size=BLOCK_SIZE, scratch_block=cache.scratch_block, device=CPU)
    by_length = [part for part in parts if part[2] - part[1] == 1] + [part for part in parts if part[2] - part[1] > 1]

    def flat(which: str) -> Tensor:
        return torch.cat([getattr(talks[i], which)[start:stop] for i, start, stop in by_length])

    step = backend.plan(batch)
    for layer, window in enumerate(config.windows):
        attended = step.attend(layer, flat("queries"), flat("keys"), flat("values"))
        expected = [
            plain_attention(talks[i].queries[start:stop], talks[i].keys, talks[i].values, start, window)
            for i, start, stop in by_length
        ]
        torch.testing.assert_close(attended.double(), torch.cat(expected).flatten(1), atol=2e-6, rtol=1e-5)


def test_the_last_tokens_are_found_in_the_order_of_the_schedule(config: ModelConfig) -> None:
    free = list(range(NUM_BLOCKS))
    talks = [Conversation(i, 20, free, config).sequence for i in range(4)]
    plan = [(0, 0, 20, True), (1, 4, 5, True), (2, 0, 3, False), (3, 19, 20, True)]
    scheduled = [ScheduledSequence(talks[i], start, stop, samples) for i, start, stop, samples in plan]
    batch = step_batch(scheduled, block_size=BLOCK_SIZE, scratch_block=NUM_BLOCKS, device=CPU)
    assert batch.positions[batch.sample_at].tolist() == [19, 4, 19]
    assert batch.token_ids.tolist() == [4, 19, *range(20), *range(3)]
    assert (batch.num_decodes, batch.longest_decode) == (2, 20)


def test_a_block_is_wiped_when_its_first_slot_is_written_and_never_later(config: ModelConfig) -> None:
    sequence = Conversation(0, 30, list(range(NUM_BLOCKS)), config).sequence
    table = sequence.block_table

    def fresh(start: int, stop: int) -> list[int]:
        scheduled = [ScheduledSequence(sequence, start, stop, False)]
        batch = step_batch(scheduled, block_size=BLOCK_SIZE, scratch_block=NUM_BLOCKS, device=CPU)
        return batch.fresh_blocks.tolist()

    assert fresh(0, 9) == table[:3]
    assert fresh(9, 12) == []
    assert fresh(12, 13) == table[3:4]


def test_what_a_former_owner_left_in_a_block_reaches_nobody(config: ModelConfig, cache: KVCache) -> None:
    """A mask alone would let NaN through, since 0 * NaN is NaN."""
    cache.kv[:, :, :NUM_BLOCKS] = math.nan
    talk = Conversation(1, 6, list(range(NUM_BLOCKS)), config)
    backend = TorchAttention(config, cache)
    for start, stop in ((0, 5), (5, 6)):
        scheduled = [ScheduledSequence(talk.sequence, start, stop, True)]
        batch = step_batch(scheduled, block_size=BLOCK_SIZE, scratch_block=cache.scratch_block, device=CPU)
        cache.wipe(batch.fresh_blocks)
        attended = backend.plan(batch).attend(
            0, talk.queries[start:stop], talk.keys[start:stop], talk.values[start:stop]
        )
        assert attended.isfinite().all()

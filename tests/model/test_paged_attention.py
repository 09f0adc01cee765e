"""The reference backend against attention written out in float64, over caches filled in any order."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from jitney_worker.engine.protocol import ScheduledSequence
from jitney_worker.engine.sequence import Sequence, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.model.attention import TorchAttention
from jitney_worker.model.batch import step_batch
from jitney_worker.model.cache import KVCache
from jitney_worker.model.layers import AttentionLayer, Reach

BLOCK_SIZE, NUM_BLOCKS = 4, 64
CPU = torch.device("cpu")


LAYERS = (
    AttentionLayer(4, 2, 8, 8, 8**-0.5),
    AttentionLayer(4, 2, 8, 8, 8**-0.5, Reach(window=7)),
    AttentionLayer(4, 1, 8, 8, 0.7, Reach(chunk=6)),
    AttentionLayer(6, 3, 12, 5, 0.3, softcap=2.0),
    AttentionLayer(4, 4, 8, 8, 0.4, Reach(window=7)),
)
"""Plain, windowed, in chunks, with K and V of different widths and a soft cap, and (the last) with sinks."""

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def plain_attention(
    shape: AttentionLayer, queries: Tensor, keys: Tensor, values: Tensor, first: int, sinks: Tensor | None
) -> Tensor:
    """One sequence, one query after the other, as the papers write it, in float64."""
    result = torch.empty(len(queries), shape.num_heads, shape.value_dim, dtype=torch.float64)
    for i in range(len(queries)):
        position = first + i
        start = 0
        if shape.reach.window is not None:
            start = max(0, position - shape.reach.window + 1)
        if shape.reach.chunk is not None:
            start = position - position % shape.reach.chunk
        for head in range(shape.num_heads):
            at = head // (shape.num_heads // shape.num_kv_heads)
            scores = keys[start : position + 1, at].double() @ queries[i, head].double() * shape.scale
            if shape.softcap is not None:
                scores = torch.tanh(scores / shape.softcap) * shape.softcap
            weights = scores.exp() / (scores.exp().sum() + (0 if sinks is None else sinks[head].double().exp()))
            result[i, head] = weights @ values[start : position + 1, at].double()
    return result


class Conversation:
    """A sequence with random queries, keys and values for every layer, and blocks scattered over the cache."""

    def __init__(self, index: int, length: int, free: list[int]) -> None:
        generator = torch.Generator().manual_seed(index)
        self.sequence = Sequence.of(
            SequenceRequest(SequenceId(f"s/{index}"), tuple(range(length)), SequenceParams(1), (0, 0.0, 0, 0))
        )
        self.sequence.block_table = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
        self.queries, self.keys, self.values = [], [], []
        for shape in LAYERS:
            self.queries.append(torch.randn(length, shape.num_heads, shape.key_dim, generator=generator))
            self.keys.append(torch.randn(length, shape.num_kv_heads, shape.key_dim, generator=generator))
            self.values.append(torch.randn(length, shape.num_kv_heads, shape.value_dim, generator=generator))


@pytest.fixture
def cache() -> KVCache:
    return KVCache(LAYERS, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)


@pytest.mark.parametrize("seed", range(12))
def test_mixed_steps_equal_plain_attention(cache: KVCache, seed: int) -> None:
    """Chunks of all sizes and single tokens, of several sequences in one step, in random order."""
    draw = random.Random(seed)
    free = list(range(NUM_BLOCKS))
    draw.shuffle(free)
    talks = [Conversation(seed * 100 + i, draw.randint(1, 40), free) for i in range(5)]
    backend, computed = TorchAttention(cache), [0] * len(talks)
    while any(done < talk.sequence.num_tokens for done, talk in zip(computed, talks, strict=True)):
        parts = []
        for i, talk in enumerate(talks):
            left = talk.sequence.num_tokens - computed[i]
            if left and draw.random() < 0.8:
                parts.append((i, computed[i], computed[i] + draw.choice([1, 1, min(left, 5), left])))
        draw.shuffle(parts)
        if parts:
            check_step(backend, cache, talks, parts)
        for i, _, stop in parts:
            computed[i] = stop


def check_step(
    backend: TorchAttention,
    cache: KVCache,
    talks: list[Conversation],
    parts: list[tuple[int, int, int]],
) -> None:
    scheduled = [ScheduledSequence(talks[i].sequence, start, stop, True) for i, start, stop in parts]
    batch = step_batch(scheduled, block_size=BLOCK_SIZE, scratch_block=cache.scratch_block, device=CPU)
    by_length = [part for part in parts if part[2] - part[1] == 1] + [part for part in parts if part[2] - part[1] > 1]

    step = backend.plan(batch)
    for layer, shape in enumerate(LAYERS):

        def flat(which: str, layer: int = layer) -> Tensor:
            return torch.cat([getattr(talks[i], which)[layer][start:stop] for i, start, stop in by_length])

        sinks = SINKS if layer == len(LAYERS) - 1 else None
        attended = step.attend(layer, flat("queries"), flat("keys"), flat("values"), sinks)
        expected = [
            plain_attention(
                shape,
                talks[i].queries[layer][start:stop],
                talks[i].keys[layer],
                talks[i].values[layer],
                start,
                sinks,
            )
            for i, start, stop in by_length
        ]
        torch.testing.assert_close(attended.double(), torch.cat(expected).flatten(1), atol=2e-6, rtol=1e-5)


def test_the_last_tokens_are_found_in_the_order_of_the_schedule() -> None:
    free = list(range(NUM_BLOCKS))
    talks = [Conversation(i, 20, free).sequence for i in range(4)]
    plan = [(0, 0, 20, True), (1, 4, 5, True), (2, 0, 3, False), (3, 19, 20, True)]
    scheduled = [ScheduledSequence(talks[i], start, stop, samples) for i, start, stop, samples in plan]
    batch = step_batch(scheduled, block_size=BLOCK_SIZE, scratch_block=NUM_BLOCKS, device=CPU)
    assert batch.positions[batch.sample_at].tolist() == [19, 4, 19]
    assert batch.token_ids.tolist() == [4, 19, *range(20), *range(3)]
    assert (batch.num_decodes, batch.longest_decode) == (2, 20)


def test_a_block_is_wiped_when_its_first_slot_is_written_and_never_later() -> None:
    sequence = Conversation(0, 30, list(range(NUM_BLOCKS))).sequence
    table = sequence.block_table

    def fresh(start: int, stop: int) -> list[int]:
        scheduled = [ScheduledSequence(sequence, start, stop, False)]
        batch = step_batch(scheduled, block_size=BLOCK_SIZE, scratch_block=NUM_BLOCKS, device=CPU)
        return batch.fresh_blocks.tolist()

    assert fresh(0, 9) == table[:3]
    assert fresh(9, 12) == []
    assert fresh(12, 13) == table[3:4]


def test_what_a_former_owner_left_in_a_block_reaches_nobody(cache: KVCache) -> None:
    """A mask alone would let NaN through, since 0 * NaN is NaN."""
    for pool in cache.pools.values():
        pool[:, :NUM_BLOCKS] = math.nan
    talk = Conversation(1, 6, list(range(NUM_BLOCKS)))
    backend = TorchAttention(cache)
    for start, stop in ((0, 5), (5, 6)):
        scheduled = [ScheduledSequence(talk.sequence, start, stop, True)]
        batch = step_batch(scheduled, block_size=BLOCK_SIZE, scratch_block=cache.scratch_block, device=CPU)
        cache.wipe(batch.fresh_blocks)
        attended = backend.plan(batch).attend(
            0, talk.queries[0][start:stop], talk.keys[0][start:stop], talk.values[0][start:stop]
        )
        assert attended.isfinite().all()

"""The prefix cache: a hit is never wrong, is counted, and costs the pool nothing."""

from __future__ import annotations

import random

import pytest
from scripted_model import HashModel, request, run, settings, solo

from jitney_worker.engine.blocks import BlockManager
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.sequence import Sequence


def eight_bits(payload: bytes) -> bytes:
    """A hash that collides all the time."""
    return bytes([sum(payload) % 256])


def cached_tokens(engine: LocalEngine, name: str, prompt: list[int], **options: str) -> int:
    one = request(name, prompt, 5, **options)  # type: ignore[arg-type]
    outcome = run(engine, [one])
    assert outcome.said(name) == solo(one)
    return outcome.endings[one.id].num_cached_tokens


@pytest.mark.parametrize("num_tokens", [95, 96, 97, 100, 111, 112, 113])
def test_the_same_prompt_four_times_gets_the_same_answer_and_hits_all_but_the_last_token(num_tokens: int) -> None:
    """B15"""
    engine = LocalEngine(settings(), HashModel())
    prompt = list(range(num_tokens))
    hits = [cached_tokens(engine, f"s{n}", prompt) for n in range(4)]
    assert hits == [0] + [(num_tokens - 1) // 16 * 16] * 3


def test_a_prompt_whose_blocks_were_evicted_and_used_again_gets_the_same_answer() -> None:
    """B15: the pool is so small that the second prompt overwrites some of the first one's blocks."""
    engine = LocalEngine(settings(num_blocks=8), HashModel())
    first, second = list(range(100)), list(range(60, -20, -1))
    second = [abs(token_id) for token_id in second]
    assert cached_tokens(engine, "a1", first) == 0
    assert cached_tokens(engine, "b1", second) == 0
    assert cached_tokens(engine, "a2", first) == 32, "the head of the first prompt outlived its tail"
    assert cached_tokens(engine, "a3", first) == 96


def test_with_the_cache_off_nothing_is_ever_hit() -> None:
    engine = LocalEngine(settings(enable_prefix_caching=False), HashModel())
    assert [cached_tokens(engine, f"s{n}", list(range(100))) for n in range(3)] == [0, 0, 0]


def test_output_is_cached_as_well_and_a_conversation_goes_on_from_it() -> None:
    engine = LocalEngine(settings(), HashModel())
    opening = request("opening", 40, 30)
    said, _ = run(engine, [opening]).said("opening")
    assert cached_tokens(engine, "reply", [*opening.prompt_ids, *said, 1, 2, 3]) == 64


def test_sequences_that_share_a_prefix_share_its_blocks_while_they_run() -> None:
    engine = LocalEngine(settings(num_blocks=20), HashModel())
    prompt = list(range(64))
    engine.add(request("a", [*prompt, 1], 20, arrival=0))
    engine.step()
    free = engine.capacity().num_free_blocks
    engine.add(request("b", [*prompt, 2], 20, arrival=1))
    engine.step()
    assert engine.capacity().num_free_blocks == free - 1
    run(engine)
    assert engine.capacity().num_free_blocks == 20


def test_another_salt_hits_nothing() -> None:
    engine = LocalEngine(settings(), HashModel())
    prompt = list(range(50))
    assert cached_tokens(engine, "a", prompt, salt="one tenant") == 0
    assert cached_tokens(engine, "b", prompt, salt="another tenant") == 0
    assert cached_tokens(engine, "c", prompt) == 0
    assert cached_tokens(engine, "d", prompt, salt="one tenant") == 48


def test_another_salt_hits_nothing_even_if_the_hash_collides() -> None:
    """B14: tenants are kept apart by the salt itself, not by a digest of it."""
    engine = LocalEngine(settings(), HashModel(), hash_block=lambda payload: b"\0")
    prompt = list(range(20))
    assert cached_tokens(engine, "a", prompt, salt="one tenant") == 0
    assert cached_tokens(engine, "b", prompt, salt="another tenant") == 0


def test_prompts_that_differ_in_one_high_byte_are_told_apart() -> None:
    """B14: token 65 and token 321 share their low byte, all that this hash looks at."""
    engine = LocalEngine(settings(), HashModel(), hash_block=lambda payload: bytes([sum(payload[1::8]) % 256]))
    assert cached_tokens(engine, "a", [65] * 32) == 0
    assert cached_tokens(engine, "b", [321] * 32) == 0
    assert cached_tokens(engine, "c", [65] * 31 + [321]) == 0


def test_a_thousand_prompts_under_a_hash_of_eight_bits_are_never_mixed_up() -> None:
    """B14: a hit is confirmed against the tokens and their parent, so a collision costs a miss and no more."""
    chance = random.Random(14)
    engine = LocalEngine(
        settings(num_blocks=60, block_size=2, max_num_seqs=4), HashModel(block_size=2), hash_block=eight_bits
    )
    requests = [
        request(f"s{n}", [chance.randrange(3) for _ in range(chance.randrange(1, 12))], 4, arrival=n)
        for n in range(1_000)
    ]
    outcome = run(engine, requests)
    assert [outcome.said(one.id) for one in requests] == [solo(one) for one in requests]
    hits = sum(delta.num_cached_tokens > 0 for delta in outcome.endings.values())
    assert hits > 200, "the collisions must not have switched the cache off"


def test_a_child_is_not_hit_under_a_parent_that_merely_has_the_same_hash() -> None:
    """B14: `xy` was cached after `x`; then `w` took the place of `x`, whose digest it shares."""
    same = {(1, 1): b"P", (2, 2): b"P", (3, 3): b"C"}

    def chosen(payload: bytes) -> bytes:
        return same.get((payload[-16], payload[-8]) if len(payload) >= 16 else (0, 0), b"R")

    blocks = BlockManager(8, 2, hash_block=chosen)

    def visit(prompt: list[int]) -> int:
        sequence = Sequence.of(request("s", prompt))
        assert blocks.admit(sequence, reserve=0)
        hits, sequence.num_computed_tokens = sequence.num_computed_tokens, len(prompt)
        blocks.enter(sequence)
        blocks.release(sequence)
        blocks.check([])
        return hits

    assert visit([1, 1, 3, 3, 9]) == 0
    assert visit([1, 1, 3, 3, 9]) == 4
    assert visit([2, 2, 9]) == 0
    assert visit([2, 2, 3, 3, 9]) == 2


def test_blank_blocks_are_taken_before_any_content_is_evicted() -> None:
    engine = LocalEngine(settings(num_blocks=10), HashModel())
    assert cached_tokens(engine, "a", list(range(65))) == 0
    for n in range(20):
        cached_tokens(engine, f"b{n}", [50 + n] * 10)
    assert cached_tokens(engine, "c", list(range(65))) == 64


def test_the_content_that_was_used_longest_ago_is_evicted_first() -> None:
    blocks = BlockManager(4, 2)

    def visit(prompt: list[int]) -> int:
        sequence = Sequence.of(request("s", prompt))
        assert blocks.admit(sequence, reserve=0)
        hits, sequence.num_computed_tokens = sequence.num_computed_tokens, len(prompt)
        blocks.enter(sequence)
        blocks.release(sequence)
        return hits

    assert [visit([10, 10, 1]), visit([20, 20, 1]), visit([30, 30, 1])] == [0, 0, 0]
    assert visit([10, 10, 1]) == 2
    assert visit([40, 40, 1]) == 0, "one blank block was left: nothing is evicted yet, `1` is never a full block"
    assert visit([50, 50, 1]) == 0
    assert visit([10, 10, 1]) == 2
    assert visit([20, 20, 1]) == 0


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        (lambda b, s: b._blank.append(b._blank[0]), "a block is free twice"),
        (lambda b, s: b._blank.pop(), r"free \+ used = total"),
        (lambda b, s: b._ref_counts.__setitem__(s.block_table[0], 2), "ref counts"),
        (lambda b, s: s.block_table.append(s.block_table[0]), "holds a block twice"),
        (lambda b, s: b._cache.forget(next(iter(b._cached))), "without content"),
        (lambda b, s: b._cache._blocks.clear(), "do not hold"),
    ],
)
def test_the_self_check_notices_damage(damage: object, law: str) -> None:
    blocks = BlockManager(8, 2)
    gone, here = Sequence.of(request("gone", 5)), Sequence.of(request("here", 5))
    for sequence in (gone, here):
        assert blocks.admit(sequence, reserve=0)
        sequence.num_computed_tokens = 5
        blocks.enter(sequence)
    blocks.release(gone)
    blocks.check([here])
    damage(blocks, here)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=law):
        blocks.check([here])

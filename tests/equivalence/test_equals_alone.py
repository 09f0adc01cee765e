"""Company, chunks, pages, cached prefixes, preemption and hand-over change nothing: float32 tokens equal the solo run.

Bug cases B01, B02, B14, B15 and B16 of the issue that asked for them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_driver import Ask, alone, engine_for, prompt, run, tokens, with_own_cache

from jitney_worker.model.runner import TorchRunner, load_runner
from jitney_worker.text.rules import StopRules
from jitney_worker.text.spelling import Speller
from jitney_worker.text.tokenizer import Tokenizer

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
KINDS = ("greedy", "seeded")


def asks_of(kind: str, lengths: list[int], *, max_tokens: int, first_seed: int = 0) -> list[Ask]:
    """One ask per prompt length, all greedy or each with a seed of its own."""
    return [
        Ask(
            prompt(length, seed=first_seed + i),
            max_tokens,
            options={} if kind == "greedy" else {**SAMPLED, "seed": first_seed + i, "choice": i % 3},
        )
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("num_neighbours", [1, 7, 31])
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_before_beside_and_after_change_nothing(tiny: TorchRunner, kind: str, num_neighbours: int) -> None:
    mine = asks_of(kind, [37], max_tokens=40)[0]
    expected = alone(tiny, mine)
    others = asks_of("seeded", [3 + 5 * i % 70 for i in range(num_neighbours)], max_tokens=30, first_seed=500)
    for place in (0, num_neighbours // 2, num_neighbours):
        everybody = [*others[:place], mine, *others[place:]]
        for every in (0, 2):
            engine = engine_for(tiny, max_num_seqs=40, max_num_batched_tokens=256)
            assert tokens(engine, everybody, every=every)[place] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_in_chunks_of_any_size_equal_whole_prompts(tiny: TorchRunner, kind: str) -> None:
    asks = asks_of(kind, [1, 15, 16, 17, 70, 129], max_tokens=20)
    expected = [alone(tiny, ask) for ask in asks]
    for budget, threshold in ((8, 0), (13, 0), (64, 5), (64, 16), (2_048, 1)):
        engine = engine_for(tiny, max_num_seqs=8, max_num_batched_tokens=budget, long_prefill_token_threshold=threshold)
        assert tokens(engine, asks) == expected, (budget, threshold)


def test_small_pages_equal_one_page_for_the_whole_sequence(tiny_directory: Callable[[str], Path]) -> None:
    """A block that holds everything is attention without pages."""
    asks = asks_of("greedy", [5, 40, 100], max_tokens=30) + asks_of("seeded", [9, 64], max_tokens=30)
    found = []
    for block_size, num_blocks in ((256, 5), (1, 900), (7, 130), (16, 60)):
        runner = load_runner(
            tiny_directory("mistral-window"),
            dtype="float32",
            device="cpu",
            num_blocks=num_blocks,
            block_size=block_size,
        )
        found.append(tokens(engine_for(runner, max_num_seqs=8, max_num_batched_tokens=50), asks))
    assert found[1:] == found[:1] * 3


def test_a_request_repeated_over_the_prefix_cache_equals_the_first(tiny: TorchRunner) -> None:
    """B15: also with the last block full, nearly full and just begun, and after its blocks served others."""
    for length in (100, 95, 96, 97, 111, 112, 113):
        ask = Ask(prompt(length, seed=length), max_tokens=12)
        expected = alone(tiny, ask)
        engine = engine_for(tiny, enable_prefix_caching=True, num_blocks=24)
        cached = []
        for _ in range(4):
            (answer,) = run(engine, [ask])
            assert answer.token_ids == expected, length
            cached.append(answer.num_cached_tokens)
        assert cached[0] == 0
        assert cached[1:] == [(length - 1) // 16 * 16] * 3
        evictors = [Ask(prompt(90, seed=1_000 + i), max_tokens=4) for i in range(5)]
        assert tokens(engine, evictors) == [alone(tiny, evictor) for evictor in evictors]
        (answer,) = run(engine, [ask])
        assert (answer.token_ids, answer.num_cached_tokens < cached[1]) == (expected, True), length


def test_sequences_that_share_a_prefix_while_they_run_equal_their_solo_runs(tiny: TorchRunner) -> None:
    shared = prompt(70, seed=1)
    asks = [
        dataclasses.replace(ask, prompt_ids=shared + ask.prompt_ids)
        for ask in asks_of("greedy", [1, 9, 30], max_tokens=25) + asks_of("seeded", [1, 2, 26], max_tokens=25)
    ]
    engine = engine_for(tiny, enable_prefix_caching=True, max_num_batched_tokens=64, max_num_seqs=8)
    answers = run(engine, asks, every=2)
    assert sum(answer.num_cached_tokens for answer in answers) >= 64
    assert [answer.token_ids for answer in answers] == [alone(tiny, ask) for ask in asks]


def test_a_hash_of_eight_bits_gives_no_wrong_prefix(tiny: TorchRunner) -> None:
    """B14: with 256 possible hashes nearly every lookup collides; only the token ids may decide."""
    asks = [Ask(prompt(33, seed=i % 60), max_tokens=2) for i in range(120)]
    twins = [Ask((65,) * 32 + (7,), 4), Ask((321,) * 32 + (7,), 4)]
    weak = engine_for(
        tiny, enable_prefix_caching=True, hash_block=lambda *parts: bytes([hash(parts) % 256]), max_num_seqs=4
    )
    for ask in asks + twins + twins:
        assert tokens(weak, [ask]) == [alone(tiny, ask)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_sequences_equal_undisturbed_ones(tiny: TorchRunner, kind: str, caching: bool) -> None:
    """B01: twelve blocks for four sequences that would need six each."""
    asks = asks_of(kind, [20, 20, 20, 20], max_tokens=64)
    engine = engine_for(tiny, num_blocks=12, enable_prefix_caching=caching, admission_reserve=0.0)
    answers = run(engine, asks)
    assert engine.snapshot().num_preemptions >= 2
    assert [answer.token_ids for answer in answers] == [alone(tiny, ask) for ask in asks]
    assert {(answer.finish_reason, len(answer.token_ids)) for answer in answers} == {("length", 64)}


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_sequences_with_stop_strings_end_where_undisturbed_ones_do(
    tiny: TorchRunner, tiny_directory: Callable[[str], Path], kind: str
) -> None:
    """Each stop string is text that the undisturbed answer has around its fortieth token."""
    tokenizer = Tokenizer.load(tiny_directory("llama"))
    plain = asks_of(kind, [20, 20, 20, 20], max_tokens=64)
    asks = [
        dataclasses.replace(ask, stop=(text_around(tokenizer, alone(tiny, ask), 40), "never said")) for ask in plain
    ]
    rules = StopRules(tokenizer)
    expected = [run(engine_for(with_own_cache(tiny), rules=rules), [ask], rules=rules)[0] for ask in asks]
    assert all(answer.finish_reason == "stop" and len(answer.token_ids) < 64 for answer in expected)
    assert any(len(answer.token_ids) > 30 for answer in expected)
    engine = engine_for(tiny, num_blocks=8, admission_reserve=0.0, rules=rules)
    answers = run(engine, asks, rules=rules)
    assert engine.snapshot().num_preemptions >= 2
    assert [(answer.token_ids, answer.finish_reason) for answer in answers] == [
        (answer.token_ids, "stop") for answer in expected
    ]


def text_around(tokenizer: Tokenizer, token_ids: list[int], place: int) -> str:
    """What three tokens at `place`, or the nearest before it, spell: three characters or more, all of them whole."""
    speller = Speller(tokenizer, ())
    pieces = [speller.push(token_id).text for token_id in token_ids]
    texts = ("".join(pieces[i : i + 3]) for i in range(place, -1, -1))
    return next(text for text in texts if len(text) > 2 and "\ufffd" not in text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_prompt_preempted_after_two_hundred_tokens_equals_its_solo_run(tiny: TorchRunner, kind: str) -> None:
    """B02 a: what has to be computed again is long although the prompt was not."""
    asks = asks_of(kind, [3, 3], max_tokens=260)
    engine = engine_for(tiny, num_blocks=26, admission_reserve=0.0, max_num_batched_tokens=64)
    answers = run(engine, asks)
    assert engine.snapshot().num_preemptions >= 1
    assert [answer.token_ids for answer in answers] == [alone(tiny, ask) for ask in asks]


@pytest.mark.parametrize("num_blocks", [6, 7, 8, 9, 10, 11])
def test_many_preemptions_at_many_lengths_change_nothing(tiny: TorchRunner, num_blocks: int) -> None:
    asks = asks_of("seeded", [1, 14, 15, 16, 17, 30], max_tokens=48) + asks_of("greedy", [31, 32], max_tokens=48)
    engine = engine_for(tiny, num_blocks=num_blocks, admission_reserve=0.0, max_num_batched_tokens=40, max_num_seqs=8)
    found = tokens(engine, asks)
    assert engine.snapshot().num_preemptions > 3
    assert found == [alone(tiny, ask) for ask in asks]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_handed_over_at_any_length_continues_as_its_solo_run(tiny: TorchRunner, kind: str) -> None:
    """B02 b: prefill of prompt and output around block boundaries, as after a preemption or a dead worker."""
    ask = asks_of(kind, [1], max_tokens=40)[0]
    expected = alone(tiny, ask)
    for total, caching in itertools.product((2, 15, 16, 17, 31, 32, 33), (False, True)):
        done = total - 1
        resumed = dataclasses.replace(ask, output_ids=tuple(expected[:done]))
        engine = engine_for(tiny, enable_prefix_caching=caching)
        assert tokens(engine, [resumed]) == [expected[done:]], total


def test_seeds_decide_and_only_seeds(tiny: TorchRunner) -> None:
    """The same seed gives the same tokens again; seed and choice each give others."""
    base = asks_of("seeded", [12], max_tokens=24)[0]
    variants = [{}, {}, {"seed": 1}, {"choice": 1}, {"seed": 1, "choice": 1}]
    asks = [dataclasses.replace(base, options={**base.options, **variant}) for variant in variants]
    found = tokens(engine_for(tiny), asks)
    assert found[0] == found[1]
    assert len(set(map(tuple, found))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_smollm2_preempted_chunked_and_batched_equals_alone(smollm2: TorchRunner, kind: str) -> None:
    asks = [
        dataclasses.replace(ask, prompt_ids=prompt(len(ask.prompt_ids), seed=i, vocab_size=49_152))
        for i, ask in enumerate(asks_of(kind, [4, 9, 14], max_tokens=28))
    ]
    expected = [alone(smollm2, ask) for ask in asks]
    engine = engine_for(smollm2, num_blocks=5, admission_reserve=0.0, max_num_batched_tokens=8, max_num_seqs=4)
    assert tokens(engine, asks) == expected
    assert engine.snapshot().num_preemptions > 0

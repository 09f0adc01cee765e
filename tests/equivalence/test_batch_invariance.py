"""What a row gets from the kernels is the same to the last bit, whoever is beside it and however its tokens are cut.

In bfloat16 and int8 too, at every level of the CPU's instructions, and so through the engine: answers equal the solo
ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from engine_driver import Answer, Ask, engine_for, prompt, run, with_own_cache
from torch import Tensor
from variants import VARIANTS

from jitney_worker.engine.protocol import ScheduledSequence
from jitney_worker.engine.sequence import Sequence as EngineSequence
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest
from jitney_worker.model.batch import step_batch
from jitney_worker.model.native.build import LEVELS, level
from jitney_worker.model.native.library import Team, kernels
from jitney_worker.model.runner import DTYPES, TorchRunner, load_decoder, load_runner, runner_over

HERE = tuple(LEVELS)[tuple(LEVELS).index(level()) :]
KINDS = ("bfloat16", "float32", "int8")
CPU = torch.device("cpu")
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}


@cache
def team_of(name: str, num_threads: int) -> Team:
    return Team(kernels(name), num_threads)


def runner_at(directory: Path, name: str, kind: str, num_threads: int = 2, num_blocks: int = 400) -> TorchRunner:
    """A model with the kernels of one level. kind: of DTYPES, or int8 over bfloat16."""
    dtype = DTYPES.get(kind, torch.bfloat16)
    team = team_of(name, num_threads)
    decoder = load_decoder(directory, dtype, CPU, team=team, quantization="int8" if kind == "int8" else "none")
    return runner_over(decoder, num_blocks, 16, dtype, CPU, team)


class Talk:
    """A sequence of given tokens in blocks of its own."""

    def __init__(self, token_ids: Sequence[int], blocks: list[int]) -> None:
        request = SequenceRequest(SequenceId("s/0"), tuple(token_ids), SequenceParams(1), (0, 0.0, 0, 0))
        self.sequence = EngineSequence.of(request)
        self.sequence.block_table = [blocks.pop() for _ in range(-(-len(token_ids) // 16))]

    def part(self, start: int, stop: int) -> ScheduledSequence:
        return ScheduledSequence(self.sequence, start, stop, True)


def step(runner: TorchRunner, *parts: ScheduledSequence) -> list[Tensor]:
    """Hidden states of each part's tokens, and the logits of all of them beside each other."""
    batch = step_batch(parts, block_size=16, scratch_block=runner.cache.scratch_block, device=CPU)
    with torch.inference_mode():
        runner.cache.wipe(batch.fresh_blocks)
        hidden = runner.decoder.forward(batch.token_ids, batch.positions, runner.attention.plan(batch))
        both = torch.cat((hidden, runner.decoder.logits(hidden)), dim=1)
    lengths = [part.stop - part.start for part in parts]
    return [both[first : first + length] for first, length in zip(batch.first_at, lengths, strict=True)]


def in_steps(runner: TorchRunner, token_ids: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """All of a sequence, alone, in chunks of the given sizes over and over."""
    talk, done, found = Talk(token_ids, list(range(runner.num_blocks))), 0, []
    while done < len(token_ids):
        stop = min(len(token_ids), done + sizes[len(found) % len(sizes)])
        found.append(step(runner, talk.part(done, stop))[0])
        done = stop
    return torch.cat(found)


def in_company(runner: TorchRunner, token_ids: Sequence[int], num_others: int) -> Tensor:
    """A sequence in three parts, the last one token long, each beside others of many lengths and single tokens."""
    blocks = list(range(runner.num_blocks))
    mine = Talk(token_ids, blocks)
    others = [Talk(prompt(4 + i % 9, seed=100 + i), blocks) for i in range(num_others)]
    cuts = (0, len(token_ids) // 3, len(token_ids) - 1, len(token_ids))
    found = []
    for turn, (start, stop) in enumerate(itertools.pairwise(cuts)):
        beside = [other.part(turn, turn + 1 if (turn + i) % 2 else turn + 2) for i, other in enumerate(others)]
        place = turn * len(beside) // 2
        found.append(step(runner, *beside[:place], mine.part(start, stop), *beside[place:])[place])
    return torch.cat(found)


def assert_the_same_bits(make: Callable[[int], TorchRunner], token_ids: Sequence[int]) -> None:
    runner = make(2)
    whole = in_steps(runner, token_ids, [len(token_ids)])
    assert whole.isfinite().all()
    assert torch.equal(in_steps(runner, token_ids, [1]), whole), "token by token"
    for sizes in ((7, 1, 13, 2), (33, 3), (16,)):
        assert torch.equal(in_steps(runner, token_ids, sizes), whole), sizes
    for num_others in (1, 63):
        assert torch.equal(in_company(runner, token_ids, num_others), whole), num_others
    for num_threads in (1, 3):
        other = make(num_threads)
        assert torch.equal(in_steps(other, token_ids, [29]), whole), f"{num_threads} threads"
        assert torch.equal(in_company(other, token_ids, 20), whole), f"{num_threads} threads in company"


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_company_chunks_and_threads_change_no_bit_of_a_tiny_model(
    tiny_directory: Callable[[str], Path], variant: str, kind: str, name: str
) -> None:
    directory = tiny_directory(variant)
    assert_the_same_bits(lambda num_threads: runner_at(directory, name, kind, num_threads), prompt(75, seed=3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_company_chunks_and_threads_change_no_bit_of_smollm2(smollm2_directory: Path, kind: str) -> None:
    assert_the_same_bits(
        lambda num_threads: runner_at(smollm2_directory, level(), kind, num_threads),
        prompt(75, seed=3, vocab_size=49_152),
    )


@pytest.fixture(scope="module", params=["bfloat16", "int8"])
def invariant(request: pytest.FixtureRequest, tiny_directory: Callable[[str], Path]) -> TorchRunner:
    """A tiny model whose layers attend by turns to a window and to everything, as a worker would load it."""
    runner = load_runner(
        tiny_directory("qwen2-window"),
        dtype="bfloat16",
        device="cpu",
        num_blocks=200,
        quantization="none" if request.param == "bfloat16" else "int8",
        batch_invariant=True,
    )
    assert runner.is_batch_invariant
    return runner


def asks(lengths: Sequence[int], max_tokens: int) -> list[Ask]:
    """Greedy and seeded by turns, all with log probabilities."""
    return [
        Ask(
            prompt(length, seed=i),
            max_tokens,
            options={**({} if i % 2 else {**SAMPLED, "seed": i}), "num_logprobs": 1},
        )
        for i, length in enumerate(lengths)
    ]


def alone(runner: TorchRunner, ask: Ask) -> Answer:
    return run(engine_for(with_own_cache(runner), max_num_batched_tokens=4_096), [ask])[0]


def said(answers: Sequence[Answer]) -> list[tuple[list[int], list[float], str | None, str | None]]:
    return [(one.token_ids, one.logprobs, one.finish_reason, one.error) for one in answers]


def test_answers_in_a_batch_of_chunks_equal_the_solo_ones(invariant: TorchRunner) -> None:
    everybody = asks([1, 15, 16, 17, 40, 70, 129], max_tokens=24)
    expected = said([alone(invariant, ask) for ask in everybody])
    assert {len(answer[1]) for answer in expected} == {24}
    for budget, every in ((9, 0), (64, 0), (64, 2), (2_048, 3)):
        engine = engine_for(with_own_cache(invariant, 80), max_num_seqs=8, max_num_batched_tokens=budget)
        assert said(run(engine, everybody, every=every)) == expected, (budget, every)


def test_preempted_answers_equal_undisturbed_ones(invariant: TorchRunner) -> None:
    everybody = asks([20, 20, 20, 20], max_tokens=64)
    engine = engine_for(with_own_cache(invariant), num_blocks=12, admission_reserve=0.0)
    answers = run(engine, everybody)
    assert engine.snapshot().num_preemptions >= 2
    assert said(answers) == said([alone(invariant, ask) for ask in everybody])


def test_answers_over_a_cached_prefix_equal_those_that_compute_it(invariant: TorchRunner) -> None:
    shared = prompt(70, seed=1)
    everybody = [dataclasses.replace(ask, prompt_ids=shared + ask.prompt_ids) for ask in asks([1, 9, 30, 2], 20)]
    engine = engine_for(with_own_cache(invariant, 80), enable_prefix_caching=True, max_num_batched_tokens=64)
    expected = said([alone(invariant, ask) for ask in everybody])
    for _ in range(2):
        answers = run(engine, everybody, every=2)
        assert said(answers) == expected
    assert all(answer.num_cached_tokens >= 64 for answer in answers)


@pytest.mark.parametrize("num_done", [1, 11, 37])
def test_resumed_answers_go_on_as_if_nothing_had_happened(invariant: TorchRunner, num_done: int) -> None:
    """Another owner prefills what the first one decoded."""
    everybody = asks([5, 33, 64], max_tokens=48)
    expected = [alone(invariant, ask).token_ids for ask in everybody]
    resumed = [
        dataclasses.replace(ask, output_ids=tuple(whole[:num_done]))
        for ask, whole in zip(everybody, expected, strict=True)
    ]
    engine = engine_for(with_own_cache(invariant, 80), max_num_seqs=8, max_num_batched_tokens=40)
    answers = run(engine, resumed, every=1)
    assert [answer.token_ids for answer in answers] == [whole[num_done:] for whole in expected]

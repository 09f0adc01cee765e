"""Sampling options from a client's keyword to the real sampler and back: the whole way, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.runtime.harness import LIVENESS_S, StartWorker

from jitney import AsyncClient, JobFailed
from jitney_worker.model.runner import TorchRunner, load_runner
from jitney_worker.text.tokenizer import Tokenizer

PROMPT = [70, 71, 72, 73, 74]
EVERYTHING: dict[str, Any] = {
    "temperature": 1.3,
    "seed": 11,
    "min_p": 0.02,
    "top_k": 80,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "logit_bias": {"90": 4, "91": -100},
    "bad_words": ["a", "the"],
    "allowed_token_ids": list(range(40, 300)),
    "min_tokens": 8,
    "logprobs": 2,
    "prompt_logprobs": 1,
}


@pytest.fixture
def runner(tiny_directory: Path) -> TorchRunner:
    return load_runner(tiny_directory, dtype="float32", device="cpu", num_blocks=64)


def engine_of(runner: TorchRunner) -> dict[str, Any]:
    return {"num_blocks": runner.num_blocks, "block_size": runner.block_size, "max_num_seqs": 8}


async def test_four_choices_with_every_option_are_the_same_in_company_and_differ_from_each_other(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner, tokenizer: Tokenizer
) -> None:
    """B18, B20: first alone in the worker, then all at once beside plain jobs, which do not notice either."""
    plain = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    async with start_worker(runner, engine=engine_of(runner)):
        before = await client.generate(PROMPT, **plain)
        alone = await client.generate(PROMPT, n=4, max_tokens=24, **EVERYTHING)
        others = [await client.enqueue([n, *PROMPT], **plain) for n in (7, 8, 9)]
        again = await client.enqueue(PROMPT, n=4, max_tokens=24, **EVERYTHING)
        beside = await client.enqueue(PROMPT, **plain)
        crowded = await again.result(LIVENESS_S)
        assert (await beside.result(LIVENESS_S)).token_ids == before.token_ids
        for other in others:
            await other.result(LIVENESS_S)
    said = [choice.token_ids for choice in alone.choices]
    assert [choice.token_ids for choice in crowded.choices] == said
    assert len(set(said)) == 4
    (letter,) = tokenizer.encode_part("a", "text")
    assert letter in EVERYTHING["allowed_token_ids"]
    for ids in said:
        assert len(ids) >= 8
        assert set(ids) <= set(range(40, 300)) - {91, letter}


async def test_without_a_seed_each_call_has_its_own_choices_and_with_one_they_are_the_same_again(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner
) -> None:
    """B18: four choices, three times; with the seed, a stop token ends some of them before the others."""
    asked: dict[str, Any] = {"n": 4, "temperature": 1.2, "max_tokens": 12, "ignore_eos": True}
    ends = {"seed": 7, "stop_token_ids": list(range(40, 70))}
    async with start_worker(runner, engine=engine_of(runner)):
        unseeded = [await client.generate(PROMPT, **asked) for _ in range(3)]
        seeded = [await client.generate(PROMPT, **asked, **ends) for _ in range(2)]
    answers = [[choice.token_ids for choice in result.choices] for result in (*unseeded, *seeded)]
    assert [len(set(four)) for four in answers] == [4] * 5
    assert answers[3] == answers[4]
    assert len({tuple(four) for four in answers}) == 4
    assert {choice.finish_reason for choice in seeded[0].choices} == {"stop", "length"}
    assert seeded[0].usage["completion_tokens"] == sum(map(len, answers[3]))


async def test_no_log_probability_is_beyond_json_when_all_but_two_tokens_are_forbidden(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner, tokenizer: Tokenizer
) -> None:
    """B24: a bias of -100 on 300 tokens, all but two others not allowed; every number that comes is finite."""
    options: dict[str, Any] = {
        "logit_bias": {str(token_id): -100 for token_id in range(100, 400)},
        "allowed_token_ids": [50, 51, *range(100, 400)],
        "logprobs": 5,
        "prompt_logprobs": 5,
        "max_tokens": 6,
        "ignore_eos": True,
        "seed": 1,
    }
    async with start_worker(runner, engine=engine_of(runner)):
        job = await client.enqueue(PROMPT, **options)
        events = [event async for event in job.stream()]
    ids = [token_id for event in events for token_id in event.token_ids]
    entries = [entry for event in events for entry in event.logprobs or ()]
    prompt = events[0].prompt_logprobs
    assert prompt is not None
    assert set(ids) <= {50, 51}
    assert [entry["token_id"] for entry in entries] == ids
    assert [None if entry is None else entry["token_id"] for entry in prompt] == [None, *PROMPT[1:]]
    numbers = [entry["logprob"] for entry in [*entries, *prompt[1:]] if entry is not None]
    numbers += [other["logprob"] for entry in [*entries, *prompt[1:]] if entry is not None for other in entry["top"]]
    assert len(numbers) == (6 + 4) * 6
    assert all(-100.0 < number <= 0.0 for number in numbers)


async def test_a_job_whose_bad_words_leave_no_token_fails_alone_and_is_told_why(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner, tokenizer: Tokenizer
) -> None:
    (letter,) = tokenizer.encode_part("a", "text")
    async with start_worker(runner, engine=engine_of(runner)):
        stuck = await client.enqueue(PROMPT, allowed_token_ids=[letter], bad_words=["a"], max_tokens=5)
        other = await client.enqueue(PROMPT, max_tokens=5, ignore_eos=True)
        assert len((await other.result(LIVENESS_S)).token_ids) == 5
        with pytest.raises(JobFailed) as failed:
            await stuck.result(LIVENESS_S)
    assert (failed.value.code, failed.value.error["type"]) == ("no_token_left", "invalid_request_error")

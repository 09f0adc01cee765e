"""The runner through its protocol: what it samples, for whom, and under which key."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jitney_worker.engine.protocol import Sampled, ScheduledSequence, SchedulerOutput
from jitney_worker.engine.sequence import Sequence, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.model.noise import noise_key
from jitney_worker.model.rows import sampling_row
from jitney_worker.model.runner import TorchRunner, load_runner


@pytest.fixture
def runner(tiny_llama: Path) -> TorchRunner:
    return load_runner(tiny_llama, dtype="float32", device="cpu", num_blocks=16, num_threads=1)


def sequence(prompt_ids: tuple[int, ...], blocks: list[int], **options: float | int | None) -> Sequence:
    params = SequenceParams(max_tokens=9, **options)  # type: ignore[arg-type]
    made = Sequence.of(SequenceRequest(SequenceId("s/0"), prompt_ids, params, (0, 0.0, 0, 0)))
    made.block_table = blocks
    return made


def execute(runner: TorchRunner, *parts: tuple[Sequence, int, int, bool]) -> list[Sampled]:
    scheduled = [ScheduledSequence(*part) for part in parts]
    rows = runner.execute(SchedulerOutput(1, scheduled, sum(one.stop - one.start for one in scheduled))).rows
    assert all(isinstance(row, Sampled) for row in rows)
    return [row for row in rows if isinstance(row, Sampled)]


def test_a_chunk_that_does_not_complete_its_sequence_samples_nothing(runner: TorchRunner) -> None:
    assert execute(runner, (sequence(tuple(range(3, 13)), [4]), 0, 9, False)) == []


def test_rows_come_in_the_order_of_the_schedule_whatever_their_lengths(runner: TorchRunner) -> None:
    long, short, single = sequence((9, 8, 7, 6), [0]), sequence((5, 4), [1]), sequence((3,), [2])
    parts = [(long, 0, 4, True), (single, 0, 1, True), (short, 0, 2, True)]
    separately = [execute(runner, part)[0] for part in parts]
    assert len({row.token_id for row in separately}) == 3
    assert execute(runner, *parts) == separately
    assert execute(runner, *parts[::-1]) == separately[::-1]


def test_the_key_of_a_token_is_its_index_in_the_sequence(runner: TorchRunner) -> None:
    """Prompt of three: the first output token is number 3, before and after a hand-over."""
    seeded = sequence((5, 6, 7), [0], temperature=1.0, seed=42, choice=2, num_logprobs=1)
    assert sampling_row(ScheduledSequence(seeded, 0, 3, True)).key == noise_key(42, 2, 3)
    seeded.token_ids.append(9)
    assert sampling_row(ScheduledSequence(seeded, 3, 4, True)).key == noise_key(42, 2, 4)
    assert sampling_row(ScheduledSequence(seeded, 0, 4, True)).key == noise_key(42, 2, 4)


def test_logprobs_come_with_the_rows_that_ask(runner: TorchRunner) -> None:
    asking = sequence((5, 6, 7), [0], num_logprobs=2)
    silent = sequence((5, 6, 7), [1])
    first, second = execute(runner, (asking, 0, 3, True), (silent, 0, 3, True))
    assert first.logprobs is not None
    assert first.logprobs.top[0] == (first.token_id, first.logprobs.logprob)
    assert (second.token_id, second.logprobs) == (first.token_id, None)


def test_the_number_of_threads_is_torchs(runner: TorchRunner) -> None:
    assert torch.get_num_threads() == 1


def test_bfloat16_answers_too(tiny_llama: Path) -> None:
    runner = load_runner(tiny_llama, dtype="bfloat16", device="cpu", num_blocks=4)
    assert (runner.dtype, runner.cache.dtype) == ("bfloat16", torch.bfloat16)
    (row,) = execute(runner, (sequence((5, 6, 7), [0], num_logprobs=0), 0, 3, True))
    assert row.logprobs is not None
    assert -10.0 < row.logprobs.logprob < 0.0

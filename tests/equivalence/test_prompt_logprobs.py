"""Log probabilities of a prompt against one forward pass of it: in chunks, in company, beside cached prompts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engine_driver import Ask, engine_for, prompt, run

from jitney_worker.engine.protocol import ScheduledSequence
from jitney_worker.engine.sequence import Sequence, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.model.batch import step_batch
from jitney_worker.model.runner import TorchRunner


def whole(runner: TorchRunner, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Log probabilities after each token, [tokens, vocab], float64 from one forward pass."""
    sequence = Sequence.of(SequenceRequest(SequenceId("s/0"), token_ids, SequenceParams(1), (0, 0.0, 0, 0)))
    sequence.block_table = list(range(-(-len(token_ids) // runner.block_size)))
    batch = step_batch(
        [ScheduledSequence(sequence, 0, len(token_ids), True)],
        block_size=runner.block_size,
        scratch_block=runner.num_blocks,
        device=torch.device("cpu"),
    )
    with torch.inference_mode():
        hidden = runner.decoder.forward(batch.token_ids, batch.positions, runner.attention.plan(batch))
        return runner.decoder.logits(hidden).double().log_softmax(-1)


@pytest.mark.parametrize("budget", [16, 33, 2_048])
@pytest.mark.parametrize("length", [2, 17, 100])
def test_a_prompts_log_probabilities_are_those_of_one_forward_pass(tiny: TorchRunner, length: int, budget: int) -> None:
    ids = prompt(length, seed=length)
    asking = Ask(ids, max_tokens=3, options={"num_prompt_logprobs": 4})
    silent = [Ask(prompt(n, seed=n), max_tokens=9) for n in (1, 20, 40)]
    engine = engine_for(tiny, enable_prefix_caching=True, max_num_batched_tokens=budget, max_num_seqs=4)
    expected = whole(tiny, ids)
    for _ in range(2):
        answers = run(engine, [silent[0], asking, *silent[1:]])
        assert [len(answer.prompt_logprobs) for answer in answers] == [0, length - 1, 0, 0]
        for position, found in enumerate(answers[1].prompt_logprobs, start=1):
            row = expected[position - 1]
            assert found.logprob == pytest.approx(float(row[ids[position]]), abs=1e-4)
            assert found.rank == int((row >= row[ids[position]]).sum())
            assert [token_id for token_id, _ in found.top] == row.topk(4).indices.tolist()
            assert [value for _, value in found.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


def test_asking_for_them_changes_no_token(tiny: TorchRunner) -> None:
    plain = Ask(prompt(50, seed=3), max_tokens=20, options={"temperature": 1.0, "seed": 4})
    asking = dataclasses.replace(plain, options={**plain.options, "num_prompt_logprobs": 0})
    answers = [run(engine_for(tiny, max_num_batched_tokens=24, max_num_seqs=1), [ask])[0] for ask in (plain, asking)]
    assert answers[0].token_ids == answers[1].token_ids
    assert [logprobs.top for logprobs in answers[1].prompt_logprobs] == [()] * 49

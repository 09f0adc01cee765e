"""The decoder of the kernels where something is wrong, and what int8 leaves of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from native_kernels import HERE

from jitney_worker.engine.protocol import RowFailure, Sampled, ScheduledSequence, SchedulerOutput
from jitney_worker.engine.sequence import Sequence, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.model.native import choice
from jitney_worker.model.native.library import kernels
from jitney_worker.model.runner import TorchRunner, load_decoder, load_runner, runner_over
from jitney_worker.model.tiny import make_tiny


def load(directory: Path, **options: str) -> TorchRunner:
    return load_runner(directory, dtype="float32", device="cpu", num_blocks=16, **options)  # type: ignore[arg-type]


def execute(runner: TorchRunner, *prompts: tuple[int, ...]) -> list[Sampled | RowFailure]:
    """All prompts in one step; their first tokens, with log probabilities."""
    scheduled = []
    for i, prompt_ids in enumerate(prompts):
        params = SequenceParams(max_tokens=9, num_logprobs=20)
        sequence = Sequence.of(SequenceRequest(SequenceId(f"s/{i}"), prompt_ids, params, (0, 0.0, 0, i)))
        sequence.block_table = [i]
        scheduled.append(ScheduledSequence(sequence, 0, len(prompt_ids), True))
    return runner.execute(SchedulerOutput(1, scheduled, sum(map(len, prompts)))).rows


def the_same(found: Sampled | RowFailure, other: Sampled | RowFailure) -> bool:
    return isinstance(found, Sampled) and found == other


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("bad", [512, 10**9, -1, -(2**63)])
def test_a_token_that_the_model_has_not_fails_its_row_alone(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, level: str, quantization: str, bad: int
) -> None:
    """Reading its embedding would read anything."""
    monkeypatch.setattr(choice, "kernels", lambda: kernels(level))
    runner = load(tiny_llama, quantization=quantization)
    assert (runner.kernels, runner.vocab_size) == (level, 512)
    first, broken, last = execute(runner, (5, 6, 7), (5, bad, 7), (8, 9))
    assert isinstance(broken, RowFailure)
    assert "NaN" in broken.message
    alone = execute(runner, (5, 6, 7))[0], execute(runner, (8, 9))[0]
    assert the_same(first, alone[0])
    assert the_same(last, alone[1])


def test_two_models_of_other_widths_and_kinds_may_share_a_team(tiny_llama: Path, tmp_path: Path) -> None:
    """They compute in the same memory: what one leaves between its rows must not reach the other."""
    odd = make_tiny(
        tmp_path / "odd",
        overrides={"hidden_size": 70, "intermediate_size": 41, "head_dim": 22, "num_attention_heads": 5,
                   "num_key_value_heads": 1},
    )  # fmt: skip
    cpu = torch.device("cpu")
    for quantization in ("none", "int8"):
        for dtype in (torch.float32, torch.bfloat16):
            expected = load_runner(
                odd, dtype=str(dtype)[6:], device="cpu", num_blocks=16, quantization=quantization, num_threads=1
            )
            (wanted,) = execute(expected, (5, 6, 7))
            wide = load(tiny_llama, quantization=quantization)
            assert wide.team is not None
            decoder = load_decoder(odd, dtype, cpu, team=wide.team, quantization=quantization)
            narrow = runner_over(decoder, 16, 16, dtype, cpu, wide.team)
            for _ in range(2):
                execute(wide, (5, 500, 7, 3, 8, 2**40), (9, 9, 3))
                assert the_same(execute(narrow, (5, 6, 7))[0], wanted), (quantization, dtype)


def test_heads_too_wide_for_the_kernels_are_torchs(tmp_path: Path) -> None:
    directory = make_tiny(
        tmp_path / "wide", overrides={"head_dim": 520, "num_attention_heads": 2, "num_key_value_heads": 1}
    )
    runner = load(directory)
    assert (runner.kernels, runner.is_batch_invariant) == ("torch", False)
    assert isinstance(execute(runner, (5, 6, 7))[0], Sampled)


@pytest.mark.parametrize("level", HERE)
def test_int8_stays_close_to_the_model_it_was_made_of(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setattr(choice, "kernels", lambda: kernels(level))
    prompts = [tuple(range(3 + i, 15 + i)) for i in range(16)]
    whole = execute(load(tiny_llama), *prompts)
    quantised = execute(load(tiny_llama, quantization="int8"), *prompts)
    pairs = [
        (one.logprobs.top, other.logprobs.top)
        for one, other in zip(whole, quantised, strict=True)
        if isinstance(one, Sampled) and isinstance(other, Sampled) and one.logprobs and other.logprobs
    ]
    assert len(pairs) == 16
    assert sum(one[0][0] == other[0][0] for one, other in pairs) >= 14
    assert [one for one, _ in pairs] != [other for _, other in pairs]
    for one, other in pairs:
        assert abs(one[0][1] - dict(other).get(one[0][0], -9.0)) < 0.25

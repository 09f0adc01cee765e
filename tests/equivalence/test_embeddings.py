"""Embeddings against the hidden states of transformers: whole, in chunks, in company, preempted."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Answer, Ask, engine_for, prompt, run, with_own_cache
from random_checkpoints import make_checkpoint
from torch import Tensor
from transformers import AutoModel
from variants import VARIANTS

from jitney_worker.model.architectures import Architecture
from jitney_worker.model.native.choice import KernelsName
from jitney_worker.model.runner import TorchRunner, load_runner

BOTH = ["last", "mean"]
LENGTHS = (1, 17, 100)
FOREIGN = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    # Its last hidden states are narrower than those between its layers.
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 64, "max_position_embeddings": 256, "dropout": 0.0},
    "gemma2": {"head_dim": 8, "max_position_embeddings": 256},
}


@cache
def reference(directory: Path) -> Any:
    return AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def by_transformers(directory: Path, token_ids: tuple[int, ...], pooling: str) -> Tensor:
    """Of length one, float64."""
    with torch.inference_mode():
        states = reference(directory)(torch.tensor([token_ids])).last_hidden_state[0].double()
    pooled = states[-1] if pooling == "last" else states.mean(dim=0)
    return pooled / pooled.norm()


def asks(pooling: str, vocab_size: int) -> list[Ask]:
    options = {"pooling": pooling}
    return [Ask(prompt(length, seed=length, vocab_size=vocab_size), 1, options=options) for length in LENGTHS]


def vector(answer: Answer) -> Tensor:
    assert (answer.error, answer.finish_reason, answer.token_ids) == (None, "stop", [])
    assert answer.embedding is not None
    return torch.tensor(struct.unpack(f"<{len(answer.embedding) // 4}f", answer.embedding), dtype=torch.float64)


def assert_all_close(directory: Path, runner: TorchRunner, pooling: str) -> None:
    for ask in asks(pooling, runner.vocab_size):
        (answer,) = run(engine_for(runner, max_num_batched_tokens=64), [ask])
        ours, theirs = vector(answer), by_transformers(directory, ask.prompt_ids, pooling)
        assert len(ours) == runner.hidden_size
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("pooling", BOTH)
@pytest.mark.parametrize("variant", VARIANTS)
def test_embeddings_are_pooled_from_the_hidden_states_of_transformers(
    tiny_directory: Callable[[str], Path], kernels: KernelsName, variant: str, pooling: str
) -> None:
    directory = tiny_directory(variant)
    runner = load_runner(directory, dtype="float32", device="cpu", num_blocks=40, kernels=kernels)
    assert_all_close(directory, runner, pooling)


@pytest.mark.parametrize("family", FOREIGN)
def test_of_models_that_transformers_computes_too(tmp_path: Path, family: str, kernels: KernelsName) -> None:
    directory = make_checkpoint(Architecture(family, "transformers", FOREIGN[family]), tmp_path)
    runner = load_runner(directory, dtype="float32", device="cpu", num_blocks=40, kernels=kernels)
    assert runner.config.source.startswith("transformers")
    for pooling in BOTH:
        assert_all_close(directory, runner, pooling)


@pytest.mark.parametrize("pooling", BOTH)
@pytest.mark.parametrize("budget", [16, 33, 2_048])
def test_company_chunks_and_cached_prompts_change_nothing(tiny: TorchRunner, budget: int, pooling: str) -> None:
    """Bit for bit with the kernels, as WIRE has it; with torch, whose sums depend on their shapes, to a rounding."""
    asking = asks(pooling, tiny.vocab_size)
    own = engine_for(with_own_cache(tiny), max_num_batched_tokens=4_096)
    alone = [run(own, [ask])[0] for ask in asking]
    others = [Ask(prompt(n, seed=n), max_tokens=9) for n in (1, 20, 40)]
    engine = engine_for(tiny, enable_prefix_caching=True, max_num_batched_tokens=budget, max_num_seqs=4)
    for _ in range(2):
        answers = run(engine, [others[0], *asking, *others[1:]])
        for answer, expected in zip(answers[1 : 1 + len(asking)], alone, strict=True):
            if tiny.is_batch_invariant:
                assert answer.embedding == expected.embedding
            torch.testing.assert_close(vector(answer), vector(expected), atol=1e-6, rtol=0)
    assert answers[3].num_cached_tokens == (96 if pooling == "last" else 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("pooling", BOTH)
def test_the_kernels_give_the_same_bits_however_a_prompt_is_cut(
    tiny_directory: Callable[[str], Path], dtype: str, pooling: str
) -> None:
    runner = load_runner(tiny_directory("llama"), dtype=dtype, device="cpu", num_blocks=60, kernels="native")
    assert runner.is_batch_invariant
    ask = asks(pooling, runner.vocab_size)[-1]
    given = {
        run(engine_for(with_own_cache(runner), max_num_batched_tokens=budget, max_num_seqs=1), [ask])[0].embedding
        for budget in (1, 7, 16, 50, 4_096)
    }
    assert len(given) == 1


@pytest.mark.parametrize("pooling", BOTH)
def test_a_preempted_one_is_what_it_is_undisturbed(tiny: TorchRunner, pooling: str) -> None:
    ask = asks(pooling, tiny.vocab_size)[-1]
    alone = run(engine_for(with_own_cache(tiny)), [ask])[0]
    first = Ask(prompt(16, seed=1), max_tokens=60)
    engine = engine_for(
        with_own_cache(tiny, num_blocks=9), max_num_batched_tokens=4, max_num_seqs=4, admission_reserve=0.0
    )
    answer = run(engine, [first, ask])[1]
    assert engine.snapshot().num_preemptions > 0
    torch.testing.assert_close(vector(answer), vector(alone), atol=1e-6, rtol=0)
    assert not tiny.is_batch_invariant or answer.embedding == alone.embedding


def test_states_that_are_no_numbers_fail_their_sequence_alone(tiny: TorchRunner) -> None:
    class Spoilt:
        """The decoder, with NaN for every hidden state of sequences of one token."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tiny.decoder, name)

        def last_hidden_states(self, hidden: Tensor) -> Tensor:
            states = tiny.decoder.last_hidden_states(hidden)
            return states * float("nan") if len(hidden) == 1 else states

    spoilt = with_own_cache(tiny)
    spoilt.decoder = Spoilt()  # type: ignore[assignment]
    one, other, _ = asks("mean", tiny.vocab_size)
    answers = run(engine_for(spoilt), [one, dataclasses.replace(other, salt="x")])
    assert (answers[0].error, answers[0].embedding) == ("bad_hidden_states", None)
    vector(answers[1])

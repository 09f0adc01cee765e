"""The native decoder against transformers' own: hidden states, logits and greedy tokens, in float32."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Ask, engine_for, prompt, run, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer
from variants import VARIANTS

from jitney_worker.engine.protocol import ScheduledSequence
from jitney_worker.engine.sequence import Sequence, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.model.batch import step_batch
from jitney_worker.model.config import ModelConfig
from jitney_worker.model.llama import LlamaDecoder
from jitney_worker.model.native.choice import KernelsName
from jitney_worker.model.native.decoder import NativeDecoder
from jitney_worker.model.runner import TorchRunner, load_runner
from jitney_worker.model.weights import load_weights


@functools.cache
def reference(directory: Path) -> Any:
    """transformers' model. Eager attention: softmax written out, unlike the kernel our backend calls."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def generate(directory: Path, prompt_ids: tuple[int, ...], max_tokens: int, **options: Any) -> list[int]:
    """transformers' own greedy `generate`, one prompt at a time."""
    ids = torch.tensor([prompt_ids])
    output = reference(directory).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=2, **options
    )
    result: list[int] = output[0, len(prompt_ids) :].tolist()
    return result


def shortened(directory: Path, runner: TorchRunner, num_layers: int) -> LlamaDecoder | NativeDecoder:
    """The runner's decoder with only its first layers."""
    config = runner.config
    assert isinstance(config, ModelConfig)
    weights = load_weights(directory, config, torch.float32, torch.device("cpu"))
    weights = dataclasses.replace(weights, layers=weights.layers[:num_layers])
    return LlamaDecoder(config, weights) if runner.team is None else NativeDecoder(config, weights, runner.team)


def hidden_and_logits(
    directory: Path, runner: TorchRunner, token_ids: list[int], num_layers: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Our hidden states after so many layers, and the logits they would give."""
    decoder = shortened(directory, runner, num_layers)
    sequence = Sequence.of(SequenceRequest(SequenceId("s/0"), tuple(token_ids), SequenceParams(1), (0, 0.0, 0, 0)))
    sequence.block_table = list(range(-(-len(token_ids) // runner.block_size)))
    batch = step_batch(
        [ScheduledSequence(sequence, 0, len(token_ids), True)],
        block_size=runner.block_size,
        scratch_block=runner.num_blocks,
        device=torch.device("cpu"),
    )
    with torch.inference_mode():
        hidden = decoder.forward(batch.token_ids, batch.positions, runner.attention.plan(batch))
        return hidden[:, : decoder.config.hidden_size], decoder.logits(hidden)


def assert_equal_layer_by_layer(directory: Path, runner: TorchRunner, token_ids: list[int]) -> None:
    """transformers' last hidden state has been through the final norm, so logits stand for it."""
    with torch.inference_mode():
        expected = reference(directory)(torch.tensor([token_ids]), output_hidden_states=True)
    for num_layers in range(runner.config.num_layers):
        hidden, _ = hidden_and_logits(directory, runner, token_ids, num_layers)
        torch.testing.assert_close(hidden, expected.hidden_states[num_layers][0], atol=1e-3, rtol=1e-4)
    _, logits = hidden_and_logits(directory, runner, token_ids, runner.config.num_layers)
    torch.testing.assert_close(logits, expected.logits[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_and_logits_agree_layer_by_layer(
    tiny_directory: Callable[[str], Path], variant: str, kernels: KernelsName
) -> None:
    directory = tiny_directory(variant)
    runner = load_runner(directory, dtype="float32", device="cpu", num_blocks=20, kernels=kernels)
    assert_equal_layer_by_layer(directory, runner, list(prompt(100, seed=1)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_generate_for_every_kind_of_model(
    tiny_directory: Callable[[str], Path], variant: str, kernels: KernelsName
) -> None:
    """Prompts of many lengths in one batch, chunked at 48 tokens a step, joining at different times."""
    directory = tiny_directory(variant)
    runner = load_runner(directory, dtype="float32", device="cpu", num_blocks=100, kernels=kernels)
    asks = [Ask(prompt(length, seed=length), max_tokens=40) for length in (1, 2, 15, 16, 17, 33, 90)]
    engine = engine_for(runner, max_num_batched_tokens=48, max_num_seqs=8)
    found = tokens(engine, asks, every=3)
    expected = [generate(directory, ask.prompt_ids, 40, eos_token_id=None) for ask in asks]
    assert found == expected
    assert len({token_id for answer in found for token_id in answer}) > 20, "the answers are not all the same loop"


CHATS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three colours.",
    "2 + 2 =",
)


@pytest.fixture(scope="module")
def chat_asks(smollm2_directory: Path) -> list[Ask]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory)
    asks = []
    for question in CHATS:
        messages = [{"role": "user", "content": question}]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        asks.append(Ask(tuple(encoded["input_ids"]), max_tokens=24, options={"stop_token_ids": frozenset({2})}))
    return asks


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(
    smollm2: TorchRunner, smollm2_directory: Path, chat_asks: list[Ask]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory)
    (answer,) = run(engine_for(smollm2), chat_asks[:1])
    assert tokenizer.decode(answer.token_ids) == "The capital of France is Paris.<|im_end|>"
    assert answer.finish_reason == "stop"


@pytest.mark.slow
def test_smollm2_greedy_tokens_equal_generate(
    smollm2: TorchRunner, smollm2_directory: Path, chat_asks: list[Ask]
) -> None:
    """Four chats in one batch, prompts chunked; with end tokens, which `generate` returns as well."""
    found = tokens(engine_for(smollm2, max_num_batched_tokens=40, max_num_seqs=4), chat_asks)
    assert found == [generate(smollm2_directory, ask.prompt_ids, ask.max_tokens) for ask in chat_asks]
    assert found[0][-1] == 2


@pytest.mark.slow
def test_smollm2_logits_agree_layer_by_layer(
    smollm2: TorchRunner, smollm2_directory: Path, chat_asks: list[Ask]
) -> None:
    assert_equal_layer_by_layer(smollm2_directory, smollm2, list(chat_asks[0].prompt_ids))

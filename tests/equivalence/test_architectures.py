"""Every family of the table: the greedy tokens of transformers' own `generate`, alone and in a crowd."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Ask, engine_for, logits_of, prompt, run, tokens
from random_checkpoints import make_checkpoint
from transformers import AutoModelForCausalLM

from jitney.errors import ModelError
from jitney_worker.model.architectures import ARCHITECTURES, NATIVE, REFUSED, TINY, TRANSFORMERS, Architecture
from jitney_worker.model.runner import load_runner

BY_TYPE = {row.model_type: row for row in ARCHITECTURES}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
HALF_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
SHARED_LAYERS = {
    **BY_TYPE["gemma3n_text"].recipe,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.0] * 4,
}
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SEES = {
    "gemma3": {
        "text_config": {**TINY, **BY_TYPE["gemma3_text"].recipe},
        "vision_config": {**EYES, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
        "image_token_index": 120,
    },
    "gemma4": {
        "text_config": {**TINY, **BY_TYPE["gemma4_text"].recipe},
        "vision_config": EYES,
        "audio_config": None,
    },
    "got_ocr2": {
        "text_config": {**TINY, "model_type": "qwen2"},
        "vision_config": {**EYES, "output_channels": 8, "image_size": 32, "mlp_dim": 8, "global_attn_indexes": []},
    },
}
"""Models that take pictures too, by their outer `model_type`. Served is what they say of text."""

VARIANTS = {
    "phi3-by-transformers": Architecture("phi3", TRANSFORMERS, {**BY_TYPE["phi3"].recipe, "hidden_act": "gelu"}),
    "llama-dynamic-rope": Architecture("llama", NATIVE, {"rope_parameters": DYNAMIC_ROPE}),
    "llama-dynamic-rope-by-transformers": Architecture(
        "llama", TRANSFORMERS, {"rope_parameters": DYNAMIC_ROPE, "hidden_act": "gelu"}
    ),
    "phi3-partial-rotary": Architecture("phi3", NATIVE, {"rope_parameters": HALF_ROPE}),
    "phi3-within-its-first-context": Architecture(
        "phi3",
        NATIVE,
        {
            "rope_parameters": {**BY_TYPE["phi3"].recipe["rope_parameters"], "original_max_position_embeddings": 256},
            "original_max_position_embeddings": 256,
        },
    ),
    "mistral-alternating": Architecture(
        "mistral", NATIVE, {**BY_TYPE["mistral"].recipe, "layer_types": ["full_attention", "sliding_attention"]}
    ),
    "qwen3-moe-window": Architecture(
        "qwen3_moe", TRANSFORMERS, {**BY_TYPE["qwen3_moe"].recipe, "use_sliding_window": True, "sliding_window": 12}
    ),
    **{f"{name}-of-text": Architecture(name, TRANSFORMERS, recipe) for name, recipe in SEES.items()},
    "gemma3n-shared-layers": Architecture("gemma3n_text", TRANSFORMERS, SHARED_LAYERS),
}
"""Options of families that change who computes them, or how."""

SERVED = {row.model_type: row for row in ARCHITECTURES if row.served != REFUSED} | VARIANTS
NOT_SERVED = [row for row in ARCHITECTURES if row.served == REFUSED]
MAX_TOKENS = 20


def asks() -> list[Ask]:
    """One short, and two that share their first 24 tokens; all longer than the sliding windows in the end."""
    shared = prompt(24, seed=1, vocab_size=128)
    return [
        Ask(prompt(3, seed=2, vocab_size=128), MAX_TOKENS),
        Ask(shared + prompt(13, seed=3, vocab_size=128), MAX_TOKENS),
        Ask(shared + prompt(6, seed=4, vocab_size=128), MAX_TOKENS),
    ]


def reference(directory: Path) -> Any:
    """transformers' own model, with its own attention, written out."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def generate(model: Any, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """transformers' `generate`, one prompt at a time, with its own cache."""
    found = []
    for prompt_ids in prompts:
        ids = torch.tensor([prompt_ids])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(output[0, len(prompt_ids) :].tolist())
    return found


@pytest.mark.parametrize("row", SERVED.values(), ids=SERVED)
def test_logits_and_greedy_tokens_are_those_of_transformers_alone_and_in_a_crowd(
    row: Architecture, tmp_path: Path
) -> None:
    """In the crowd: prompts in chunks of what a step leaves, a pool that is too small for all, a prefix cache."""
    directory = make_checkpoint(row, tmp_path / row.model_type)
    model = reference(directory)
    expected = generate(model, [ask.prompt_ids for ask in asks()])
    assert len({token_id for answer in expected for token_id in answer}) > 5, (
        "a model that repeats itself shows nothing"
    )

    runner = load_runner(directory, dtype="float32", device="cpu", num_blocks=60, block_size=4)
    assert (runner.config.source == NATIVE) is (row.served == NATIVE)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([asks()[1].prompt_ids])).logits[0]
    torch.testing.assert_close(logits_of(runner, asks()[1].prompt_ids), logits, atol=2e-4, rtol=1e-3)
    alone = [tokens(engine_for(runner), [ask])[0] for ask in asks()]
    assert alone == expected

    engine = engine_for(
        runner,
        num_blocks=18,
        admission_reserve=0.0,
        max_num_batched_tokens=18,
        max_num_seqs=4,
        enable_prefix_caching=True,
    )
    answers = run(engine, asks(), every=2)
    assert [answer.token_ids for answer in answers] == expected
    assert engine.snapshot().num_preemptions > 0
    assert sum(answer.num_cached_tokens for answer in answers) > 0


def test_longrope_has_its_long_frequencies_throughout_or_as_documented_its_short_ones(tmp_path: Path) -> None:
    """All of these sequences are shorter than the first context: transformers takes the short ones for them."""
    rope = {**BY_TYPE["phi3"].recipe["rope_parameters"], "original_max_position_embeddings": 128}
    recipe = {"rope_parameters": rope, "original_max_position_embeddings": 128}
    directory = make_checkpoint(Architecture("phi3", NATIVE, recipe), tmp_path / "phi3")
    by_transformers = generate(reference(directory), [ask.prompt_ids for ask in asks()])

    def ours() -> list[list[int]]:
        runner = load_runner(directory, dtype="float32", device="cpu", num_blocks=60, block_size=4)
        return [tokens(engine_for(runner), [ask])[0] for ask in asks()]

    assert all(one != other for one, other in zip(ours(), by_transformers, strict=True))
    config = json.loads((directory / "config.json").read_text())
    first, whole = 128, config["max_position_embeddings"]
    config["max_position_embeddings"] = first
    config["rope_parameters"]["attention_factor"] = math.sqrt(1 + math.log(whole / first) / math.log(first))
    (directory / "config.json").write_text(json.dumps(config))
    assert ours() == by_transformers


@pytest.mark.parametrize("row", NOT_SERVED, ids=lambda row: row.model_type)
def test_what_is_not_served_is_refused_with_the_reason_of_the_table(row: Architecture, tmp_path: Path) -> None:
    directory = make_checkpoint(row, tmp_path / row.model_type)
    with pytest.raises(ModelError) as caught:
        load_runner(directory, dtype="float32", device="cpu", num_blocks=8)
    assert row.says in str(caught.value)

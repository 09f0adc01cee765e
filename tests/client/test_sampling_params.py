"""Sampling options at the door: what is taken, what is refused, and that the refusal names field, value and limit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jitney.errors import InvalidJob
from jitney.messages import JobSpec
from jitney.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    SamplingParams,
    sampling_params,
)


@pytest.mark.parametrize(
    "options",
    [
        {"n": 1},
        {"n": MAX_CHOICES},
        {"min_p": 0.0},
        {"min_p": 1},
        {"presence_penalty": -2},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 2.0},
        {"repetition_penalty": 0.01},
        {"logit_bias": {"0": 100, 1: -100, "007": 0.5}},
        {"logit_bias": {number: 1.0 for number in range(MAX_LOGIT_BIASES)}},
        {"allowed_token_ids": [0]},
        {"allowed_token_ids": list(range(MAX_ALLOWED_TOKEN_IDS))},
        {"bad_words": []},
        {"bad_words": ["a b"] * MAX_BAD_WORDS},
        {"min_tokens": 5, "max_tokens": 5},
        {"min_tokens": 5},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 20},
        {"echo": True, "prompt_logprobs": 1},
        {"truncate_prompt_tokens": 1},
        {"truncate_prompt_tokens": -1},
        {"include_stop_str_in_output": True, "skip_special_tokens": False},
    ],
)
def test_an_option_within_its_bounds_is_taken_and_survives_the_wire(options: dict[str, Any]) -> None:
    spec = JobSpec.build({"prompt": "x", "sampling": sampling_params(**options)})
    assert JobSpec.decode(spec.encode()) == spec


def test_a_bias_is_kept_by_token_id_whatever_the_keys_were() -> None:
    assert sampling_params(logit_bias={"5": 1, 6: 2.5}).logit_bias == {5: 1.0, 6: 2.5}
    assert sampling_params(logit_bias=None) == SamplingParams()


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"n": 0}, "n", "greater than or equal to 1 (given: 0)"),
        ({"n": 17}, "n", "less than or equal to 16 (given: 17)"),
        ({"n": 2.5}, "n", "whole number"),
        ({"min_p": 1.01}, "min_p", "less than or equal to 1"),
        ({"min_p": -0.1}, "min_p", "greater than or equal to 0"),
        ({"min_p": math.nan}, "min_p", "finite"),
        ({"presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01 (given: 0)"),
        ({"repetition_penalty": 2.5}, "repetition_penalty", "less than or equal to 2"),
        ({"repetition_penalty": math.inf}, "repetition_penalty", "finite"),
        ({"logit_bias": {"abc": 1}}, "logit_bias", "key 'abc' is not a token id"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias", "key '1.5' is not a token id"),
        ({"logit_bias": {True: 1}}, "logit_bias", "key 'True' is not a token id"),
        ({"logit_bias": {"9" * 20: 1}}, "logit_bias", "is not a token id"),
        ({"logit_bias": {"-1": 5}}, "logit_bias", "holds -1; ids start at 0"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias", "of token 5 must be from -100 to 100"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "must be a number"),
        ({"logit_bias": {"5": math.nan}}, "logit_bias.5", "finite"),
        ({"logit_bias": {"5": True}}, "logit_bias.5", "must be a number"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5", "must be a number"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "names a token id twice"),
        ({"logit_bias": [1, 2]}, "logit_bias", "must be an object of token ids"),
        ({"logit_bias": {number: 1 for number in range(MAX_LOGIT_BIASES + 1)}}, "logit_bias", "at most 300, not 301"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "must hold at least 1, not 0"),
        ({"allowed_token_ids": [3, -1]}, "allowed_token_ids", "allowed_token_ids holds -1"),
        ({"allowed_token_ids": "5"}, "allowed_token_ids", "must be a list"),
        ({"allowed_token_ids": range(MAX_ALLOWED_TOKEN_IDS + 1)}, "allowed_token_ids", "at most"),
        ({"bad_words": ["fine", " \t"]}, "bad_words", "must not hold blank"),
        ({"bad_words": "fine"}, "bad_words", "must be a list"),
        ({"bad_words": ["x" * (MAX_BAD_WORD_BYTES + 1)]}, "bad_words", "longer than 256 bytes"),
        ({"bad_words": ["x"] * (MAX_BAD_WORDS + 1)}, "bad_words", "must hold at most 256, not 257"),
        ({"bad_words": ["a", "\ud800"]}, "bad_words", "half of a surrogate pair"),
        ({"stop": "\udfff"}, "stop", "half of a surrogate pair"),
        ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "more than max_tokens=5 (given: 6)"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"echo": True, "logprobs": 0}, "echo", "not supported with logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
        ({"stop_token_ids": [-3]}, "stop_token_ids", "stop_token_ids holds -3"),
    ],
)
def test_an_option_out_of_bounds_is_refused_by_name(options: dict[str, Any], param: str, words: str) -> None:
    """B22"""
    with pytest.raises(InvalidJob) as refused:
        sampling_params(**options)
    assert (refused.value.param, words in str(refused.value)) == (param, True), str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_chat_cannot_be_echoed() -> None:
    with pytest.raises(InvalidJob, match="echo needs prompt"):
        JobSpec.build({"messages": [{"role": "user", "content": "x"}], "sampling": {"echo": True}})

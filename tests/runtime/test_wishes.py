"""What a job asks for, checked against the model and turned into what the engine takes."""

from __future__ import annotations

import pytest

from jitney.errors import InvalidJob
from jitney.messages import JobSpec
from jitney.sampling import SamplingParams
from jitney_worker.engine.sequence import LogitRules, SequenceParams
from jitney_worker.runtime.wishes import (
    MAX_PROMPT_LOGPROBS_ENTRIES,
    check_params,
    check_sampling,
    echoed,
    sequence_params,
    text_options,
    truncated,
)
from jitney_worker.text.tokenizer import Tokenizer


def params_of(sampling: SamplingParams) -> SequenceParams:
    return sequence_params(sampling, max_tokens=10, eos_token_ids=frozenset({1, 2}), bad_words=())


def test_what_goes_on_with_a_message_is_no_text_of_its_own() -> None:
    """Its first word keeps its space."""
    messages = [{"role": "assistant", "content": "The sea"}]
    for fields, follows in (({}, ()), ({"continue_final_message": True}, (3, 4))):
        assert text_options(JobSpec.build({"messages": messages, **fields}), (3, 4)).follows == follows


def test_options_that_change_nothing_leave_the_sampler_nothing_to_do() -> None:
    """Each default, written out, is as good as absent: such rows must cost nothing."""
    written = SamplingParams(
        min_p=0, presence_penalty=0, frequency_penalty=0, repetition_penalty=1, logit_bias={5: 0.0}, bad_words=()
    )
    assert params_of(written) == params_of(SamplingParams())
    assert params_of(written).rules is None


@pytest.mark.parametrize(
    ("asked", "given"), [(-1, 0), (0, 0), (40, 40), (2**32 + 1, 2**31 - 1), (2**64 - 1, 2**31 - 1)]
)
def test_a_top_k_beyond_every_vocabulary_stays_beyond_it_in_32_bits(asked: int, given: int) -> None:
    assert params_of(SamplingParams(top_k=asked)).top_k == given


def test_the_models_own_end_tokens_are_among_the_stop_tokens_unless_they_are_ignored() -> None:
    assert params_of(SamplingParams(stop_token_ids=(9,))).stop_token_ids == frozenset({1, 2, 9})
    ignoring = params_of(SamplingParams(stop_token_ids=(9,), ignore_eos=True))
    assert ignoring.stop_token_ids == frozenset({9})
    assert ignoring.eos_token_ids == frozenset({1, 2}), "min_tokens holds them off all the same"


@pytest.mark.parametrize("count", [0, 20])
def test_the_log_probabilities_of_a_prompt_are_refused_where_one_event_could_not_hold_them(count: int) -> None:
    sampling = SamplingParams(prompt_logprobs=count)
    most = MAX_PROMPT_LOGPROBS_ENTRIES // (count + 1)
    check_sampling(sampling, num_prompt_tokens=most, vocab_size=100)
    with pytest.raises(InvalidJob, match=f"prompt_logprobs={count} for a prompt of {most + 1} tokens") as refused:
        check_sampling(sampling, num_prompt_tokens=most + 1, vocab_size=100)
    assert refused.value.param == "prompt_logprobs"


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_a_token_id_that_the_model_does_not_have_is_refused_by_the_name_of_its_field(field: str) -> None:
    given = {100: 1.0} if field == "logit_bias" else (3, 100)
    with pytest.raises(InvalidJob, match=f"{field} holds token id 100; this model's ids are 0 to 99") as refused:
        check_sampling(SamplingParams(**{field: given}), num_prompt_tokens=1, vocab_size=100)
    assert refused.value.param == field
    check_sampling(SamplingParams(**{field: given}), num_prompt_tokens=1, vocab_size=101)


def test_min_tokens_with_nothing_but_end_tokens_allowed_is_refused() -> None:
    allowed = LogitRules(allowed_token_ids=(1, 2))
    check_params(SequenceParams(9, stop_token_ids=frozenset({1, 2}), rules=allowed))
    check_params(SequenceParams(9, stop_token_ids=frozenset({1}), min_tokens=1, rules=allowed))
    for ends in (
        {"stop_token_ids": frozenset({1, 2, 3})},
        {"stop_token_ids": frozenset({1}), "eos_token_ids": frozenset({2})},
    ):
        with pytest.raises(InvalidJob, match="holds no others") as refused:
            check_params(SequenceParams(9, **ends, min_tokens=1, rules=allowed))
        assert refused.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"),
    [(None, None, 9), (4, 100, 4), (20, None, 9), (-1, None, 9), (-1, 3, 7), (-1, 99, 1)],
)
def test_a_prompt_is_cut_to_its_end(keep: int | None, max_tokens: int | None, kept: int) -> None:
    sampling = SamplingParams(truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert truncated(tuple(range(9)), sampling, max_sequence_len=10) == tuple(range(9))[-kept:]


def test_special_tokens_of_a_prompt_given_as_ids_are_echoed_as_the_answers_are(tokenizer: Tokenizer) -> None:
    ids = (*tokenizer.encode_part("<|im_start|>", "text"), *tokenizer.encode_part("a", "text"))
    for skip, text in ((True, "a"), (False, "<|im_start|>a")):
        spec = JobSpec(prompt=ids, sampling=SamplingParams(echo=True, skip_special_tokens=skip))
        assert echoed(tokenizer, spec, ids) == text

"""Logits processors against the plain float64 reference: every option, any mixture, and nothing for those without."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from sampling_reference import Rules, reference_allowed, reference_processed, reference_sample

from jitney_worker.engine.protocol import RowFailure, Sampled, ScheduledSequence
from jitney_worker.engine.sequence import LogitRules, Sequence, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.model.noise import noise_key
from jitney_worker.model.processors import edit
from jitney_worker.model.rows import SamplingRows
from jitney_worker.model.sampler import SamplingRow, sample

VOCAB = 150
END_IDS = (2, 7)


def spread_logits(num_rows: int, *, seed: int, spread: float = 3.0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def scheduled(
    prompt: tuple[int, ...] = (5,), output: tuple[int, ...] = (), name: str = "s", **options: Any
) -> ScheduledSequence:
    """A sequence whose next token is to be drawn."""
    params = SequenceParams(99, stop_token_ids=frozenset(END_IDS), **options)
    sequence = Sequence.of(SequenceRequest(SequenceId(name), prompt, params, (0, 0.0, 0, 0), output))
    return ScheduledSequence(sequence, sequence.num_tokens - 1, sequence.num_tokens, True)


def processed(logits: torch.Tensor, one: ScheduledSequence) -> torch.Tensor:
    """One row of logits after the processors."""
    (row,) = SamplingRows(logits.shape[1]).of([one])
    assert row.edits is not None
    edited = logits.clone()
    edit(edited, [row.edits])
    return edited[0]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[ScheduledSequence, dict[str, Any]]:
    """A sequence with any mixture of options, and what the reference is told of it.

    Few different tokens in what it has said, so that words match and counts go up.
    """
    few = st.integers(0, 11)
    prompt = tuple(draw(st.lists(few, min_size=1, max_size=6)))
    output = tuple(draw(st.lists(few, max_size=8)))
    rules = LogitRules(
        allowed_token_ids=draw(st.sampled_from([(), (), (3, 140, 7, 9), tuple(range(12)), (2,)])),
        bad_words=draw(st.sampled_from([(), ((3,),), ((*output[-1:], 9), (*output[-2:], 11), (*prompt[-1:], 4))])),
        logit_bias=draw(st.sampled_from([(), ((4, 3.5),), ((9, -100.0), (140, 100.0), (3, -0.1), (11, 0.3))])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.9, -2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -0.4])),
    )
    sampling = {
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.9])),
        "top_k": draw(st.sampled_from([0, 0, 1, 7, 999])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.9, 0.3])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0])),
        "seed": draw(st.integers(0, 3)),
        "choice": draw(st.integers(0, 3)),
    }
    min_tokens = draw(st.sampled_from([0, 0, 3, 99]))
    one = scheduled(prompt, output, rules=None if rules == LogitRules() else rules, min_tokens=min_tokens, **sampling)
    told = Rules(
        prompt,
        output,
        rules.allowed_token_ids,
        rules.bad_words,
        min_tokens,
        END_IDS,
        dict(rules.logit_bias),
        rules.repetition_penalty,
        rules.frequency_penalty,
        rules.presence_penalty,
    )
    return one, {**sampling, "rules": told, "position": len(prompt) + len(output)}


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.lists(sequences(), min_size=1, max_size=12), st.integers(0, 10**6), st.sampled_from([0.05, 2.0, 12.0]))
def test_any_mixture_of_options_and_rows_equals_the_float64_reference(
    asked: list[tuple[ScheduledSequence, dict[str, Any]]], seed: int, spread: float
) -> None:
    logits = spread_logits(len(asked), seed=seed, spread=spread)
    before = logits.clone()
    outcomes = sample(logits, SamplingRows(VOCAB).of([one for one, _ in asked]))
    for outcome, row, (_, told) in zip(outcomes, logits.tolist(), asked, strict=True):
        expected = reference_sample(row, **told)
        if expected is None:
            assert isinstance(outcome, RowFailure)
            assert outcome.code == "no_token_left"
        else:
            assert outcome == Sampled(expected)
    assert logits.equal(before), "the caller's logits are left as they are"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sequences(), st.integers(0, 10**6))
def test_processed_logits_equal_the_reference_to_the_bit(
    asked: tuple[ScheduledSequence, dict[str, Any]], seed: int
) -> None:
    one, told = asked
    logits = spread_logits(1, seed=seed)
    (row,) = SamplingRows(VOCAB).of([one])
    if row.edits is not None:
        edit(logits, [row.edits])
    assert logits[0].tolist() == reference_processed(spread_logits(1, seed=seed)[0].tolist(), told["rules"])


def test_what_a_sequence_has_counted_step_by_step_is_what_a_new_owner_counts_at_once() -> None:
    """Thirty steps with one state, against a state that is made for the last of them: after a hand-over."""
    rules = LogitRules(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3, bad_words=((5, 6),))
    one = scheduled(tuple(range(300)), rules=rules)
    kept = SamplingRows(VOCAB * 4)
    for step in range(30):
        logits = spread_logits(2, seed=step, vocab_size=VOCAB * 4)
        (row,) = kept.of([one])
        (fresh,) = SamplingRows(VOCAB * 4).of([one])
        assert row.edits is not None
        assert fresh.edits is not None
        edit(logits[:1], [row.edits])
        edit(logits[1:], [fresh.edits])
        again = spread_logits(2, seed=step, vocab_size=VOCAB * 4)
        edit(again[1:], [row.edits])
        assert logits[1].equal(again[1])
        one.sequence.token_ids.append(step * step % 7)
        one.stop += 1


def test_a_sequence_that_was_away_for_a_step_is_counted_anew() -> None:
    """Preempted, or replaced by another with its id: what was kept belongs to the object, not to the name."""
    rules = LogitRules(presence_penalty=2.0)
    rows = SamplingRows(VOCAB)
    first, second = scheduled(output=(1, 1), rules=rules), scheduled(output=(9,), rules=rules)
    rows.of([first])
    (replaced,) = rows.of([second])
    assert replaced.edits is not None
    assert replaced.edits.penalties is not None
    assert replaced.edits.penalties.tally.ids.tolist() == [9]
    rows.of([])
    assert rows._kept == {}


def test_frequency_and_presence_look_at_the_output_alone_and_repetition_at_both() -> None:
    logits = torch.full((1, 6), 1.0)
    logits[0, 3:] = -1.0
    one = scheduled((0, 3), (1, 4, 1), rules=LogitRules(frequency_penalty=0.25, presence_penalty=0.5))
    assert processed(logits, one).tolist() == [1.0, 0.0, 1.0, -1.0, -1.75, -1.0]
    one = scheduled((0, 3), (1, 4, 1), rules=LogitRules(repetition_penalty=2.0))
    assert processed(logits, one).tolist() == [0.5, 0.5, 1.0, -2.0, -2.0, -1.0]


def test_the_bias_comes_before_the_repetition_penalty() -> None:
    """-1 + 3 = 2, halved; the other way round it would be -2 + 3 = 1 as well, so a bias that tells is 4."""
    one = scheduled((0,), rules=LogitRules(repetition_penalty=2.0, logit_bias=((0, 4.0),)))
    assert processed(torch.tensor([[-1.0, 0.0]]), one).tolist() == [1.5, 0.0]


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [((), [9]), ((3,), [9, 4]), ((3, 4), [9, 5]), ((4, 4), [9]), ((1, 2, 3, 4), [9, 5]), ((3, 4, 5), [9])],
)
def test_a_bad_word_ends_where_the_output_ends_in_its_beginning(output: tuple[int, ...], forbidden: list[int]) -> None:
    """The prompt ends in 3: a word does not begin there."""
    rules = LogitRules(bad_words=((9,), (3, 4), (3, 4, 5)))
    found = processed(torch.zeros(1, 12), scheduled((1, 3), output, rules=rules))
    assert sorted(found.isinf().nonzero()[:, 0].tolist()) == sorted(forbidden)


@pytest.mark.parametrize(("num_output", "may_end"), [(0, False), (4, False), (5, True), (6, True)])
def test_no_end_token_is_chosen_among_the_first_min_tokens(num_output: int, may_end: bool) -> None:
    """B25"""
    logits = torch.zeros(1, VOCAB)
    logits[0, list(END_IDS)] = 50.0
    logits[0, 33] = 10.0
    one = scheduled(output=(1,) * num_output, min_tokens=5)
    (outcome,) = sample(logits, SamplingRows(VOCAB).of([one]))
    assert outcome == Sampled(2 if may_end else 33)


def test_min_tokens_holds_off_the_models_own_end_tokens_also_where_they_are_ignored() -> None:
    """B25, as vLLM does it: ignore_eos takes them out of the stop tokens, and min_tokens still forbids them."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 2, 33]] = torch.tensor([50.0, 40.0, 10.0])
    rows = SamplingRows(VOCAB)
    for num_output, token_id in ((0, 33), (4, 33), (5, 40)):
        one = scheduled(output=(1,) * num_output, min_tokens=5, eos_token_ids=frozenset({40}))
        assert sample(logits, rows.of([one])) == [Sampled(token_id)]


def test_an_end_token_of_minus_one_holds_off_no_other() -> None:
    """Some configurations say so that there is none; counted from behind, it would be the vocabulary's last."""
    logits = torch.zeros(1, VOCAB)
    logits[0, VOCAB - 1] = 10.0
    one = scheduled(min_tokens=5, eos_token_ids=frozenset({-1}))
    assert sample(logits, SamplingRows(VOCAB).of([one])) == [Sampled(VOCAB - 1)]


def test_end_tokens_beyond_the_vocabulary_touch_no_other_row() -> None:
    """A tokenizer may have more tokens than the model has logits; row 1 begins where row 0 ends."""
    logits = torch.zeros(2, 6)
    logits[1, 1] = 1.0
    rows = SamplingRows(6).of([scheduled(name="a", min_tokens=3), scheduled(name="b", min_tokens=3)])
    assert sample(logits, rows) == [Sampled(0), Sampled(1)]


def test_rules_that_leave_no_token_end_their_sequence_alone_and_say_so() -> None:
    logits = spread_logits(3, seed=1)
    only_ends = LogitRules(allowed_token_ids=END_IDS)
    asked = [scheduled(name="a"), scheduled(name="b", rules=only_ends, min_tokens=1), scheduled(name="c")]
    first, failed, last = sample(logits, SamplingRows(VOCAB).of(asked))
    assert isinstance(failed, RowFailure)
    assert failed.code == "no_token_left"
    assert "min_tokens" in failed.message
    assert [first, last] == sample(logits[[0, 2]], [SamplingRow(), SamplingRow()])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_edits_do_not_hide_that_the_model_went_wrong(poison: float) -> None:
    logits = spread_logits(2, seed=3)
    logits[0, 77] = poison
    rules = LogitRules(allowed_token_ids=(1, 2, 3))
    failed, other = sample(logits, SamplingRows(VOCAB).of([scheduled(rules=rules), scheduled(name="t", rules=rules)]))
    assert isinstance(failed, RowFailure)
    assert failed.code == "bad_logits"
    assert isinstance(other, Sampled)
    assert other.token_id in (1, 2, 3)


def test_logprobs_are_the_models_own_whatever_was_done_to_the_logits() -> None:
    """vLLM's default, raw_logprobs. B24: none is -Inf, though all but two tokens were forbidden."""
    logits = spread_logits(1, seed=4)
    rules = LogitRules(logit_bias=tuple((token_id, -100.0) for token_id in range(2, VOCAB)), repetition_penalty=1.7)
    one = scheduled(rules=rules, num_logprobs=5, temperature=0.6, seed=1)
    (outcome,) = sample(logits, SamplingRows(VOCAB).of([one]))
    assert isinstance(outcome, Sampled)
    assert outcome.token_id in (0, 1)
    assert outcome.logprobs is not None
    own = logits[0].double().log_softmax(-1)
    assert outcome.logprobs.logprob == pytest.approx(float(own[outcome.token_id]), abs=1e-5)
    assert [token_id for token_id, _ in outcome.logprobs.top] == own.topk(5).indices.tolist()


def test_draws_follow_what_min_p_leaves() -> None:
    """Chi-square with at most 14 degrees of freedom: 36.1 is passed once in a thousand, and the seed is fixed."""
    logits = spread_logits(1, seed=8, spread=1.5)
    allowed = reference_allowed(logits[0].tolist(), 1.3, 0, 1.0, 0.2)
    assert 5 < len(allowed) < 16
    num_draws = 8_000
    rows = [SamplingRow(1.3, key=noise_key(5, 0, position), min_p=0.2) for position in range(num_draws)]
    drawn = [outcome.token_id for outcome in sample(logits.expand(num_draws, VOCAB), rows)]  # type: ignore[union-attr]
    assert set(drawn) == set(allowed)
    expected = (logits[0, allowed].double() / 1.3).softmax(-1) * num_draws
    counts = torch.tensor([drawn.count(token_id) for token_id in allowed])
    assert float(((counts - expected) ** 2 / expected).sum()) < 36.1


def test_tokens_that_a_bias_lifts_or_lowers_are_reached_by_the_noise_as_if_the_model_had_said_so() -> None:
    """The depth that the noise reaches counts from the top of the edited logits, not of the model's own.

    The model's favourite is 60 above the rest and forbidden: everything that can win lies below the reach of its
    logit, and all of it must be drawn from.
    """
    logits = spread_logits(1, seed=5, spread=1.0)
    logits[0, 0] = 60.0
    rows = []
    for position in range(3_000):
        one = scheduled((5,) * (position + 1), rules=LogitRules(logit_bias=((0, -100.0),)), temperature=2.0, seed=3)
        rows += SamplingRows(VOCAB).of([one])
    outcomes = sample(logits.expand(3_000, VOCAB), rows)
    told = {"temperature": 2.0, "seed": 3, "rules": Rules(bias={0: -100.0})}
    expected = [reference_sample(logits[0].tolist(), position=position, **told) for position in range(1, 3_001, 100)]  # type: ignore[arg-type]
    assert [outcome.token_id for outcome in outcomes[::100]] == expected  # type: ignore[union-attr]
    assert len({outcome.token_id for outcome in outcomes}) > 100  # type: ignore[union-attr]


def test_a_neighbour_with_penalties_changes_nothing_for_those_without() -> None:
    """B20: A greedy and plain, B with frequency_penalty 1.05 and a longer prompt, in both orders."""
    logits = spread_logits(2, seed=9)
    a = scheduled((1, 2), (3,), name="a")
    b = scheduled(tuple(range(60)), (3, 3, 4), name="b", rules=LogitRules(frequency_penalty=1.05))
    alone = [sample(logits[i : i + 1], SamplingRows(VOCAB).of([one]))[0] for i, one in enumerate((a, b))]
    assert sample(logits, SamplingRows(VOCAB).of([a, b])) == alone
    assert sample(logits.flip(0), SamplingRows(VOCAB).of([b, a])) == alone[::-1]

"""How sequences end, what is said about it, and that no ending costs a block."""

from __future__ import annotations

import random

import pytest
from scripted_model import FAILURE, HashModel, Outcome, PhraseRules, ScriptedModel, request, run, settings, solo

from jitney.errors import InvalidJob, PromptTooLong
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import RowFailure
from jitney_worker.engine.sequence import SequenceId

END = 2


@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_max_tokens_is_exactly_the_number_of_tokens_sampled(max_tokens: int) -> None:
    """B34"""
    outcome = run(LocalEngine(settings(), ScriptedModel({"s": [9] * 30})), [request("s", 3, max_tokens)])
    assert outcome.said("s") == ((9,) * max_tokens, "length")


@pytest.mark.parametrize(("at", "reason"), [(4, "stop"), (5, "stop"), (6, "length")])
def test_an_end_token_at_the_limit_is_a_stop_and_is_counted(at: int, reason: str) -> None:
    """B34"""
    engine = LocalEngine(settings(), ScriptedModel({"s": [9] * (at - 1) + [END]}))
    tokens, why = run(engine, [request("s", 3, 5, stop_ids=[END])]).said("s")
    assert tokens == ((9,) * (at - 1) + (END,))[:5]
    assert why == reason


@pytest.mark.parametrize(("at", "reason"), [(4, "stop"), (5, "stop"), (6, "length")])
def test_a_stop_string_completed_at_the_limit_is_a_stop(at: int, reason: str) -> None:
    """B34"""
    rules = PhraseRules({"s": (7, 8)})
    engine = LocalEngine(settings(), ScriptedModel({"s": [9] * (at - 2) + [7, 8]}), rules)
    tokens, why = run(engine, [request("s", 3, 5, stop_strings=True)]).said("s")
    assert tokens == ((9,) * (at - 2) + (7, 8))[:5]
    assert why == reason
    assert rules.dropped == ["s"]


@pytest.mark.parametrize(
    ("min_tokens", "max_tokens", "num_said", "reason"),
    [(0, 10, 2, "stop"), (1, 10, 2, "stop"), (2, 10, 3, "stop"), (3, 10, 8, "stop"), (8, 10, 10, "length")],
)
def test_an_end_token_among_the_first_min_tokens_does_not_end_the_sequence(
    min_tokens: int, max_tokens: int, num_said: int, reason: str
) -> None:
    """B25: end tokens at 2, 3 and 8. The sampler forbids them; a runner that says one all the same ends nothing."""
    script: list[int | RowFailure] = [9, END, END, 9, 9, 9, 9, END, 9, 9]
    one = request("s", 3, max_tokens, stop_ids=[END], min_tokens=min_tokens)
    tokens, why = run(LocalEngine(settings(), ScriptedModel({"s": script})), [one]).said("s")
    assert (tokens, why) == (tuple(script[:num_said]), reason)


@pytest.mark.parametrize(("min_tokens", "num_fresh", "reason"), [(2, 0, "stop"), (3, 7, "length")])
def test_a_resumed_output_that_ends_in_an_end_token_is_whole_only_after_min_tokens(
    min_tokens: int, num_fresh: int, reason: str
) -> None:
    one = request("s", 3, 10, stop_ids=[END], min_tokens=min_tokens, output=[9, 9, END])
    tokens, why = run(LocalEngine(settings(), ScriptedModel({"s": [9] * 10})), [one]).said("s")
    assert (len(tokens), why) == (num_fresh, reason)


def test_the_context_limit_reached_first_ends_as_length() -> None:
    """B34, B36: a max_tokens beyond the context is capped to the room left, never the prompt cut."""
    one = request("s", 250, 100)
    outcome = run(LocalEngine(settings(max_model_len=256), HashModel()), [one])
    assert outcome.said("s") == solo(one, 256)
    assert len(outcome.tokens[one.id]) == 6
    assert outcome.said("s")[1] == "length"


def test_a_prompt_one_short_of_the_context_gets_one_token() -> None:
    """B36"""
    one = request("s", 255, 10**6)
    assert run(LocalEngine(settings(max_model_len=256), HashModel()), [one]).said("s") == solo(one, 256)


@pytest.mark.parametrize("num_tokens", [256, 300])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_with_both_numbers(num_tokens: int) -> None:
    """B36"""
    engine = LocalEngine(settings(max_model_len=256), HashModel())
    with pytest.raises(PromptTooLong) as refused:
        engine.check_fits(request("s", num_tokens, 1))
    assert str(refused.value) == (f"the prompt is {num_tokens} tokens, but at most 255 fit: shorten it")
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("prompt", "max_tokens", "param"), [([], 5, "prompt"), ([1], 0, "max_tokens")])
def test_nothing_to_read_or_nothing_to_say_is_refused(prompt: list[int], max_tokens: int, param: str) -> None:
    """B26, engine side."""
    engine = LocalEngine(settings(), HashModel())
    with pytest.raises(InvalidJob) as refused:
        engine.add(request("s", prompt, max_tokens))
    assert refused.value.param == param
    assert not engine.has_work()


@pytest.mark.parametrize("at", [0, 4])
def test_a_row_that_cannot_be_sampled_ends_its_own_sequence_alone(at: int) -> None:
    """B21: the other seven say what they say alone, and the failed one has said nothing wrong."""
    requests = [request(f"s{n}", 20 + n, 12, arrival=n) for n in range(8)]
    engine = LocalEngine(settings(), HashModel(fails_at={requests[3].id: at}))
    outcome = run(engine, requests)
    failed = outcome.endings[requests[3].id]
    assert (failed.error, failed.finish_reason, failed.token_ids) == (FAILURE, None, ())
    assert tuple(outcome.tokens[failed.id]) == solo(requests[3])[0][:at]
    for one in requests[:3] + requests[4:]:
        assert outcome.said(one.id) == solo(one)
    assert engine.capacity().num_free_blocks == engine.capacity().num_blocks


def test_nobody_inherits_the_cached_blocks_of_a_sequence_whose_numbers_went_wrong() -> None:
    """B21: the cause may lie in the cache itself; a hit would spread it to whoever sends the same prompt."""
    bad, again = request("bad", range(64), 12, arrival=0), request("again", range(64), 12, arrival=1)
    engine = LocalEngine(settings(max_num_seqs=1), HashModel(fails_at={bad.id: 3}))
    outcome = run(engine, [bad, again])
    assert outcome.endings[again.id].num_cached_tokens == 0
    assert outcome.said("again") == solo(again)


def test_a_resumed_sequence_goes_on_from_the_tokens_of_earlier_attempts() -> None:
    whole = request("s", 30, 40)
    said, reason = solo(whole)
    for done in (1, 16, 39):
        outcome = run(LocalEngine(settings(), HashModel()), [request("s", 30, 40, output=said[:done])])
        assert outcome.said("s") == (said[done:], reason)


@pytest.mark.parametrize(
    ("output", "max_tokens", "reason"),
    [([5, 6, END], 10, "stop"), ([5, 6, 7], 3, "length"), ([5, 6, END], 3, "stop"), ([5] * 9, 3, "length")],
)
def test_a_sequence_whose_output_is_already_whole_ends_without_computing(
    output: list[int], max_tokens: int, reason: str
) -> None:
    model = HashModel()
    engine = LocalEngine(settings(), model)
    engine.add(request("s", 3, max_tokens, output=output, stop_ids=[END]))
    assert engine.has_work()
    (delta,) = engine.step()
    assert (delta.id, delta.token_ids, delta.finish_reason) == ("s", (), reason)
    assert not engine.has_work()
    assert model.steps == []


def test_the_ending_of_a_whole_sequence_comes_out_beside_what_others_gained() -> None:
    engine = LocalEngine(settings(), HashModel())
    engine.add(request("running", 3, 5))
    engine.add(request("whole", 3, 2, output=[4, 4]))
    assert {delta.id: len(delta.token_ids) for delta in engine.step()} == {"whole": 0, "running": 1}
    engine.add(request("whole", 3, 2, output=[4, 4]))
    assert engine.abort(SequenceId("whole"))
    assert [delta.id for delta in engine.step()] == ["running"]


def test_log_probabilities_travel_with_their_tokens() -> None:
    engine = LocalEngine(settings(), HashModel())
    engine.add(request("with", 3, 2, num_logprobs=0))
    engine.add(request("without", 3, 2, arrival=1))
    with_logprobs, without = engine.step()
    assert [lp.logprob for lp in with_logprobs.logprobs] == [-float(with_logprobs.token_ids[0])]
    assert without.logprobs == ()


def test_text_rules_hear_every_token_once_even_when_preempted() -> None:
    """The rules keep a state of their own: a recomputed token must not reach them a second time."""
    rules = PhraseRules({f"s{n}": (999,) for n in range(4)})
    requests = [request(f"s{n}", 20, 64, arrival=n, stop_strings=True) for n in range(4)]
    engine = LocalEngine(settings(num_blocks=12), HashModel(), rules)
    heard: dict[str, list[int]] = {}
    outcome = run(engine, requests, each_step=lambda _: heard.update({k: list(v) for k, v in rules.heard.items()}))
    assert engine.snapshot().num_preemptions > 0
    for one in requests:
        assert heard[one.id] == outcome.tokens[one.id][:-1]
    assert sorted(rules.dropped) == ["s0", "s1", "s2", "s3"]


def test_text_rules_begin_with_the_output_of_earlier_attempts() -> None:
    rules = PhraseRules({"s": (7, 8)})
    engine = LocalEngine(settings(), ScriptedModel({"s": [9, 7, 8]}), rules)
    assert run(engine, [request("s", 3, 9, output=[9, 7], stop_strings=True)]).said("s") == ((8,), "stop")


def test_stop_strings_without_text_rules_are_refused_rather_than_ignored() -> None:
    engine = LocalEngine(settings(), HashModel())
    with pytest.raises(ValueError, match="needs text rules, but the engine was built without any"):
        engine.add(request("s", 3, stop_strings=True))


def test_the_same_id_twice_is_refused_and_the_first_goes_on() -> None:
    engine = LocalEngine(settings(), HashModel())
    one = request("s", 3, 4)
    engine.add(one)
    with pytest.raises(ValueError, match="sequence s is in the engine already"):
        engine.add(one)
    assert run(engine).said("s") == solo(one)
    engine.add(one)
    assert run(engine).said("s") == solo(one)


def test_an_aborted_sequence_is_gone_at_once_in_any_state() -> None:
    model = HashModel()
    engine = LocalEngine(settings(max_num_seqs=2, max_num_batched_tokens=40, num_blocks=20), model)
    running, reading, waiting = (
        request("running", 3, 50, arrival=0),
        request("reading", 100, 5, arrival=1),
        request("waiting", 3, 50, arrival=2),
    )
    for one in (running, reading, waiting):
        engine.add(one)
    engine.step()
    assert engine.capacity().num_free_blocks == 20 - 1 - 7
    assert engine.abort(reading.id)
    assert engine.capacity().num_free_blocks == 19
    assert engine.abort(waiting.id)
    assert engine.abort(running.id)
    assert not engine.abort(running.id)
    assert not engine.abort(SequenceId("never seen"))
    assert engine.capacity().num_free_blocks == 20
    assert not engine.has_work()


def test_a_preempted_sequence_can_be_aborted_while_it_waits() -> None:
    model = HashModel()
    engine = LocalEngine(settings(num_blocks=4, admission_reserve=0.0), model)
    first, second = request("first", 16, 33, arrival=0), request("second", 16, 33, arrival=1)
    engine.add(first)
    engine.add(second)
    while not model.preempted:
        engine.step()
    assert engine.abort(second.id)
    assert list(run(engine).endings) == [first.id]
    assert engine.capacity().num_free_blocks == 4


@pytest.mark.parametrize("caching", [False, True])
def test_five_hundred_sequences_of_every_kind_leave_no_block_behind(caching: bool) -> None:
    """B10"""
    chance = random.Random(10)
    rules = PhraseRules({f"s{n}/{c}": (chance.randrange(97),) for n in range(500) for c in range(3)})
    model = HashModel(fails_at={SequenceId(f"s{n}/0"): chance.randrange(5) for n in range(0, 500, 17)})
    engine = LocalEngine(
        settings(num_blocks=14, max_num_seqs=8, enable_prefix_caching=caching, max_num_batched_tokens=128), model, rules
    )
    outcome, kinds, num_aborted = Outcome(), set[str](), 0
    for n in range(500):
        for choice in range(3 if n % 9 == 0 else 1):
            one = request(
                f"s{n}/{choice}",
                [n % 5] * chance.randrange(1, 60),
                chance.randrange(1, 30),
                arrival=n,
                stop_ids=range(90, 97) if n % 3 == 0 else (),
                stop_strings=n % 4 == 0,
            )
            engine.add(one)
        with pytest.raises(PromptTooLong):
            engine.add(request(f"refused{n}", 225))
        for _ in range(chance.randrange(6)):
            outcome.take(engine.step())
        if n % 6 == 0:
            num_aborted += engine.abort(SequenceId(f"s{max(0, n - chance.randrange(4))}/0"))
    outcome.take(delta for one in [run(engine)] for delta in one.endings.values())
    kinds = {delta.finish_reason or "failed" for delta in outcome.endings.values()}
    assert kinds == {"stop", "length", "failed"}
    assert num_aborted > 10
    assert engine.snapshot().num_preemptions > 0
    assert engine.capacity().num_free_blocks == 14
    assert not rules.heard
    engine.check()

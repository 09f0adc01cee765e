"""How answers end: the real engine, real stop rules and spelling, and a model that says what the test wrote (B34).

The engine decides on the ending, the speller makes the text; both must agree with the ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import ModelOutput, Sampled, SchedulerOutput
from jitney_worker.engine.sequence import FinishReason, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.text.rules import StopRules
from jitney_worker.text.spelling import Speller
from jitney_worker.text.tokenizer import Tokenizer

EOS = 2


class Script:
    """A model that says these ids, one for each step, whatever it is asked."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        return ModelOutput(
            [
                Sampled(self._ids[row.sequence.num_output_tokens % len(self._ids)])
                for row in scheduled.scheduled
                if row.samples
            ]
        )


@dataclass
class Answer:
    ids: list[int]
    text: str
    finish_reason: FinishReason | None


def answer(
    tokenizer: Tokenizer,
    ids: list[int],
    *,
    max_tokens: int = 100,
    stop: tuple[str, ...] = (),
    end_ids: tuple[int, ...] = (EOS,),
    said: int = 0,
    max_model_len: int = 1_000,
) -> Answer:
    """Run one sequence to its end. said: how many of the ids an earlier attempt has published."""
    rules = StopRules(tokenizer)
    settings = EngineSettings(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=max_model_len, block_size=16, num_blocks=128
    )
    engine = LocalEngine(settings, Script(ids), rules)
    name = SequenceId("queue.job/0")
    params = SequenceParams(max_tokens, stop_token_ids=frozenset(end_ids), has_stop_strings=bool(stop))
    rules.register(name, stop, end_ids)
    engine.add(SequenceRequest(name, (5, 6, 7), params, (0, 0.0, 0, 0), output_ids=tuple(ids[:said])))
    speller = Speller(tokenizer, stop, end_ids)
    result = Answer(ids[:said], speller.replay(ids[:said]), None)
    while engine.has_work():
        for delta in engine.step():
            for token_id in delta.token_ids:
                result.ids.append(token_id)
                result.text += speller.push(token_id).text
            result.finish_reason = delta.finish_reason
    result.text += speller.flush()
    return result


@pytest.fixture(scope="module")
def letters(load) -> tuple[Tokenizer, list[int]]:  # type: ignore[no-untyped-def]
    """A tokenizer, and ids that spell "abcdefghijklmnopqrstuvwxyz", a letter each."""
    tokenizer: Tokenizer = load("byte-bpe")
    return tokenizer, [tokenizer.encode_prompt(chr(code))[0] for code in range(ord("a"), ord("z") + 1)]


@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_the_limit_counts_every_sampled_token(letters: tuple[Tokenizer, list[int]], max_tokens: int) -> None:
    tokenizer, ids = letters
    wanted = Answer(ids[:max_tokens], "abcdefghijklmnopqrstuvwxyz"[:max_tokens], "length")
    assert answer(tokenizer, ids, max_tokens=max_tokens) == wanted


@pytest.mark.parametrize("max_tokens", [4, 5])
def test_an_end_token_ends_the_answer_also_at_the_very_limit(
    letters: tuple[Tokenizer, list[int]], max_tokens: int
) -> None:
    tokenizer, ids = letters
    said = [*ids[:3], EOS, *ids[3:]]
    assert answer(tokenizer, said, max_tokens=max_tokens) == Answer([*ids[:3], EOS], "abc", "stop")


def test_an_end_token_that_is_ignored_counts_and_is_no_text(letters: tuple[Tokenizer, list[int]]) -> None:
    tokenizer, ids = letters
    said = [*ids[:2], EOS, *ids[2:]]
    assert answer(tokenizer, said, max_tokens=5, end_ids=()) == Answer(said[:5], "abcd", "length")


def test_a_stop_token_of_the_user_ends_the_answer_and_is_not_spelled(letters: tuple[Tokenizer, list[int]]) -> None:
    tokenizer, ids = letters
    assert answer(tokenizer, ids, end_ids=(EOS, ids[3])) == Answer(ids[:4], "abc", "stop")


@pytest.mark.parametrize("max_tokens", [6, 7, 100])
def test_a_stop_string_ends_the_answer_also_at_the_very_limit(
    letters: tuple[Tokenizer, list[int]], max_tokens: int
) -> None:
    """Its tokens count, up to the one that completed it; none of it shows."""
    tokenizer, ids = letters
    wanted = Answer(ids[:6], "abc", "stop")
    assert answer(tokenizer, ids, max_tokens=max_tokens, stop=("def", "z")) == wanted


def test_what_a_stop_string_held_back_shows_when_the_limit_ends_the_answer(
    letters: tuple[Tokenizer, list[int]],
) -> None:
    tokenizer, ids = letters
    assert answer(tokenizer, ids, max_tokens=5, stop=("def",)) == Answer(ids[:5], "abcde", "length")


def test_what_a_stop_string_held_back_shows_when_an_end_token_ends_the_answer(
    letters: tuple[Tokenizer, list[int]],
) -> None:
    tokenizer, ids = letters
    assert answer(tokenizer, [*ids[:5], EOS], stop=("defg",)) == Answer([*ids[:5], EOS], "abcde", "stop")


def test_the_context_ends_an_answer_as_the_limit_does(letters: tuple[Tokenizer, list[int]]) -> None:
    tokenizer, ids = letters
    assert answer(tokenizer, ids, max_model_len=10) == Answer(ids[:7], "abcdefg", "length")


@pytest.mark.parametrize("said", range(6))
@pytest.mark.parametrize("stop", [("def",), ("cde", "f"), ()])
def test_an_answer_resumed_anywhere_is_the_answer(
    letters: tuple[Tokenizer, list[int]], said: int, stop: tuple[str, ...]
) -> None:
    """Also where the earlier attempt ended in the middle of a stop string."""
    tokenizer, ids = letters
    undisturbed = answer(tokenizer, ids, max_tokens=9, stop=stop)
    if said < len(undisturbed.ids):
        assert answer(tokenizer, ids, max_tokens=9, stop=stop, said=said) == undisturbed
